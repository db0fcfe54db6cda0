"""States of sequences: each step reads the one of all tokens before, whatever is found, kept, preempted or undone."""

from __future__ import annotations

import random

import pytest

from gptserve.engine.request import FinishReason, Request, SamplingParams
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import ScheduledBatch
from gptserve.engine.scheduling.state_pool import NUM_RESERVED, StatePool

BLOCK_SIZE = 4
MAX_LEN = 48
END = 9


class Simulated:
    """A scheduler, and slots whose states are the tokens that made them."""

    def __init__(self, num_states: int, num_blocks: int = 64, max_num_batched_tokens: int = 16) -> None:
        self.pool, self.states = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=True), StatePool(num_states)
        self.num_states = num_states
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_LEN,
            eos_token_ids=[END],
            states=self.states,
        )
        self.slots: dict[int, list[int]] = {}
        self.ended: list[str] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 3,
        *,
        is_filler: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, prompt_logprobs=prompt_logprobs)
        self.scheduler.add(Request(name, tuple(prompt), params, seed=0, is_filler=is_filler))

    def step(self, *, fails: bool = False, token: int = 1) -> ScheduledBatch:
        """Compute a step, which may fail after it has written anything."""
        batch = self.scheduler.schedule()
        written = set[int]()
        read = {item.state.source for item in batch.items if item.state is not None}
        for item in batch.items:
            place, first = item.state, item.sequence.num_computed
            assert place is not None
            assert place.slot >= NUM_RESERVED
            before = [] if place.source < 0 else self.slots[place.source]
            assert before == item.sequence.token_ids[:first], "it goes on from all tokens before"
            tokens = item.sequence.token_ids[first : first + item.num_tokens]
            assert place.slot not in written
            assert place.source == place.slot or place.slot not in read
            if place.kept_row >= 0:
                assert place.kept_slot not in written | read
                assert (first + place.kept_row + 1) % BLOCK_SIZE == 0
                self.slots[place.kept_slot] = [*before, *tokens[: place.kept_row + 1]]
                written.add(place.kept_slot)
            self.slots[place.slot] = [*before, *tokens]
            written.add(place.slot)
        if fails:
            for slot in written:
                self.slots[slot] = [-1]
            self.scheduler.abandon(batch)
            return batch
        sampling = [item for item in batch.items if item.needs_sampling]
        for progress in self.scheduler.update(batch, [(token,) for _ in sampling]):
            if progress.finish_reason is not None:
                self.ended.append(progress.sequence.request.request_id)
        return batch

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def assert_all_are_free(self) -> None:
        """Assert that no slot and no block is lost once all sequences have ended."""
        assert self.states.num_blank + self.states.num_kept == self.num_states - NUM_RESERVED
        assert self.pool.num_used == 0


def cached(simulated: Simulated) -> int:
    return simulated.scheduler.stats.num_prefix_hit_tokens


def test_a_prompt_goes_on_from_the_state_at_the_end_of_one_before() -> None:
    simulated = Simulated(num_states=8)
    simulated.add("first", list(range(10)))
    simulated.run()
    assert simulated.states.num_kept == 1
    simulated.add("second", [*range(10), 7, 7, 7])
    simulated.run()
    assert (cached(simulated), simulated.ended) == (8, ["first", "second"])
    simulated.assert_all_are_free()


def test_a_state_is_kept_where_the_second_of_two_prompts_parts_from_the_first() -> None:
    simulated = Simulated(num_states=8)
    for name in range(3):
        simulated.add(f"{name}", [*range(9), *[20 + name] * 9])
        simulated.run()
        assert cached(simulated) == (0, 0, 8)[name]
    simulated.assert_all_are_free()


def test_a_prompt_waits_for_the_state_of_an_equal_one_that_is_computed() -> None:
    simulated = Simulated(num_states=12, max_num_batched_tokens=8)
    for name in range(3):
        simulated.add(f"{name}", [*range(22), 30 + name])
    simulated.add("other", [7] * 9)
    num_computed = [simulated.step().num_tokens for _ in range(2)]
    assert num_computed == [8, 8]
    assert (simulated.scheduler.num_running, simulated.scheduler.num_waiting) == (1, 3)
    simulated.run()
    assert cached(simulated) == 2 * 20
    simulated.assert_all_are_free()


