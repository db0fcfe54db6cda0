"""How long drafts should be, by steps of given times and guesses that hold or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.draft_gain import DraftGain, MeasuredDrafter
from gptserve.engine.scheduling.drafter import Drafter
from gptserve.engine.scheduling.grammar_drafter import GrammarDrafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from tests.engine.runs import make_engine, make_request, run, token_ids

PLAIN_S = 0.010


@pytest.fixture(autouse=True)
def drafts_always_pay() -> None:
    """Here they do not."""


def sequence() -> SequenceState:
    return SequenceState(Request("r", (1,), SamplingParams(), seed=0), 0, [1, 2], num_computed=1)


def step(num_seqs: int, num_drafted: int = 0) -> ScheduledBatch:
    """Return a step of sequences that decode; the first one has a draft."""
    drafted = ScheduledSequence(sequence(), 1 + num_drafted, (7,) * num_drafted)
    return ScheduledBatch((drafted, *(ScheduledSequence(sequence(), 1) for _ in range(num_seqs - 1))))


def gain(row_cost: float, num_seqs: int = 1) -> DraftGain:
    """Return what has seen steps of so many sequences, where a row of a draft takes row_cost of a token's time."""
    made = DraftGain()
    learn(made, row_cost, num_seqs)
    return made


def learn(made: DraftGain, row_cost: float, num_seqs: int) -> None:
    for _ in range(40):
        made.observe(step(num_seqs), PLAIN_S)
        made.observe(step(num_seqs, 4), PLAIN_S * (1 + 4 * row_cost / num_seqs))


def drafts(made: DraftGain, drafting: SequenceState, share: float, num_steps: int, num_seqs: int = 1) -> Iterator[int]:
    """Yield the lengths of the drafts of a sequence, of which about a share of guesses hold."""
    debt = 0.0
    for _ in range(num_steps):
        length = made.max_tokens(drafting, num_seqs)
        num_held = 0
        while num_held < length and (debt := debt + share) >= 1:
            debt -= 1
            num_held += 1
        if length:
            made.note(drafting, length, num_held, num_seqs)
        yield length


def test_where_rows_cost_little_and_guesses_hold_drafts_are_long() -> None:
    assert list(drafts(gain(0.02), sequence(), 1.0, 20))[-1] >= 11


def test_where_rows_cost_more_than_guesses_give_drafts_stop_and_are_tried_now_and_then() -> None:
    lengths = list(drafts(gain(0.5), sequence(), 0.0, 1000))
    assert [at for at, length in enumerate(lengths) if length] == [0, 1, 66, 195, 452, 965]
    assert sum(lengths[2:]) == 16


def test_a_trial_that_holds_ends_the_wait() -> None:
    made, drafting = gain(0.5), sequence()
    list(drafts(made, drafting, 0.0, 100))
    assert 0 in drafts(made, drafting, 0.0, 30)
    assert min(list(drafts(made, drafting, 1.0, 400))[-50:]) > 0


def test_a_row_costs_what_it_costs_among_as_many_sequences() -> None:
    made = gain(0.02, 1)
    learn(made, 0.9, 8)
    alone, beside = sequence(), sequence()
    assert sum(drafts(made, alone, 0.5, 50)) > 20
    assert sum(list(drafts(made, beside, 0.5, 60, 8))[5:]) == 0


def test_rows_that_take_more_than_a_step_are_never_worth_it() -> None:
    assert sum(list(drafts(gain(3.0), sequence(), 0.9, 60))[1:]) == 0


def test_a_new_sequence_begins_with_the_odds_of_those_before() -> None:
    made = gain(0.2)
    assert made.max_tokens(sequence(), 1) > 5
    for _ in range(30):
        list(drafts(made, sequence(), 0.0, 3))
    assert 0 < made.max_tokens(sequence(), 1) <= 4


