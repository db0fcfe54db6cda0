"""Scheduler and BlockPool under random service, against a shadow of what the KV cache would hold.

A cell of the shadow holds the prefix its keys and values were computed from (salt and tokens up to its position), so a
block that is shared wrongly, reused too early or never filled shows when a sequence attends to it. Tokens are drawn
from what was attended to; every request has to end with those of a plain loop over that request alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import takewhile
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gptserve.engine.request import FinishReason, Request, SamplingParams
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS, Drafter
from gptserve.engine.scheduling.prompt_pace import Budget, PromptPace
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from tests.engine.scheduling.invariants import check_scheduler

STOP, EOS = 2, 3
QUEUE_LIMIT_S = 30.0  # steps, by this machine's clock
ENDS = [reason for reason in FinishReason if reason is not FinishReason.TIMEOUT]  # that one is the client's
Prefix = tuple[str, tuple[int, ...]]

# Derandomized: the default run judges the change at hand, by the same steps every time, and is never red by chance;
# test_survives_much_more_random_service looks for what they do not show.
SETTINGS = settings(
    max_examples=250,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
# What is drawn depends on what the process has imported, too. A failure, mostly among the first 250, ends the search.
UNTIL_A_FAILURE = settings(SETTINGS, max_examples=3000, phases=[Phase.generate])


def next_token(request: Request, prefix: Sequence[int]) -> int:
    """Return the token after a prefix: mostly 0 or 1, so that prefixes meet again, sometimes STOP or EOS."""
    return (0, 1, 0, 1, 0, 1, 0, 1, 0, 1, STOP, EOS)[crc32(bytes([request.seed, *prefix])) % 12]


def complete_alone(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """Return all tokens and the end of a request, by the definition of one."""
    token_ids, params = list(request.prompt_token_ids), request.params
    while True:
        token_id = next_token(request, token_ids)
        token_ids.append(token_id)
        if token_id in params.stop_token_ids or (token_id == EOS and not params.ignore_eos):
            return token_ids, FinishReason.STOP
        if len(token_ids) in (len(request.prompt_token_ids) + params.max_tokens, max_model_len):
            return token_ids, FinishReason.LENGTH


class FickleDrafter(Drafter):
    """Guesses the truth, its opposite, or the one now and the other then, and as many tokens as it likes."""

    max_step_tokens = MAX_DRAFTING_STEP_TOKENS

    def __init__(self, mood: str, max_model_len: int) -> None:
        self._mood = mood
        self._max_model_len = max_model_len

    def may_draft(self, sequence: SequenceState) -> bool:
        return True

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        token_ids = sequence.token_ids
        truth = complete_alone(sequence.request, self._max_model_len)[0][len(token_ids) :]
        whim = crc32(bytes([*token_ids, max_tokens]))
        num_true = {"true": max_tokens, "false": 0, "fickle": whim % 4}[self._mood]
        guess = [*truth[:num_true], *(1 - (token == 1) for token in truth[num_true:]), 0, 1, 0, 1]
        return tuple(guess[: min(max_tokens, whim // 4 % 8)])

    def forget(self, sequence: SequenceState) -> None:
        assert sequence.finish_reason is None


class FicklePace(PromptPace):
    """Allows any number of tokens, often none."""

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = 0

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        assert seconds == 1.0
        self._num_steps += 1

    def max_chunk_tokens(self, num_decoding: int, num_others: int) -> int:
        assert num_decoding > 0
        assert num_others >= 0
        return max(0, crc32(bytes([self._num_steps % 256, num_decoding, num_others])) % 8 - 5)


class ShadowCache:
    """What each slot's keys and values were computed from; None for a slot that a failed step may have written."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.cells: dict[tuple[int, int], Prefix | None] = {}

    def cell(self, sequence: SequenceState, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // self._block_size], position % self._block_size

    def cells_of(self, sequence: SequenceState, start: int, end: int) -> set[tuple[int, int]]:
        return {self.cell(sequence, position) for position in range(start, end)}

    def forward(self, batch: ScheduledBatch) -> list[list[int | None]]:
        """Store all, then attend to all, as a layer does; return the sampled tokens of each item that samples.

        Asserts that every position a sequence attends to holds that sequence's own prefix.
        """
        for item in batch.items:
            for position in range(item.sequence.num_computed, item.sequence.num_computed + item.num_tokens):
                self.cells[self.cell(item.sequence, position)] = prefix_at(item, position)
        sampled = []
        for item in batch.items:
            num_known, token_ids = len(item.sequence.token_ids), list[int | None]()
            for position in range(item.sequence.num_computed + item.num_tokens):
                content, own = self.cells.get(self.cell(item.sequence, position)), prefix_at(item, position)
                assert content == own, f"attends to foreign content at position {position}: {content} instead of {own}"
                if position >= num_known - 1:
                    token_ids.append(next_token(item.sequence.request, own[1]))
            assert bool(token_ids) == item.needs_sampling
            if token_ids:
                sampled.append(token_ids)
        return sampled

    def spoil(self, cells: Iterable[tuple[int, int]]) -> None:
        """Leave something undefined in these cells."""
        self.cells.update(dict.fromkeys(cells))


def prefix_at(item: ScheduledSequence, position: int) -> Prefix:
    return item.sequence.request.cache_salt, (*item.sequence.token_ids, *item.draft)[: position + 1]


def is_waiting(sequence: SequenceState) -> bool:
    return sequence.finish_reason is None and not sequence.is_running


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts and failures; `seen` counts what happened, over all examples."""

    def __init__(
        self, pool_class: type[BlockPool], scheduler_class: type[Scheduler], seen: Counter[str], check_internals: bool
    ) -> None:
        super().__init__()
        self.pool_class = pool_class
        self.scheduler_class = scheduler_class
        self.seen = seen
        self.check_internals = check_internals
        self.sequences: list[SequenceState] = []
        self.num_failures: Counter[SequenceState] = Counter()  # without two steps with a token in between
        self.num_clean_steps: Counter[SequenceState] = Counter()
        self.ended: dict[str, FinishReason] = {}
        self.is_whole = False  # no step was broken off by a failed check

    @initialize(
        block_size=st.integers(1, 4),
        max_model_len=st.sampled_from([16, 12, 9, 3]),
        num_spare_blocks=st.sampled_from([0, 1, 2, 4, 6]),
        max_num_seqs=st.sampled_from([4, 6, 3, 2, 1]),
        max_num_batched_tokens=st.sampled_from([12, 8, 5, 3, 1, 24]),
        caching=st.sampled_from([True, True, True, False]),
        drafter_mood=st.sampled_from([None, "fickle", "true", "false"]),
        compares_drafts=st.sampled_from([False, False, False, True]),  # which takes its time
        is_paced=st.booleans(),
    )
    def build(
        self,
        block_size: int,
        num_spare_blocks: int,
        caching: bool,
        drafter_mood: str | None,
        compares_drafts: bool,
        is_paced: bool,
        **limits: int,
    ) -> None:
        self.limits = limits
        num_blocks = -(-limits["max_model_len"] // block_size) + num_spare_blocks
        self.pool = self.pool_class(num_blocks, block_size, caching)
        drafter: Drafter | None = FickleDrafter(drafter_mood, limits["max_model_len"]) if drafter_mood else None
        self.now = 0.0
        self.scheduler = self.scheduler_class(
            self.pool,
            eos_token_ids=(EOS,),
            drafter=drafter,
            pace=FicklePace() if is_paced else None,
            max_queue_time_s=QUEUE_LIMIT_S,
            clock=lambda: self.now,
            **limits,
        )
        self.is_paced = is_paced
        self.shadow = ShadowCache(block_size)
        self.compares_drafts = compares_drafts
        self.is_whole = True

    def has_work(self) -> bool:
        return self.is_whole and self.scheduler.has_work

    # What clients do

    @rule(
        origin=st.integers(0, 9),
        num_shared=st.integers(0, 10),
        tail=st.lists(st.integers(0, 1), max_size=4),
        num_choices=st.sampled_from([4, 2, 1]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "s"]),
        seed=st.integers(0, 1),
        params=st.builds(
            SamplingParams,
            max_tokens=st.sampled_from([14, 10, 6, 3, 1]),
            ignore_eos=st.sampled_from([True, True, False]),
            stop_token_ids=st.sampled_from([(), (), (STOP,)]),
            prompt_logprobs=st.sampled_from([None, None, None, 0]),
        ),
    )
    def add(
        self,
        origin: int,
        num_shared: int,
        tail: list[int],
        num_choices: int,
        priority: int,
        salt: str,
        seed: int,
        params: SamplingParams,
    ) -> None:
        """Add the choices of one prompt, which may begin like an earlier sequence or go on from it."""
        earlier = self.sequences[-1 - origin % len(self.sequences)].token_ids if self.sequences else []
        prompt = ((earlier[:num_shared] + tail) or [0])[: self.limits["max_model_len"] - 1]
        for choice in range(num_choices):
            request_id = str(len(self.sequences))
            request = Request(request_id, tuple(prompt), params, seed, choice, priority, salt)
            self.sequences.append(self.scheduler.add(request))
        self.seen["requests"] += num_choices

    @precondition(has_work)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        self.abort_one(self.sequences[-1 - index % len(self.sequences)])

    # What the engine does

    @precondition(has_work)
    @rule(num_steps=st.integers(1, 8))
    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    @precondition(has_work)
    @rule(
        fault=st.sampled_from(["abort", "unusable row", "unusable row", "raise", "raise", "abort and raise"]),
        which=st.integers(0, 5),
    )
    def run_disturbed_step(self, fault: str, which: int) -> None:
        """Run a step during which a client aborts, or that gives an unusable row, or that raises."""
        self.step(
            aborted=which if "abort" in fault else None,
            bad_row=which if fault == "unusable row" else None,
            raises="raise" in fault,
        )

    @invariant()
    def internals_agree(self) -> None:
        if self.check_internals:
            check_scheduler(self.scheduler)

    def teardown(self) -> None:
        """Drain, and see that every request ended once and that nothing is left."""
        if not self.is_whole:
            return
        num_left = sum(sequence.finish_reason is None for sequence in self.sequences)
        for _ in range(num_left * self.limits["max_model_len"] ** 2):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "service does not end"
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert set(self.ended) == {sequence.request.request_id for sequence in self.sequences}, "a request was lost"
        self.internals_agree()
        assert self.pool.num_used == 0
        self.seen["preemptions"] += self.scheduler.stats.num_preemptions
        self.seen["prefix hits"] += self.scheduler.stats.num_prefix_hit_tokens
        self.seen["accepted"] += self.scheduler.stats.num_accepted_tokens
        self.seen["rejected"] += self.scheduler.stats.num_draft_tokens - self.scheduler.stats.num_accepted_tokens
        self.seen["examples"] += 1

    def step(self, *, bad_row: int | None = None, aborted: int | None = None, raises: bool = False) -> None:
        self.seen["steps" if self.scheduler.has_work else "idle steps"] += 1
        self.is_whole = False
        batch = self.schedule()
        self.now += 1.0
        for sequence in self.scheduler.expire_waiting():
            assert sequence.num_preemptions == 0, "it had been admitted"
            self.take_end(sequence, FinishReason.QUEUE_TIMEOUT)
        if raises:
            self.shadow.spoil(cell for item in batch.items for cell in self.cells_to_fill(item))
        else:
            sampled = self.shadow.forward(batch)
        if aborted is not None and batch.items:
            self.abort_one(batch.items[aborted % len(batch.items)].sequence)
        if raises:
            self.abandon(batch)
        else:
            self.update(batch, sampled, bad_row)
        self.is_whole = True

    # One step, taken apart

    def schedule(self) -> ScheduledBatch:
        """Schedule, and check the batch against the rules of service."""
        running = [s for s in self.sequences if s.is_running]
        decoding = {s for s in running if s.num_uncomputed == 1}
        waiting = [s for s in self.sequences if is_waiting(s)]
        before = {s: (s.num_computed, s.num_preemptions) for s in running}
        had_work = self.scheduler.has_work
        without_drafts = self.schedule_without_drafts() if self.compares_drafts else None
        batch = self.scheduler.schedule()
        if self.check_internals:
            check_scheduler(self.scheduler, batch.items)
        found = [(item.sequence.request.request_id, item.num_tokens - len(item.draft)) for item in batch.items]
        assert without_drafts in (None, found), "drafts are at the expense of others"
        scheduled = [item.sequence for item in batch.items]
        assert bool(scheduled) == had_work, "a step makes progress"
        assert len(set(scheduled)) == len(scheduled)
        assert batch.num_tokens == sum(item.num_tokens for item in batch.items) <= self.limits["max_num_batched_tokens"]
        assert len(scheduled) <= self.scheduler.num_running <= self.limits["max_num_seqs"]
        for item in batch.items:
            assert item.num_tokens > 0
            num_known_after = item.sequence.num_computed + item.num_tokens - len(item.draft)
            assert item.needs_sampling == (num_known_after == len(item.sequence.token_ids))
            assert item.needs_sampling or not item.draft
            assert not item.draft or batch.num_tokens <= MAX_DRAFTING_STEP_TOKENS, "drafts make a step long"
        preempted = {s for s in running if is_waiting(s)}
        for sequence, (num_computed, num_preemptions) in before.items():
            is_preempted = sequence in preempted
            assert sequence.num_computed == (0 if is_preempted else num_computed)
            assert sequence.num_preemptions == num_preemptions + is_preempted
        suspects = [s for s in [*running, *waiting] if self.num_failures[s] >= 2]
        if suspects:
            assert scheduled == [min(suspects, key=self.place)], "the first suspect is computed alone"
            self.seen["tried alone"] += 1
        else:
            self.check_order(batch, set(running), preempted)
            assert not self.is_paced or decoding - preempted <= set(scheduled), "one that decodes was held up"
            self.seen["chunks put off"] += self.is_paced * len(
                [s for s in running if s.is_running and s not in scheduled]
            )
        self.check_nothing_in_use_is_overwritten(batch, [s for s in running if s not in preempted])
        return batch

    def schedule_without_drafts(self) -> list[tuple[str, int]]:
        """Return the ids and numbers of tokens of the next step, were there no drafter."""
        twin = deepcopy(self.scheduler)
        twin._drafter = Drafter()
        return [(item.sequence.request.request_id, item.num_tokens) for item in twin.schedule().items]

    def check_order(self, batch: ScheduledBatch, running: set[SequenceState], preempted: set[SequenceState]) -> None:
        new = [item.sequence for item in batch.items if item.sequence not in running]
        waiting = [s for s in self.sequences if is_waiting(s)]
        if preempted:
            assert not new
            assert max(self.place(item.sequence) for item in batch.items) < min(map(self.place, preempted))
        assert new == sorted([*new, *waiting], key=self.place)[: len(new)], "one was overtaken"
        for sequence in new:
            if sequence.num_preemptions == 0:
                assert sequence.num_cached_tokens == sequence.num_computed
            if sequence.request.params.prompt_logprobs is not None and sequence.num_generated == 0:
                assert sequence.num_computed == 0, "all logits of the prompt are wanted"
        filled = {s.block_ids[0] for s in new if s.num_computed == 0}
        self.seen["shared at once"] += sum(s.num_computed > 0 and s.block_ids[0] in filled for s in new)

    def place(self, sequence: SequenceState) -> tuple[int, int]:
        return sequence.request.priority, int(sequence.request.request_id)

    def check_nothing_in_use_is_overwritten(self, batch: ScheduledBatch, running: list[SequenceState]) -> None:
        in_use = set().union(*(self.shadow.cells_of(s, 0, s.num_computed) for s in running))
        for item in batch.items:
            cells = self.cells_to_fill(item)
            assert not cells & in_use, "overwrites what another sequence attends to"
            in_use |= cells

    def update(self, batch: ScheduledBatch, sampled: list[list[int | None]], bad_row: int | None) -> None:
        sampling = [item for item in batch.items if item.needs_sampling]
        live = [index for index, item in enumerate(sampling) if item.sequence.is_running]
        if bad_row is not None and live:
            index = live[bad_row % len(live)]
            self.lose_row(sampling[index], sampled[index], bad_row)
        expected = [(sampling[i].sequence, self.expected_tokens(sampling[i], sampled[i])) for i in live]
        progress = self.scheduler.update(batch, [tuple(token_ids) for token_ids in sampled])
        assert [(p.sequence, p.token_ids) for p in progress] == expected
        for p in progress:
            if p.token_ids:
                self.num_clean_steps[p.sequence] += 1
                if self.num_clean_steps[p.sequence] >= 2:
                    self.num_failures[p.sequence] = 0
            assert (p.finish_reason is FinishReason.ERROR) == (not p.token_ids)
            assert p.stop_token_id == (p.token_ids[-1] if p.finish_reason is FinishReason.STOP else None)
            self.seen["ended in a draft"] += p.finish_reason is not None and len(p.token_ids) > 1
            if p.finish_reason is not None:
                self.take_end(p.sequence, p.finish_reason)

    def abandon(self, batch: ScheduledBatch) -> None:
        """Take back a failed step; only a suspect that was computed alone may end by it."""
        failed = [item.sequence for item in batch.items if item.sequence.is_running]
        suspects = [sequence for sequence in failed if self.num_failures[sequence] >= 2]
        assert len(suspects) <= 1
        self.num_failures.update(failed)
        for sequence in failed:
            self.num_clean_steps[sequence] = 0
        guilty = self.scheduler.abandon(batch)
        assert guilty is (suspects[0] if suspects else None)
        if guilty is not None:
            self.take_end(guilty, FinishReason.ERROR)
        self.seen["guilty"] += guilty is not None

    def lose_row(self, item: ScheduledSequence, token_ids: list[int | None], which: int) -> None:
        """Make one row of an item unusable, with what it may have stored."""
        row, sequence = -(1 + which) % len(token_ids), item.sequence
        token_ids[row] = None
        num_known = len(sequence.token_ids)
        shared = {b for s in self.sequences if s is not sequence for b in s.block_ids}
        cells = self.shadow.cells_of(sequence, 0 if row == 0 else num_known + row - 1, num_known + len(item.draft))
        self.shadow.spoil(cell for cell in cells if cell[0] not in shared)
        self.seen["rows of a draft lost"] += row > 0

    def expected_tokens(self, item: ScheduledSequence, token_ids: list[int | None]) -> tuple[int, ...]:
        """Return what a step must give: the truth, as far as the draft had it and one more, up to a lost row."""
        truth = complete_alone(item.sequence.request, self.limits["max_model_len"])[0]
        truth = truth[len(item.sequence.token_ids) :]
        num_usable = token_ids.index(None) if None in token_ids else len(token_ids)
        num_foreseen = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(truth, item.draft, strict=False))))
        return tuple(truth[: min(num_foreseen + 1, num_usable)])

    def cells_to_fill(self, item: ScheduledSequence) -> set[tuple[int, int]]:
        start = item.sequence.num_computed
        return self.shadow.cells_of(item.sequence, start, start + item.num_tokens)

    def abort_one(self, sequence: SequenceState) -> None:
        ended_before = sequence.finish_reason is not None
        assert self.scheduler.abort(sequence.request.request_id) is (None if ended_before else sequence)
        if not ended_before:
            self.take_end(sequence, FinishReason.ABORT)

    def take_end(self, sequence: SequenceState, reason: FinishReason) -> None:
        """Record an end, and check it and the tokens against the request computed alone."""
        request_id = sequence.request.request_id
        assert request_id not in self.ended, "a request ended twice"
        assert (sequence.is_running, sequence.finish_reason) == (False, reason)
        assert len(sequence.block_ids) == 0
        self.ended[request_id] = reason
        self.seen[reason] += 1
        token_ids, reason_alone = complete_alone(sequence.request, self.limits["max_model_len"])
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (sequence.token_ids, reason) == (token_ids, reason_alone)
        else:
            assert sequence.token_ids == token_ids[: len(sequence.token_ids)]


class IgnoresSalts(BlockPool):
    """Shares between requests that must not share."""

    def match(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        return super().match(token_ids, "")

    def register(self, block_ids: Sequence[int], index: int, token_ids: Sequence[int], cache_salt: str) -> bool:
        return super().register(block_ids, index, token_ids, "")


class TrustsDigests(BlockPool):
    """Finds blocks by a digest that collides, without confirming token ids."""

    def match(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        return super().match([0] * len(token_ids), cache_salt)

    def register(self, block_ids: Sequence[int], index: int, token_ids: Sequence[int], cache_salt: str) -> bool:
        return super().register(block_ids, index, [0] * len(token_ids), cache_salt)


class ForgetsChains(BlockPool):
    """Confirms a block's own tokens but not those before it."""

    def match(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        block_ids: list[int] = []
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            found = super().match([*token_ids[start : start + self.block_size], 0], cache_salt)
            if not found or found[0] in block_ids:
                break
            block_ids += found
        return block_ids

    def register(self, block_ids: Sequence[int], index: int, token_ids: Sequence[int], cache_salt: str) -> bool:
        return super().register(block_ids[index:], 0, token_ids[index * self.block_size :], cache_salt)


class FreesSharedBlocks(BlockPool):
    """Lets the first holder that frees a block free it for all."""

    def free(self, block_ids: Sequence[int]) -> None:
        held = [block_id for block_id in block_ids if self.num_references[block_id]]
        for block_id in held:
            self.num_references[block_id] = 1
        super().free(held)


class NeverForgets(BlockPool):
    """Goes on offering what a failed step was to fill."""

    def forget(self, block_ids: Iterable[int]) -> None:
        pass


class LosesPreempted(Scheduler):
    """Forgets to queue what it preempts."""

    def _preempt(self, sequence: SequenceState) -> None:
        super()._preempt(sequence)
        self._waiting.remove(sequence)


class TriesNobodyAlone(Scheduler):
    """Computes suspects like all others."""

    def schedule(self) -> ScheduledBatch:
        suspects, self._suspects = self._suspects, set()
        batch = super().schedule()
        self._suspects = suspects
        return batch


class ServesTheLastFirst(Scheduler):
    """Lets newcomers overtake."""

    def add(self, request: Request) -> SequenceState:
        sequence = super().add(request)
        sequence.arrival = -sequence.arrival
        self._waiting.sort(key=lambda waiting: waiting.order)
        return sequence


class SharesDrafts(Scheduler):
    """Offers blocks for sharing before the drafted tokens in them are accepted."""

    def _add_drafts(self, items: list[ScheduledSequence], room: int) -> None:
        super()._add_drafts(items, room)
        for item in items:
            sequence, num_known = item.sequence, len(item.sequence.token_ids)
            sequence.token_ids += item.draft
            self._blocks.register(sequence, num_known, num_known + len(item.draft))
            del sequence.token_ids[num_known:]


class DraftsFirst(Scheduler):
    """Lets drafts take the budget before anybody is admitted."""

    def _schedule_waiting(self, items: list[ScheduledSequence], budget: Budget, *, fillers: bool) -> None:
        num_before = sum(item.num_tokens for item in items)
        if self._drafter is not None:
            self._add_drafts(items, self._drafter, budget.tokens)
        budget.tokens -= sum(item.num_tokens for item in items) - num_before
        super()._schedule_waiting(items, budget, fillers=fillers)

    def _add_drafts(self, items: list[ScheduledSequence], drafter: Drafter, room: int) -> None:
        if not any(item.draft for item in items):
            super()._add_drafts(items, drafter, room)


def serve(
    chosen: settings,
    *,
    pool_class: type[BlockPool] = BlockPool,
    scheduler_class: type[Scheduler] = Scheduler,
    check_internals: bool = True,
) -> Counter[str]:
    """Run the machine and return what it has seen."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: SchedulerMachine(pool_class, scheduler_class, seen, check_internals), settings=chosen
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "steps", "often"), [(80, 3_000, 4), pytest.param(250, 10_000, 30, marks=pytest.mark.slow)]
)
def test_survives_random_service(examples: int, steps: int, often: int) -> None:
    seen = serve(settings(SETTINGS, max_examples=examples))
    assert seen["steps"] >= steps
    of_drafts = ("accepted", "rejected", "ended in a draft", "rows of a draft lost")
    of_failures = ("tried alone", "guilty")
    for event in ("preemptions", "prefix hits", "shared at once", *of_failures, *of_drafts, *ENDS):
        assert seen[event] >= often, f"too little happened to prove anything: {seen}"
    assert seen["chunks put off"] >= often // 2


@pytest.mark.slow
@pytest.mark.parametrize("examples", [500] * 10)  # in parts, which processes share
def test_survives_much_more_random_service(examples: int) -> None:
    assert serve(settings(SETTINGS, derandomize=False, max_examples=examples))["steps"] >= 20 * examples


@pytest.mark.some(2)
@pytest.mark.parametrize("broken", [IgnoresSalts, TrustsDigests, ForgetsChains, FreesSharedBlocks, NeverForgets])
def test_the_shadow_alone_catches_a_broken_pool(broken: type[BlockPool]) -> None:
    with pytest.raises(AssertionError, match=r"attends to foreign content|overwrites what another"):
        serve(UNTIL_A_FAILURE, pool_class=broken, check_internals=False)


def test_the_shadow_alone_catches_drafts_that_are_shared() -> None:
    with pytest.raises((AssertionError, KeyError)):  # the pool may stumble over them first
        serve(UNTIL_A_FAILURE, scheduler_class=SharesDrafts, check_internals=False)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (LosesPreempted, "makes progress"),
        (ServesTheLastFirst, "overtaken"),
        (TriesNobodyAlone, "the first suspect is computed alone"),
        pytest.param(DraftsFirst, "at the expense of others|make a step long", marks=pytest.mark.slow),
    ],
)
def test_the_rules_of_service_catch_a_broken_scheduler(broken: type[Scheduler], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        serve(UNTIL_A_FAILURE, scheduler_class=broken, check_internals=False)