def test_others_pass_one_that_waits() -> None:
    simulated = Simulated(num_states=12, max_num_batched_tokens=24)
    for name in ("first", "second"):
        simulated.add(name, list(range(22)))
    simulated.add("third", [7] * 2)
    batch = simulated.step()
    assert [item.sequence.request.request_id for item in batch.items] == ["first", "third"]
    simulated.run()
    assert cached(simulated) == 20


def test_nobody_is_preempted_for_one_that_waits() -> None:
    simulated = Simulated(num_states=14, max_num_batched_tokens=8)
    for number in range(2):
        simulated.add(f"filler {number}", [50 + number] * 5, max_tokens=30, is_filler=True)
        simulated.step()
    for name in ("first", "second"):
        simulated.add(name, list(range(30)))
        simulated.step()
    assert (simulated.scheduler.num_running, simulated.scheduler.num_waiting) == (3, 1)
    simulated.run()
    assert simulated.scheduler.stats.num_preemptions == 0
    assert cached(simulated) == 28


def test_a_prompt_that_may_come_from_no_cache_neither_keeps_nor_waits() -> None:
    simulated = Simulated(num_states=14, max_num_batched_tokens=24)
    for name in ("first", "second"):
        simulated.add(name, list(range(30)), prompt_logprobs=1)
    simulated.add("third", list(range(30)))
    for _ in range(3):
        simulated.step()
    assert simulated.scheduler.num_running == 3
    simulated.run()
    assert (cached(simulated), simulated.states.num_kept) == (0, 1)


def test_a_prompt_waits_for_no_state_that_spares_it_less_than_half() -> None:
    simulated = Simulated(num_states=12, max_num_batched_tokens=40)
    simulated.add("short", list(range(9)))
    simulated.add("long", [*range(9), *[1] * 20])
    simulated.step()
    assert simulated.scheduler.num_running == 2


def test_a_prompt_waits_no_longer_once_the_other_one_is_gone() -> None:
    simulated = Simulated(num_states=12, max_num_batched_tokens=8)
    for name in ("first", "second"):
        simulated.add(name, list(range(22)))
    simulated.step()
    assert simulated.scheduler.num_running == 1
    simulated.scheduler.abort("first")
    simulated.run()
    assert simulated.ended == ["second"]
    simulated.assert_all_are_free()


def test_one_step_keeps_one_state_of_a_sequence() -> None:
    simulated = Simulated(num_states=8)
    simulated.add("first", [*range(9), 1])
    simulated.run()
    simulated.add("second", [0, 1, 2, 3, 30, 31, 32, 33, 34, 35])  # parts after a block; its own last one ends at 8
    sizes = [batch.num_tokens for batch in (simulated.step(), simulated.step())]
    assert sizes == [4, 6]
    assert simulated.states.num_kept == 3


def test_a_slot_that_a_step_reads_is_given_to_nobody_in_it() -> None:
    states = StatePool(NUM_RESERVED + 2)
    slot = states.keep(7)
    assert slot is not None
    assert states.find([7]) == 0, "the step that writes it has not ended"
    states.count_written()
    assert states.find([3, 7]) == 2
    assert states.read(7) == slot
    assert states.take() not in (None, slot)
    assert (states.can_take, states.take(), states.take(besides=7)) == (False, None, None)
    states.begin_step()
    assert states.can_take
    assert states.take() == slot
    assert states.find([7]) == 0


def test_a_sequence_takes_over_the_only_slot_that_is_left() -> None:
    states = StatePool(NUM_RESERVED + 2)
    slots = [states.keep(prefix) for prefix in (1, 2)]
    states.count_written()
    assert states.take(besides=1) == slots[1]
    assert states.take(besides=1) == slots[0]
    assert states.num_kept == 0