def test_a_step_without_drafts_is_asked_for_until_one_is_measured() -> None:
    made = DraftGain()
    wanted = list[bool]()
    for _ in range(9):
        wanted.append(made.wants_plain(1))
        made.observe(step(1, 4), PLAIN_S)
    assert wanted == [False] * 8 + [True]
    made.observe(step(1), PLAIN_S)
    for _ in range(256):
        assert not made.wants_plain(1)
        made.observe(step(1, 4), PLAIN_S)
    assert made.wants_plain(1)


@pytest.mark.parametrize("num_drafted", [0, 4])
def test_a_step_that_was_held_up_is_not_counted(num_drafted: int) -> None:
    made = gain(0.02)
    for _ in range(20):
        made.observe(step(1, num_drafted), 1.0)
        made.observe(step(1), PLAIN_S)
    assert list(drafts(made, sequence(), 1.0, 20))[-1] >= 11


def test_steps_that_take_longer_from_now_on_are_counted() -> None:
    made = gain(0.02)
    for _ in range(50):
        made.observe(step(1), 5 * PLAIN_S)
        made.observe(step(1, 4), 5 * PLAIN_S * 1.08)
    assert list(drafts(made, sequence(), 1.0, 20))[-1] >= 11
    assert made._steps[0].plain_seconds == pytest.approx(5 * PLAIN_S)


def test_a_step_with_a_part_of_a_prompt_tells_nothing() -> None:
    made, prompt = gain(0.02), sequence()
    prompt.token_ids = list(range(50))
    batch = ScheduledBatch((*step(1, 4).items, ScheduledSequence(prompt, 30)))
    for _ in range(100):
        made.observe(batch, 0.03)
    assert list(drafts(made, sequence(), 1.0, 20, 2))[-1] >= 11


def test_a_sequence_that_has_ended_is_forgotten() -> None:
    made, ended = gain(0.5), sequence()
    list(drafts(made, ended, 0.0, 100))
    made.forget(ended)
    assert made._guesses == {}


class AlwaysSevens(Drafter):
    """Guesses as many as it may."""

    max_step_tokens = 12

    def begin_step(self, num_seqs: int) -> None:
        pass

    def may_draft(self, sequence: SequenceState) -> bool:
        return True

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        return (7,) * max_tokens

    def forget(self, sequence: SequenceState) -> None:
        pass


class Forcing:
    """The matcher of a grammar that forces a text at every other call."""

    def __init__(self) -> None:
        self.calls = 0

    def forced(self, known: list[int], max_tokens: int) -> list[int]:
        self.calls += 1
        return [3] * max_tokens if self.calls % 2 else []


def test_forced_texts_come_always_and_guesses_beside_them_only_where_they_pay() -> None:
    measured = MeasuredDrafter(AlwaysSevens())
    drafter, drafting = GrammarDrafter(measured), sequence()
    drafting.matcher = Forcing()  # type: ignore[assignment]
    for _ in range(40):
        drafter.observe(step(1), PLAIN_S)
        drafter.observe(step(1, 4), PLAIN_S * 3)
    drafts = []
    for _ in range(40):
        drafter.begin_step(1)
        drafts.append(drafter.draft(drafting, 8))
        num_held = 8 if drafts[-1][:1] == (3,) else 0
        drafter.note(drafting, len(drafts[-1]), num_held)
    assert drafts[::2] == [(3,) * 8] * 20
    assert [len(draft) for draft in drafts[1::2]][2:] == [0] * 18


def test_answers_are_the_same_whatever_pays(tiny_gpt2: Path) -> None:
    requests = [make_request(f"r{i}", [1, 2, 3] * (i + 2), max_tokens=60, temperature=0.3 * i) for i in range(4)]
    plain, drafting = make_engine(tiny_gpt2), make_engine(tiny_gpt2, speculative_ngram=2)
    expected = {i: token_ids(outputs) for i, outputs in run(plain, requests).items()}
    for _ in range(3):
        assert {i: token_ids(outputs) for i, outputs in run(drafting, requests).items()} == expected
    assert drafting.stats.num_draft_tokens > 0
