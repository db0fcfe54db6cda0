"""Counts in a tensor against those of the host, whatever the order of steps, drafts, preemptions, failures and ends."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptserve.engine.backends.gpu.token_counts import DeviceCounts
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore

CPU = torch.device("cpu")
VOCAB, NUM_SEATS = 6, 4


class Sequences:
    """Live sequences whose tokens are random, and steps that sample some of them, one after the other or ahead."""

    has_drafts = False
    """Whether the latest step has any: then the next one waits for its tokens."""

    def __init__(self, data: st.DataObject) -> None:
        self._data, self.counts, self.live = data, DeviceCounts(VOCAB, NUM_SEATS, CPU), list[TokensBefore]()

    def tokens(self, min_size: int, max_size: int) -> list[int]:
        return self._data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=min_size, max_size=max_size))

    def begin(self) -> None:
        """A request, or one that goes on after a restart: then it knows tokens of its completion already."""
        prompt = self.tokens(1, 4)
        self.live.append(TokensBefore(TokenCounts(len(prompt)), prompt + self.tokens(0, 3)))

    def end(self) -> None:
        if self.live:
            self.live.pop(self._data.draw(st.integers(0, len(self.live) - 1)))
            gc.collect()

    def step(self) -> None:
        """Sample a few; the others wait, or were preempted."""
        first = self.sample(range(len(self.live)), [])
        if self.has_drafts or not self._data.draw(st.booleans()):
            self.accept(first, self._data.draw(st.booleans()))
            return
        ending = {index for index in first if self._data.draw(st.booleans())}
        for row, index in enumerate(first):
            if index not in ending:
                self.live[index].known.append(~row)
        others = [index for index in range(len(self.live)) if index not in ending]
        ahead = self.sample(others, [token_id for [token_id] in first.values()])
        for index in first:
            if self.live[index].known[-1] < 0:
                self.live[index].known.pop()
        is_good = self._data.draw(st.booleans())
        self.accept(first, is_good)
        self.accept(ahead, is_good and self._data.draw(st.booleans()))

    def sample(self, indices: Sequence[int], sampled_before: list[int]) -> dict[int, list[int]]:
        """Launch a step of some, while one runs that samples these tokens; return what it gives to which sequences."""
        some = st.lists(st.sampled_from(indices), unique=True, max_size=NUM_SEATS) if indices else st.just([])
        chosen = self._data.draw(some)
        if not chosen:
            self.counts.release_if_unused()
            assert self.live or self.counts.words is None
            return {}
        drafts = {index: tuple(self.tokens(0, 2)) for index in chosen}
        self.has_drafts = any(drafts.values())
        rows = [self.live[i]._replace(draft=drafts[i][:n]) for i in chosen for n in range(len(drafts[i]) + 1)]
        seats, news, alone = self.counts.seat(rows)
        assert [rows[index].kept for index in alone] == [self.live[i].kept for i in chosen if not drafts[i]]
        if self._data.draw(st.integers(0, 9)) == 0:
            return {}  # the launch failed before the device was told anything
        self.counts.update(*map(torch.from_numpy, news))
        self.check(rows, seats, sampled_before)
        token_ids = self.tokens(len(alone), len(alone))
        self.counts.add_sampled(torch.tensor([seats[i] for i in alone], dtype=torch.int64), torch.tensor(token_ids))
        its_tokens = iter(token_ids)
        return {i: self.accepted(drafts[i]) if drafts[i] else [next(its_tokens)] for i in chosen}

    def accepted(self, draft: tuple[int, ...]) -> list[int]:
        return [*draft[: self._data.draw(st.integers(0, len(draft)))], *self.tokens(1, 1)]

    def check(self, rows: list[TokensBefore], seats: list[int], sampled_before: list[int]) -> None:
        assert self.counts.words is not None
        for row, seat in zip(rows, seats, strict=True):
            known = [sampled_before[~token_id] if token_id < 0 else token_id for token_id in row.known]
            expected = np.zeros(VOCAB, np.int32)
            num_prompt = row.kept.num_prompt_tokens
            expected[list(set(known[:num_prompt]))] = 1
            for token, count in Counter(known[num_prompt:]).items():
                expected[token] += 2 * count
            assert self.counts.words[seat].tolist() == expected.tolist()
            of_host = TokensBefore(TokenCounts(num_prompt), known).counts()
            assert dict(zip(of_host.token_ids, of_host.counts, strict=True)) == {
                token: word >> 1 for token, word in enumerate(expected.tolist()) if word
            }

    def accept(self, sampled: dict[int, list[int]], is_good: bool) -> None:
        """Give each sequence its tokens, unless the step fails after it has counted them."""
        if is_good:
            for index, token_ids in sampled.items():
                self.live[index].known.extend(token_ids)


@pytest.mark.parametrize("num", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_counts_of_the_device_are_those_of_the_host(num: int) -> None:
    @settings(max_examples=num)
    @given(st.data())
    def serve(data: st.DataObject) -> None:
        sequences = Sequences(data)
        kinds = ["begin", "step", "step", "step", "end"]
        for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=25)):
            getattr(sequences, kind)()

    serve()


def before(num_tokens: int) -> TokensBefore:
    return TokensBefore(TokenCounts(1), [1] * num_tokens)


def test_a_sequence_is_sent_once_and_then_only_what_drafts_brought() -> None:
    counts, sequence = DeviceCounts(VOCAB, NUM_SEATS, CPU), before(5)
    _, news, alone = counts.seat([sequence])
    assert [array.tolist() for array in news] == [[0], [1] * 5, [1, 2, 2, 2, 2]]
    assert alone == [0]
    sequence.known.append(3)  # which the step has counted
    _, news, alone = counts.seat([sequence, sequence._replace(draft=(2,))])
    assert not any(map(len, (*news, alone)))
    sequence.known.extend([2, 4])
    assert counts.seat([sequence])[1].places.tolist() == [2, 4]


@pytest.mark.parametrize("draft", [(), (2,)])
def test_a_sequence_is_sent_again_after_a_step_that_did_not_give_it_a_token(draft: tuple[int, ...]) -> None:
    """It may have failed before the device was told to count: nobody knows what is in the seat."""
    counts, sequence = DeviceCounts(VOCAB, NUM_SEATS, CPU), before(3)
    rows = [sequence._replace(draft=draft[:n]) for n in range(len(draft) + 1)]
    first, again = (counts.seat(rows)[1] for _ in range(2))
    assert [array.tolist() for array in again] == [array.tolist() for array in first] == [[0], [1] * 3, [1, 2, 2]]


def test_a_foreseen_token_is_counted_by_the_step_that_samples_it() -> None:
    counts, sequence, newcomers = DeviceCounts(VOCAB, NUM_SEATS, CPU), before(3), [before(2) for _ in range(3)]
    counts.seat([*newcomers[:2], sequence])
    sequence.known.append(~2)
    seats, news, alone = counts.seat([sequence, newcomers[2]])
    assert seats == [2, 3]
    assert news.fresh.tolist() == [3]
    assert set(news.places.tolist()) == {3 * VOCAB + 1}
    assert alone == [0, 1]


def test_a_row_without_a_token_changes_no_count() -> None:
    counts = DeviceCounts(VOCAB, NUM_SEATS, CPU)
    counts.reserve()
    assert counts.words is not None
    counts.words.zero_()
    counts.add_sampled(torch.tensor([0]), torch.tensor([-1]))
    assert not counts.words.any()


def test_memory_is_taken_while_sequences_live() -> None:
    counts, sequences = DeviceCounts(VOCAB, NUM_SEATS, CPU), [before(2) for _ in range(2)]
    assert counts.words is None
    counts.seat(sequences)
    assert counts.words is not None
    assert counts.words.shape == (NUM_SEATS, VOCAB)
    counts.release_if_unused()
    assert counts.words is not None
    del sequences
    gc.collect()
    counts.release_if_unused()
    assert counts.words is None


def test_sequences_that_take_turns_share_seats() -> None:
    counts, sequences = DeviceCounts(VOCAB, 2, CPU), [before(2 + i) for i in range(9)]
    for turn in range(6):
        both = [sequences[turn], sequences[turn + 3]]
        seats, news, _ = counts.seat(both)
        counts.update(*map(torch.from_numpy, news))
        assert counts.words is not None
        assert sorted(seats) == [0, 1]
        assert counts.words[seats, 1].tolist() == [1 + 2 * (len(its.known) - 1) for its in both]
