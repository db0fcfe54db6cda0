"""The rules of service, one by one, on hand-made situations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from gptserve.engine.blame import Blame
from gptserve.engine.request import FinishReason, Request, SamplingParams
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS, Drafter
from gptserve.engine.scheduling.prompt_pace import Budget, Pace
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import Progress, ScheduledBatch, SequenceState
from tests.engine.scheduling.invariants import check_scheduler

BLOCK_SIZE = 4
EOS = 99


def make_scheduler(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 32,
    caching: bool = True,
    guess: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        drafter=None if guess is None else Monomaniac(guess),
    )


class Monomaniac(Drafter):
    """A drafter that always guesses the same token, as often as it may."""

    max_step_tokens = MAX_DRAFTING_STEP_TOKENS

    def __init__(self, guess: int) -> None:
        self._guess = guess

    def may_draft(self, sequence: SequenceState) -> bool:
        return True

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        return (self._guess,) * max_tokens

    def forget(self, sequence: SequenceState) -> None:
        pass


def add(
    scheduler: Scheduler, name: str, prompt: Iterable[int], *, priority: int = 0, salt: str = "", **params: Any
) -> SequenceState:
    sampling = SamplingParams(**{"max_tokens": 16, **params})
    return scheduler.add(Request(name, tuple(prompt), sampling, seed=0, priority=priority, cache_salt=salt))


def add_old_and_young(scheduler: Scheduler, **params: Any) -> tuple[SequenceState, SequenceState]:
    """Fill a pool of 8 blocks with two sequences and compute their prompts; then the old one lacks a block."""
    old, young = add(scheduler, "old", range(16)), add(scheduler, "young", range(20, 35), **params)
    assert step(scheduler) == {"old": 16, "young": 15}
    return old, young


def step(scheduler: Scheduler, token_id: int = 7) -> dict[str, int]:
    """Run one step in which all sampled tokens are token_id; return how many tokens each request computed."""
    batch = scheduler.schedule()
    check_scheduler(scheduler, batch.items)
    scheduled = tokens_by_name(batch)
    scheduler.update(batch, [(token_id,) * (1 + len(item.draft)) for item in batch.items if item.needs_sampling])
    check_scheduler(scheduler)
    return scheduled


def tokens_by_name(batch: ScheduledBatch) -> dict[str, int]:
    return {item.sequence.request.request_id: item.num_tokens for item in batch.items}


# One rule


def test_a_prompt_is_computed_at_once_then_one_token_a_step() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", range(6))
    assert step(scheduler) == {"a": 6}
    assert (sequence.num_computed, sequence.num_generated, sequence.num_uncomputed) == (6, 1, 1)
    assert step(scheduler) == {"a": 1}
    assert sequence.token_ids == [*range(6), 7, 7]


def test_a_prompt_over_the_budget_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    scheduler = make_scheduler(budget=4)
    add(scheduler, "a", range(10))
    samples = []
    for _ in range(4):
        batch = scheduler.schedule()
        samples.append((batch.num_tokens, batch.items[0].needs_sampling))
        scheduler.update(batch, [(7,)] if batch.items[0].needs_sampling else [])
    assert samples == [(4, False), (4, False), (2, True), (1, True)]


def test_running_sequences_go_before_a_new_prompt_which_takes_the_rest_of_the_budget() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, "a", range(5))
    step(scheduler)
    add(scheduler, "b", range(10, 20))
    assert step(scheduler) == {"a": 1, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 3}


def test_each_sampling_item_takes_exactly_one_token() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, "whole", range(4))
    add(scheduler, "chunk", range(10, 20))
    batch = scheduler.schedule()
    assert [item.needs_sampling for item in batch.items] == [True, False]
    with pytest.raises(ValueError, match="zip"):
        scheduler.update(batch, [(7,), (None,)])


def test_an_idle_scheduler_has_no_work() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.schedule() == ScheduledBatch(())
    add(scheduler, "a", [1])
    assert scheduler.has_work
    scheduler.abort("a")
    assert not scheduler.has_work


# Admission


def test_seats_are_given_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, [1, 2])
    assert step(scheduler) == {"a": 2, "b": 2}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.abort("a")
    assert step(scheduler) == {"b": 1, "c": 2}


def test_lower_priority_values_are_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "late", [1, 2], priority=1)
    add(scheduler, "soon", [1, 2], priority=0)
    add(scheduler, "first", [1, 2], priority=-1)
    assert list(step(scheduler)) == ["first", "soon"]


def test_a_running_sequence_keeps_its_seat_whatever_waits() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "running", [1, 2], priority=1)
    step(scheduler)
    add(scheduler, "urgent", [1, 2], priority=0)
    assert step(scheduler) == {"running": 1}


def test_an_urgent_newcomer_comes_first_in_the_budget_once_admitted() -> None:
    scheduler = make_scheduler(budget=4)
    add(scheduler, "patient", range(4), priority=1)
    step(scheduler)
    add(scheduler, "urgent", range(10, 20))
    assert step(scheduler) == {"patient": 1, "urgent": 3}
    assert step(scheduler) == {"urgent": 4}


def test_admission_takes_blocks_for_all_known_tokens_though_it_computes_fewer() -> None:
    scheduler = make_scheduler(8, budget=4)
    sequence = add(scheduler, "a", range(20))
    assert step(scheduler) == {"a": 4}
    assert len(sequence.block_ids) == 5


def test_the_first_that_does_not_fit_holds_back_those_behind_it() -> None:
    scheduler = make_scheduler(8)
    add(scheduler, "a", range(20))
    add(scheduler, "large", range(20, 40))
    add(scheduler, "small", [1])
    assert step(scheduler) == {"a": 20}
    scheduler.abort("a")
    assert step(scheduler) == {"large": 20, "small": 1}


def test_a_pool_too_small_for_one_context_is_refused() -> None:
    make_scheduler(8, max_model_len=32)
    with pytest.raises(AssertionError, match="the pool must hold a sequence of max_model_len"):
        make_scheduler(8, max_model_len=33)


# Preemption


def test_the_youngest_is_preempted_when_a_block_is_lacking_and_nobody_is_admitted_in_that_step() -> None:
    scheduler = make_scheduler(8, caching=False)
    old, young = add_old_and_young(scheduler)
    add(scheduler, "new", [1], priority=-1)
    assert step(scheduler) == {"old": 1}
    assert (young.is_running, young.num_computed, len(young.block_ids)) == (False, 0, 0)
    assert (old.num_preemptions, young.num_preemptions, scheduler.stats.num_preemptions) == (0, 1, 1)


def test_a_preempted_sequence_keeps_its_tokens_and_comes_back_first() -> None:
    scheduler = make_scheduler(8, caching=False)
    _, young = add_old_and_young(scheduler)
    add(scheduler, "new", [1])
    step(scheduler)
    assert young.token_ids == [*range(20, 35), 7]
    scheduler.abort("old")
    assert step(scheduler) == {"young": 16, "new": 1}


def test_priority_decides_before_age_who_is_preempted() -> None:
    scheduler = make_scheduler(8, caching=False)
    add(scheduler, "old but patient", range(16), priority=1)
    add(scheduler, "young but urgent", range(20, 36), priority=0)
    step(scheduler)
    assert step(scheduler) == {"young but urgent": 1}


def test_a_sequence_last_in_order_preempts_itself() -> None:
    scheduler = make_scheduler(8, caching=False)
    add(scheduler, "old", range(14))
    add(scheduler, "young", range(20, 36))
    step(scheduler)
    assert step(scheduler) == {"old": 1}
    assert scheduler.stats.num_preemptions == 1


def test_as_many_as_needed_are_preempted_and_no_more() -> None:
    scheduler = make_scheduler(8, caching=False)
    for name, prompt in (("a", range(12)), ("b", range(12, 24)), ("c", [1]), ("d", [2])):
        add(scheduler, name, prompt)
    step(scheduler)
    assert step(scheduler) == {"a": 1, "b": 1}
    assert scheduler.stats.num_preemptions == 2


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(8)
    _, young = add_old_and_young(scheduler)
    step(scheduler)
    assert young.num_computed == 0
    scheduler.abort("old")
    assert step(scheduler) == {"young": 4}, "three blocks are found, the last token is computed in a new one"
    assert young.num_cached_tokens == 0, "cached tokens are those of the first admission"
    assert scheduler.stats.num_prefix_hit_tokens == 0


# The prefix cache


def test_a_cached_prompt_is_computed_from_its_first_unknown_block_on() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", range(10))
    step(scheduler)
    again = add(scheduler, "b", [*range(8), 50, 51])
    assert step(scheduler) == {"a": 1, "b": 2}
    assert again.num_cached_tokens == 8
    assert (scheduler.stats.num_prefix_queried_tokens, scheduler.stats.num_prefix_hit_tokens) == (20, 8)


def test_the_last_block_is_computed_even_if_all_of_it_is_cached() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "a", range(8))
    step(scheduler)
    again = add(scheduler, "b", range(8))
    assert step(scheduler)["b"] == 4
    assert again.block_ids[0] == first.block_ids[0]
    assert again.block_ids[1] != first.block_ids[1]


def test_equal_prompts_admitted_in_one_step_are_computed_once() -> None:
    scheduler = make_scheduler()
    sequences = [add(scheduler, name, range(10)) for name in "abcd"]
    assert step(scheduler) == {"a": 10, "b": 2, "c": 2, "d": 2}
    assert len({tuple(sequence.block_ids[:2]) for sequence in sequences}) == 1


def test_a_block_is_shared_only_from_the_step_that_fills_it_on() -> None:
    scheduler = make_scheduler(max_num_seqs=2, budget=6)
    add(scheduler, "a", range(10))
    assert step(scheduler) == {"a": 6}
    add(scheduler, "b", range(10))
    assert step(scheduler) == {"a": 4, "b": 2}


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", range(6), max_tokens=3)
    while scheduler.has_work:
        step(scheduler)
    turn = add(scheduler, "b", [*range(6), 7, 7, 7, 1])
    assert step(scheduler) == {"b": 2}
    assert turn.num_cached_tokens == 8


def test_requests_with_different_salts_share_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", range(10), salt="a")
    add(scheduler, "b", range(10), salt="b")
    assert step(scheduler) == {"a": 10, "b": 10}


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_and_shares_it() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", range(10), prompt_logprobs=0)
    add(scheduler, "b", range(10), prompt_logprobs=0)
    add(scheduler, "c", range(10))
    assert step(scheduler) == {"a": 10, "b": 10, "c": 2}
    assert scheduler.stats.num_prefix_queried_tokens == 10


def test_a_preempted_request_whose_prompt_logprobs_are_done_uses_the_cache() -> None:
    scheduler = make_scheduler(8)
    add_old_and_young(scheduler, prompt_logprobs=0)
    step(scheduler)
    scheduler.abort("old")
    assert step(scheduler) == {"young": 4}


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    scheduler = make_scheduler(caching=False)
    add(scheduler, "a", range(10))
    add(scheduler, "b", range(10))
    assert step(scheduler) == {"a": 10, "b": 10}
    assert scheduler.stats.num_prefix_queried_tokens == 0


# Drafts


def test_a_draft_that_holds_gives_all_its_tokens_and_one_more() -> None:
    scheduler = make_scheduler(guess=7)
    sequence = add(scheduler, "a", range(4))
    assert step(scheduler) == {"a": MAX_DRAFTING_STEP_TOKENS}
    assert sequence.token_ids == [*range(4), *[7] * 9]
    assert (sequence.num_computed, len(sequence.block_ids)) == (12, 3)
    assert (scheduler.stats.num_draft_tokens, scheduler.stats.num_accepted_tokens) == (8, 8)


def test_a_draft_that_fails_gives_the_token_it_would_have_been_and_its_blocks_back() -> None:
    scheduler = make_scheduler(guess=8)
    sequence = add(scheduler, "a", range(4))
    step(scheduler, token_id=7)
    assert sequence.token_ids == [*range(4), 7]
    assert (sequence.num_computed, len(sequence.block_ids)) == (4, 2), "the new token is in the second block"
    assert (scheduler.stats.num_draft_tokens, scheduler.stats.num_accepted_tokens) == (8, 0)


def test_a_draft_is_kept_up_to_its_first_wrong_token() -> None:
    scheduler = make_scheduler(guess=7)
    sequence = add(scheduler, "a", range(4))
    [progress] = scheduler.update(scheduler.schedule(), [(7, 7, 5, 7, 7, 7, 7, 7, 7)])
    assert progress.token_ids == (7, 7, 5)
    assert sequence.num_uncomputed == 1


def test_drafts_take_evenly_what_is_left_of_a_step_and_nothing_else() -> None:
    scheduler = make_scheduler(guess=7, max_model_len=100)
    for name in "abc":
        add(scheduler, name, [1])
    assert step(scheduler) == {"a": 4, "b": 4, "c": 4}
    add(scheduler, "d", range(7))
    assert step(scheduler) == {"a": 2, "b": 2, "c": 1, "d": 7}
    add(scheduler, "e", range(10, 60))
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 50}


def test_a_prompt_in_chunks_leaves_no_budget_for_drafts_and_gets_none() -> None:
    scheduler = make_scheduler(guess=7, budget=6)
    add(scheduler, "a", range(9))
    assert step(scheduler) == {"a": 6}
    assert step(scheduler) == {"a": 6}
    assert scheduler.stats.num_draft_tokens == 3


def test_drafts_take_free_blocks_only_and_preempt_nobody() -> None:
    scheduler = make_scheduler(8, caching=False, guess=7)
    add(scheduler, "a", range(13), max_tokens=8)
    add(scheduler, "b", range(20, 28), max_tokens=8)
    step(scheduler)  # without drafts, as both prompts are over what a step with drafts may compute
    assert step(scheduler) == {"a": 6, "b": 4}, "a takes the last free block"
    assert scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"stop_token_ids": (7,)}, ((7,), FinishReason.STOP, 7)),
        ({"max_tokens": 5}, ((7,) * 5, FinishReason.LENGTH, None)),
        ({"max_tokens": 1}, ((7,), FinishReason.LENGTH, None)),
    ],
)
def test_nothing_is_given_after_what_ends_a_sequence(params: dict[str, Any], expected: tuple[Any, ...]) -> None:
    scheduler = make_scheduler(guess=7)
    sequence = add(scheduler, "a", range(4), **params)
    batch = scheduler.schedule()
    [progress] = scheduler.update(batch, [(7,) * (1 + len(batch.items[0].draft))])
    assert (progress.token_ids, progress.finish_reason, progress.stop_token_id) == expected
    assert sequence.token_ids == [*range(4), *expected[0]]
    check_scheduler(scheduler)


def test_accepted_tokens_are_found_by_the_next_turn_and_rejected_ones_are_not() -> None:
    scheduler = make_scheduler(guess=7)
    add(scheduler, "a", range(6), max_tokens=9)
    add(scheduler, "b", [10, 11], max_tokens=9)
    scheduler.update(scheduler.schedule(), [(7, 7, 7), (8, 9, 9)])
    scheduler.abort("a")
    scheduler.abort("b")
    accepted, rejected = add(scheduler, "c", [*range(6), 7, 7, 1]), add(scheduler, "d", [10, 11, 7, 7, 1])
    step(scheduler)
    assert (accepted.num_cached_tokens, rejected.num_cached_tokens) == (8, 0)


def test_an_unusable_row_within_a_draft_is_met_again_and_fails_only_then() -> None:
    scheduler = make_scheduler(guess=7)
    sequence = add(scheduler, "a", range(4))
    [progress] = scheduler.update(scheduler.schedule(), [(7, 7, None, 7, 7, 7, 7, 7, 7)])
    assert (progress.token_ids, progress.finish_reason) == ((7, 7), None)
    assert (sequence.num_uncomputed, scheduler.stats.num_accepted_tokens) == (1, 2)
    batch = scheduler.schedule()
    [progress] = scheduler.update(batch, [(None,) * (1 + len(batch.items[0].draft))])
    assert (progress.token_ids, progress.finish_reason) == ((), FinishReason.ERROR)


# The end


@pytest.mark.parametrize(
    ("params", "token_id", "expected"),
    [
        ({}, EOS, (FinishReason.STOP, EOS)),
        ({"ignore_eos": True}, EOS, (None, None)),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, (FinishReason.STOP, EOS)),
        ({"stop_token_ids": (5, 6)}, 6, (FinishReason.STOP, 6)),
        ({"stop_token_ids": (5, 6)}, 7, (None, None)),
        ({"max_tokens": 1}, 7, (FinishReason.LENGTH, None)),
        ({"max_tokens": 1}, EOS, (FinishReason.STOP, EOS)),
    ],
)
def test_what_ends_a_sequence(
    params: dict[str, Any], token_id: int, expected: tuple[FinishReason | None, int | None]
) -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", [1, 2], **params)
    [progress] = scheduler.update(scheduler.schedule(), [(token_id,)])
    assert (progress.finish_reason, progress.stop_token_id) == expected
    assert (progress.sequence, progress.token_ids) == (sequence, (token_id,))
    assert sequence.finish_reason is expected[0]
    assert scheduler.has_work == (expected[0] is None)
    assert sequence.token_ids == [1, 2, token_id]


def test_the_context_ends_a_sequence_that_may_generate_more() -> None:
    scheduler = make_scheduler(8, max_model_len=5)
    sequence = add(scheduler, "a", [1, 2, 3], max_tokens=16)
    step(scheduler)
    assert sequence.finish_reason is None
    step(scheduler)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert len(sequence.token_ids) == 5


def test_what_ends_frees_its_blocks_in_the_same_step() -> None:
    scheduler = make_scheduler(8, max_num_seqs=1)
    add(scheduler, "a", range(30), max_tokens=1)
    add(scheduler, "b", range(40, 70))
    assert step(scheduler) == {"a": 30}
    assert step(scheduler) == {"b": 30}


def test_an_abort_frees_blocks_at_once_wherever_the_sequence_stands() -> None:
    scheduler = make_scheduler(8, max_num_seqs=1)
    running, waiting = add(scheduler, "running", range(30)), add(scheduler, "waiting", range(40, 70))
    step(scheduler)
    assert scheduler.abort("waiting") is waiting
    assert scheduler.abort("running") is running
    check_scheduler(scheduler)
    assert (waiting.finish_reason, running.finish_reason) == (FinishReason.ABORT, FinishReason.ABORT)
    add(scheduler, "next", range(40, 70))
    assert step(scheduler) == {"next": 30}


def test_aborting_what_is_unknown_or_has_ended_is_no_error() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [1])
    assert scheduler.abort("b") is None
    assert scheduler.abort("a") is not None
    assert scheduler.abort("a") is None


def test_an_abort_while_the_step_runs_is_passed_over_by_update() -> None:
    scheduler = make_scheduler()
    gone, stays = add(scheduler, "gone", [1, 2]), add(scheduler, "stays", [3, 4])
    batch = scheduler.schedule()
    scheduler.abort("gone")
    [progress] = scheduler.update(batch, [(5,), (6,)])
    assert (progress.sequence, progress.token_ids) == (stays, (6,))
    assert gone.token_ids == [1, 2]
    assert gone.finish_reason is FinishReason.ABORT
    check_scheduler(scheduler)


def test_an_id_can_be_used_again_after_its_request_ended() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [1])
    with pytest.raises(AssertionError, match="in use"):
        add(scheduler, "a", [1])
    scheduler.abort("a")
    add(scheduler, "a", [1])


# Failure


def test_an_unusable_row_fails_its_own_sequence_and_its_blocks_are_not_shared_again() -> None:
    scheduler = make_scheduler()
    bad, good = add(scheduler, "bad", range(10)), add(scheduler, "good", range(20, 30))
    batch = scheduler.schedule()
    progress = scheduler.update(batch, [(None,), (7,)])
    assert [(p.sequence, p.token_ids, p.finish_reason) for p in progress] == [
        (bad, (), FinishReason.ERROR),
        (good, (7,), None),
    ]
    check_scheduler(scheduler)
    add(scheduler, "like bad", range(10))
    add(scheduler, "like good", range(20, 30))
    assert step(scheduler) == {"good": 1, "like bad": 10, "like good": 2}


def test_an_abandoned_step_is_computed_again_and_shares_nothing_it_was_to_fill() -> None:
    scheduler = make_scheduler(budget=10, max_num_seqs=3)
    add(scheduler, "done", range(4), max_tokens=1)
    step(scheduler)
    first, _ = add(scheduler, "first", range(10)), add(scheduler, "second", range(20, 30))
    add(scheduler, "waiting", range(10))
    batch = scheduler.schedule()
    assert tokens_by_name(batch) == {"first": 6, "second": 4}
    assert scheduler.abandon(batch) is None
    check_scheduler(scheduler)
    assert (first.is_running, first.num_computed, first.blame.num_failures) == (False, 0, 1)
    assert scheduler.stats.num_preemptions == 0, "nobody took its blocks"
    assert step(scheduler) == {"first": 6, "second": 4}, "the block of the step before is still found"


def test_an_abort_before_a_step_is_abandoned_leaves_no_unfilled_block_to_find() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", range(10))
    batch = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.abandon(batch) is None
    check_scheduler(scheduler)
    add(scheduler, "b", range(10))
    assert step(scheduler) == {"b": 10}


# Waiting too long


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_impatient_scheduler(num_blocks: int = 64, **options: Any) -> tuple[Scheduler, Clock]:
    clock = Clock()
    pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(
        pool,
        max_num_batched_tokens=64,
        max_model_len=32,
        eos_token_ids=(EOS,),
        max_queue_time_s=5.0,
        clock=clock,
        **{"max_num_seqs": 1, **options},
    )
    return scheduler, clock


def test_a_sequence_that_is_not_admitted_in_time_ends_and_only_then() -> None:
    scheduler, clock = make_impatient_scheduler()
    running, first = add(scheduler, "running", [1, 2]), add(scheduler, "first", [3])
    step(scheduler)
    clock.now += 3.0
    second = add(scheduler, "second", [4])
    clock.now += 1.9
    assert scheduler.expire_waiting() == []
    clock.now += 0.2
    assert scheduler.expire_waiting() == [first]
    check_scheduler(scheduler)
    assert first.finish_reason is FinishReason.QUEUE_TIMEOUT
    assert (running.is_running, second.is_running) == (True, False)
    assert step(scheduler) == {"running": 1}
    scheduler.abort("running")
    assert step(scheduler) == {"second": 1}, "the next in line takes the running slot"


@pytest.mark.parametrize(("num_given", "expires"), [(2, True), (1, False), (0, False)])
def test_tokens_that_came_with_a_request_are_no_sign_that_it_has_run(num_given: int, expires: bool) -> None:
    scheduler, clock = make_impatient_scheduler()
    add(scheduler, "running", [1, 2])
    step(scheduler)
    given = Request("waiting", (3,), SamplingParams(max_tokens=16), 0, generated_token_ids=(4, 5))
    waiting = scheduler.add(replace(given, num_given_tokens=num_given))
    clock.now += 9.0

    assert scheduler.expire_waiting() == [waiting] * expires


def test_a_preempted_sequence_waits_as_long_as_it_takes() -> None:
    scheduler, clock = make_impatient_scheduler(8, max_num_seqs=2)
    _, young = add_old_and_young(scheduler)
    step(scheduler)
    assert (young.is_running, young.num_preemptions) == (False, 1)
    clock.now += 1000.0
    assert scheduler.expire_waiting() == []


def test_a_sequence_begun_elsewhere_waits_as_long_as_it_takes() -> None:
    scheduler, clock = make_impatient_scheduler()
    add(scheduler, "running", [1, 2])
    step(scheduler)
    begun = Request("begun", (3,), SamplingParams(max_tokens=8), seed=0, generated_token_ids=(7,))
    scheduler.add(begun)
    scheduler.add(replace(begun, request_id="in its prompt", generated_token_ids=(), blame=Blame(1)))
    new = add(scheduler, "new", [3])
    clock.now += 1000.0
    assert scheduler.expire_waiting() == [new]


def test_without_a_limit_nobody_waits_too_long() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    waiting = [add(scheduler, name, [1]) for name in "ab"]
    step(scheduler)
    assert scheduler.expire_waiting() == []
    assert not waiting[1].is_running


def fail(scheduler: Scheduler) -> tuple[dict[str, int], SequenceState | None]:
    """Abandon a step; return what it was to compute and who was found guilty."""
    batch = scheduler.schedule()
    guilty = scheduler.abandon(batch)
    check_scheduler(scheduler)
    return tokens_by_name(batch), guilty


def test_after_two_failures_in_a_row_suspects_are_tried_alone_and_one_that_fails_again_is_guilty() -> None:
    scheduler = make_scheduler()
    good, bad = add(scheduler, "good", range(3)), add(scheduler, "bad", range(20, 24))
    add(scheduler, "fine", range(40, 45))
    everyone = {"good": 3, "bad": 4, "fine": 5}
    assert fail(scheduler) == (everyone, None)
    assert fail(scheduler) == (everyone, None)
    assert good.blame.is_suspect
    assert bad.blame.is_suspect
    add(scheduler, "new", [50])
    assert step(scheduler) == {"good": 3}
    assert step(scheduler) == {"good": 1}
    assert good.blame.num_failures == 0, "two tokens clear it"
    assert fail(scheduler) == ({"bad": 4}, bad)
    assert bad.finish_reason is FinishReason.ERROR
    assert step(scheduler) == {"fine": 5}
    assert step(scheduler) == {"fine": 1}
    assert step(scheduler) == {"good": 1, "fine": 1, "new": 1}


def test_two_tokens_between_two_failures_make_no_suspect() -> None:
    scheduler = make_scheduler(caching=False)
    sequence = add(scheduler, "a", range(3))
    for num_uncomputed, num_known in ((3, 3), (1, 5), (1, 7)):
        assert fail(scheduler) == ({"a": num_uncomputed}, None)
        assert step(scheduler) == {"a": num_known}
        assert step(scheduler) == {"a": 1}
        assert sequence.blame.num_failures == 0


def test_one_that_fails_whenever_it_decodes_is_guilty_although_its_prompt_gives_a_token() -> None:
    scheduler = make_scheduler(caching=False)
    bad, good = add(scheduler, "bad", range(3)), add(scheduler, "good", range(10, 12))
    assert step(scheduler) == {"bad": 3, "good": 2}
    assert fail(scheduler) == ({"bad": 1, "good": 1}, None)
    assert step(scheduler) == {"bad": 4, "good": 3}
    assert fail(scheduler) == ({"bad": 1, "good": 1}, None)
    assert step(scheduler) == {"bad": 5}
    assert fail(scheduler) == ({"bad": 1}, bad)
    assert step(scheduler) == {"good": 4}
    assert step(scheduler) == {"good": 1}
    assert not good.blame.is_suspect


def test_a_part_of_a_prompt_computed_in_between_does_not_clear_a_suspect() -> None:
    scheduler = make_scheduler(budget=8, caching=False)
    bad = add(scheduler, "bad", range(12))
    for _ in range(2):
        assert step(scheduler) == {"bad": 8}
        assert fail(scheduler) == ({"bad": 4}, None)
    assert step(scheduler) == {"bad": 8}
    assert fail(scheduler) == ({"bad": 4}, bad)


def test_a_suspect_takes_seat_and_blocks_from_whoever_has_them() -> None:
    scheduler = make_scheduler(num_blocks=9, max_num_seqs=2, caching=False)
    add(scheduler, "old", range(16))
    add(scheduler, "young", range(20, 30))
    assert step(scheduler) == {"old": 16, "young": 10}
    params = SamplingParams(max_tokens=3)
    scheduler.add(Request("suspect", tuple(range(12)), params, seed=0, generated_token_ids=(7,), blame=Blame(2)))
    assert step(scheduler) == {"suspect": 13}, "it was in engines that died"
    assert step(scheduler) == {"suspect": 1}
    assert step(scheduler) == {"old": 1, "young": 11}
    assert scheduler.stats.num_preemptions == 1


def test_a_suspect_that_grows_takes_the_block_it_lacks_from_another() -> None:
    scheduler = make_scheduler(num_blocks=8, caching=False)
    add(scheduler, "old", range(16))
    assert step(scheduler) == {"old": 16}
    params = SamplingParams(max_tokens=3)
    scheduler.add(Request("suspect", tuple(range(15)), params, seed=0, generated_token_ids=(7,), blame=Blame(2)))
    assert step(scheduler) == {"suspect": 16}
    assert step(scheduler) == {"suspect": 1}
    assert step(scheduler) == {"old": 17}


# While a step runs


def plan_ahead(scheduler: Scheduler, running: ScheduledBatch) -> ScheduledBatch:
    """Schedule a step while one runs."""
    assert scheduler.foresee(running)
    check_scheduler(scheduler)
    ahead = scheduler.schedule()
    check_scheduler(scheduler, ahead.items)
    return ahead


def update(scheduler: Scheduler, batch: ScheduledBatch, *token_ids: int | None) -> list[Progress]:
    progressed = scheduler.update(batch, [(token_id,) for token_id in token_ids])
    check_scheduler(scheduler)
    return progressed


def test_a_step_is_planned_while_the_one_before_it_runs() -> None:
    scheduler = make_scheduler()
    sequences = [add(scheduler, name, range(n)) for n, name in enumerate("abc", 1)]
    running = scheduler.schedule()
    scheduler.abort("b")
    ahead = plan_ahead(scheduler, running)
    assert tokens_by_name(ahead) == {"a": 1, "c": 1}
    assert [item.sequence.token_ids[-1] for item in ahead.items] == [~0, ~2], "each names its row in the running step"
    assert [p.token_ids for p in update(scheduler, running, 5, 6, 7)] == [(5,), (7,)]
    assert [sequence.token_ids for sequence in sequences] == [[0, 5], [0, 1], [0, 1, 2, 7]]
    update(scheduler, ahead, 8, 9)
    assert [sequence.token_ids for sequence in sequences] == [[0, 5, 8], [0, 1], [0, 1, 2, 7, 9]]


def test_a_step_that_is_planned_ahead_admits_and_computes_prompts() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, "a", range(3))
    add(scheduler, "long", range(10, 22))
    running = scheduler.schedule()
    add(scheduler, "new", range(30, 32))
    ahead = plan_ahead(scheduler, running)
    assert tokens_by_name(running) == {"a": 3, "long": 5}
    assert tokens_by_name(ahead) == {"a": 1, "long": 7}
    update(scheduler, running, 7)
    after = plan_ahead(scheduler, ahead)
    assert tokens_by_name(after) == {"a": 1, "long": 1, "new": 2}
    assert [p.sequence.request.request_id for p in update(scheduler, ahead, 7, 7)] == ["a", "long"]


def test_a_sequence_whose_last_token_is_on_its_way_is_computed_no_more() -> None:
    scheduler = make_scheduler(max_model_len=8)
    add(scheduler, "by max_tokens", [1], max_tokens=1)
    add(scheduler, "by context", range(7), max_tokens=9)
    running = scheduler.schedule()
    assert plan_ahead(scheduler, running).items == ()
    assert [p.finish_reason for p in update(scheduler, running, 7, 7)] == [FinishReason.LENGTH] * 2
    assert not scheduler.has_work


def test_a_token_that_ends_a_sequence_makes_its_part_of_the_next_step_void() -> None:
    scheduler = make_scheduler()
    ending, other = add(scheduler, "ending", range(4)), add(scheduler, "other", range(10, 13))
    running = scheduler.schedule()
    ahead = plan_ahead(scheduler, running)
    [ended, _] = update(scheduler, running, EOS, 7)
    assert (ended.sequence, ended.finish_reason, ending.is_running) == (ending, FinishReason.STOP, False)
    assert [p.sequence for p in update(scheduler, ahead, 5, 8)] == [other]
    assert ending.token_ids == [0, 1, 2, 3, EOS]


def test_a_block_that_ends_with_a_foreseen_token_is_shared_once_that_is_known() -> None:
    scheduler = make_scheduler()
    first, ended = add(scheduler, "first", range(3)), add(scheduler, "ended", range(10, 13))
    running = scheduler.schedule()
    ahead = plan_ahead(scheduler, running)
    assert not any(scheduler._pool.findable)
    update(scheduler, running, 7, EOS)
    assert ahead.unfilled == list(first.block_ids[:1])
    assert [scheduler._pool.findable[block_id] for block_id in first.block_ids[:1]] == [1]
    assert scheduler._pool.num_cached == 0, "the last token of a sequence is in no block that is shared"
    twin = add(scheduler, "twin", [0, 1, 2, 7, 5])
    assert plan_ahead(scheduler, ahead).items[-1].sequence is twin
    assert twin.block_ids[0] == first.block_ids[0]
    assert len(ended.block_ids) == 0


def test_a_block_that_a_failed_step_was_to_end_is_not_shared_before_it_is_filled() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", range(3))
    running = scheduler.schedule()
    ahead = plan_ahead(scheduler, running)
    scheduler.abandon(running)
    scheduler.abandon(ahead, blames=False)
    update(scheduler, scheduler.schedule(), 7)
    assert not any(scheduler._pool.findable)


@pytest.mark.parametrize(
    "params",
    [
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"bad_words": ((1,),)},
    ],
    ids=str,
)
def test_nothing_is_planned_before_tokens_that_the_next_step_reads(params: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    add(scheduler, "reads", range(5), **params)
    add(scheduler, "does not", range(5))
    running = scheduler.schedule()
    assert not scheduler.foresee(running)
    update(scheduler, running, 7, 7)
    scheduler.abort("reads")
    assert scheduler.foresee(scheduler.schedule())


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_need_no_token_that_the_device_counts(penalty: str) -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", range(5), **{penalty: 0.5})
    assert scheduler.foresee(scheduler.schedule(), host_counts=False)
    assert sequence.is_foreseen


def test_nothing_is_planned_before_tokens_that_may_be_followed_by_drafts() -> None:
    scheduler = make_scheduler(guess=7)
    add(scheduler, "a", range(5))
    running = scheduler.schedule()
    assert not scheduler.foresee(running)


def test_nobody_is_preempted_before_it_is_known_who_ends() -> None:
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, "old", range(15))
    add(scheduler, "young", range(20, 31))
    running = scheduler.schedule()
    ahead = plan_ahead(scheduler, running)
    update(scheduler, running, 7, 7)
    assert not scheduler.foresee(ahead), "each will need a block, and one is free"
    check_scheduler(scheduler)
    update(scheduler, ahead, 7, EOS)
    assert step(scheduler) == {"old": 1}
    assert scheduler.stats.num_preemptions == 0


def test_a_suspect_is_computed_without_a_plan() -> None:
    scheduler = make_scheduler()
    scheduler.add(Request("suspect", (1, 2), SamplingParams(), seed=0, blame=Blame(num_failures=2)))
    assert not scheduler.foresee(scheduler.schedule())


def test_a_failed_step_takes_along_the_one_planned_after_it_without_blame() -> None:
    scheduler = make_scheduler()
    failing = add(scheduler, "failing", range(4))
    running = scheduler.schedule()
    bystander = add(scheduler, "bystander", range(10, 14))
    ahead = plan_ahead(scheduler, running)
    assert any(scheduler._pool.findable)
    scheduler.abandon(running)
    scheduler.abandon(ahead, blames=False)
    check_scheduler(scheduler)
    assert not any(scheduler._pool.findable)
    assert (failing.blame.num_failures, bystander.blame.num_failures) == (1, 0)
    assert (failing.token_ids, bystander.token_ids) == ([0, 1, 2, 3], [10, 11, 12, 13])
    assert step(scheduler) == {"failing": 4, "bystander": 4}


def test_sequences_whose_last_token_is_on_its_way_do_not_wait_for_chunks() -> None:
    budgets: list[tuple[int, int]] = []

    class Watch(Pace):
        def budget(self, num_tokens: int, num_decoding: int, num_others: int) -> Budget:
            budgets.append((num_decoding, num_others))
            return super().budget(num_tokens, num_decoding, num_others)

    pool = BlockPool(16, BLOCK_SIZE, enable_prefix_caching=True)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 8}
    scheduler = Scheduler(pool, eos_token_ids=(), pace=Watch(), **limits)
    for name, max_tokens in (("long", 9), ("ends", 1), ("ends, too", 1)):
        add(scheduler, name, [1], max_tokens=max_tokens)
    running = scheduler.schedule()
    add(scheduler, "prompt", [1, 2, 3])
    plan_ahead(scheduler, running)
    assert budgets[-1] == (1, 1)


def test_the_time_of_a_step_begins_where_that_of_the_one_before_it_ends() -> None:
    now, observed = 0.0, list[float]()

    class Watch(Pace):
        def observe(self, batch: ScheduledBatch, seconds: float) -> None:
            observed.append(seconds)

    pool = BlockPool(8, BLOCK_SIZE, enable_prefix_caching=True)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 8}
    scheduler = Scheduler(pool, eos_token_ids=(), pace=Watch(), clock=lambda: now, **limits)
    add(scheduler, "a", [1])
    running = scheduler.schedule()
    now = 1.0
    ahead = plan_ahead(scheduler, running)
    now = 5.0
    update(scheduler, running, 7)
    now = 9.0
    update(scheduler, ahead, 7)
    now = 20.0
    running = scheduler.schedule()
    now = 22.0
    ahead = plan_ahead(scheduler, running)
    update(scheduler, running, 7)
    scheduler.abort("a")
    now = 1000.0
    update(scheduler, ahead, 7)
    assert observed == [5.0, 4.0, 2.0], "nobody waited for a step that was void"