def test_states_are_evicted_least_recently_used_first() -> None:
    states = StatePool(NUM_RESERVED + 3)
    for prefix in (1, 2, 3):
        assert states.keep(prefix) is not None
    assert states.keep(1) is None, "it is about to be kept"
    states.count_written()
    assert states.keep(2) is None, "it is kept"
    states.read(1)
    states.begin_step()
    assert [states.take() is not None for _ in range(2)] == [True, True]
    assert [states.find([prefix]) for prefix in (1, 2, 3)] == [1, 0, 0]


def test_states_that_cannot_be_trusted_are_dropped() -> None:
    states = StatePool(NUM_RESERVED + 3)
    states.keep(1)
    states.count_written()
    states.keep(2)
    states.forget([1, 2, 5])
    states.count_written()
    assert (states.num_kept, states.num_blank) == (0, 3)


def test_what_was_kept_of_a_sequence_that_fails_is_not_found() -> None:
    simulated = Simulated(num_states=8)
    for name in ("first", "second"):  # the second one's own blocks have twins that others may still find
        simulated.add(name, [*range(9), *[ord(name[0])] * 9])
        if name == "first":
            simulated.run()
    batch = simulated.step()
    batch = simulated.step()
    assert simulated.states.num_kept == 3
    simulated.scheduler.fail(batch.items[0].sequence)
    assert simulated.states.num_kept == 1
    simulated.assert_all_are_free()


def test_a_state_of_a_failed_step_is_not_found() -> None:
    simulated = Simulated(num_states=8)
    simulated.add("first", list(range(10)))
    simulated.step(fails=True)
    assert simulated.states.num_kept == 0
    simulated.run()
    assert simulated.ended == ["first"]
    simulated.assert_all_are_free()


def test_a_sequence_waits_for_a_slot() -> None:
    simulated = Simulated(num_states=NUM_RESERVED + 2)
    for name in range(4):
        simulated.add(f"{name}", [name] * 5)
    for _ in range(2):  # what the first step keeps is evicted by the second
        simulated.step()
    assert (simulated.scheduler.num_running, simulated.scheduler.num_waiting) == (2, 2)
    simulated.run()
    assert len(simulated.ended) == 4
    simulated.assert_all_are_free()


@pytest.mark.parametrize("seed", range(40))
def test_each_step_goes_on_from_all_tokens_before_in_random_service(seed: int) -> None:
    draw = random.Random(seed)
    simulated = Simulated(
        num_states=draw.choice([3, 4, 6, 12]),
        num_blocks=draw.choice([12, 14, 30]),
        max_num_batched_tokens=draw.choice([4, 7, 16, 40]),
    )
    text = [draw.randrange(5) for _ in range(30)]
    live: list[str] = []
    for number in range(60):
        if draw.random() < 0.5:
            tail = [draw.randrange(5) for _ in range(draw.randrange(1, 6))]
            prompt, is_filler = [*text[: draw.randrange(28)], *tail], draw.random() < 0.2
            wanted = 1 if draw.random() < 0.1 else None
            max_tokens = draw.randrange(1, 12)
            simulated.add(f"{number}", prompt, max_tokens, is_filler=is_filler, prompt_logprobs=wanted)
            live.append(f"{number}")
        if live and draw.random() < 0.1:
            aborted = simulated.scheduler.abort(draw.choice(live))
            assert aborted is None or aborted.finish_reason is FinishReason.ABORT
        simulated.step(fails=draw.random() < 0.03, token=draw.randrange(5))
    simulated.run()
    simulated.assert_all_are_free()


def test_random_service_finds_and_preempts() -> None:
    """Otherwise the test above would show little."""
    simulated = Simulated(num_states=12, num_blocks=12)
    for number in range(8):
        simulated.add(f"{number}", [*range(12), number], max_tokens=12)
    simulated.run()
    assert cached(simulated) > 0
    assert simulated.scheduler.stats.num_preemptions > 0
    simulated.assert_all_are_free()
