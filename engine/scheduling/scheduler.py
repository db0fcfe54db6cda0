"""Decides how many tokens of which sequence the next step computes: one rule, no phases.

A sequence has known tokens, of which the first num_computed are computed. Each step computes more of them, within a
budget of tokens for the whole step. Chunked prefill, decoding, prefix hits, recomputation after preemption and replay
all follow this rule. What is left of the budget verifies drafts: guesses at the tokens after the known ones.
Torch-free and synchronous: Engine calls `schedule`, computes, and then calls `update` or `abandon`. While it computes,
`foresee` lets it call `schedule` for the next step.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, eq

from gptserve.engine.pooling import AnyRequest
from gptserve.engine.request import FinishReason, Request
from gptserve.engine.scheduling import foresight
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.drafter import Drafter
from gptserve.engine.scheduling.filler import FillerRoom
from gptserve.engine.scheduling.prompt_pace import Budget, Pace
from gptserve.engine.scheduling.sequence import Progress, ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks
from gptserve.engine.scheduling.state_pool import StatePool
from gptserve.engine.scheduling.stateful_blocks import StatefulBlocks
from gptserve.engine.stats import EngineStats

_in_order_of_service = attrgetter("order")


class Scheduler:
    """Holds waiting and running sequences, both in order of service: lower priority value, then earlier arrival.

    Fillers come last: they get what others leave of a step, within FillerRoom, and others take their slots and blocks.

    - Running sequences come first, in order, each as far as the budget allows. The rest of the budget goes to waiting
      ones, in order, while there are running slots. The first that cannot be admitted holds back the rest.
    - Admission allocates the blocks of all known tokens at once. After that only sampled tokens need new blocks.
    - A running sequence that lacks a block preempts the last one in order, or itself if it is the last. Then this step
      admits nobody. The preempted sequence gives up its blocks and waits, in its old place, to be recomputed. The last
      one in order is never already scheduled in this step.
    - Priority orders admission, budget and preemption. But a waiting sequence never takes a running slot or a block
      from a running one, unless that one alone is a filler. With a PromptPace each sequence that decodes, and is no
      filler, has its token in every step.
    - The first in order never lacks a block, as the pool can hold one sequence of max_model_len. So every step makes
      progress, and every sequence ends with exactly one FinishReason.
    - After a failed step its sequences are recomputed from the start. While there are suspects (engine/blame.py),
      only the first of them in order is computed; it preempts others as needed.
    - Drafts come last and use only what is left: budget, up to Drafter.max_step_tokens, shared evenly by the sequences
      that need sampling, and free blocks. Blocks with only rejected tokens are freed at the end of the step.

    Blocks of known tokens are registered for sharing before the step that fills them, so that equal prompts admitted
    together are computed once. If the step fails, `abandon` takes that back. A block with draft tokens is registered
    when all its tokens are accepted, one with a foreseen token when that is known.

    Steps are computed in the order of `schedule`. So a block that is freed or offered for sharing while a step runs is
    written and read by later steps only after that.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        drafter: Drafter | None = None,
        pace: Pace | None = None,
        max_queue_time_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        states: StatePool | None = None,
    ) -> None:
        assert pool.num_blocks * pool.block_size >= max_model_len, "the pool must hold a sequence of max_model_len"
        self._pool = pool
        self._blocks = SequenceBlocks(pool) if states is None else StatefulBlocks(pool, states)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._drafter = drafter or Drafter()
        self._pace = pace or Pace()
        self._max_queue_time_s = max_queue_time_s
        self._clock = clock
        self._waiting: list[SequenceState] = []  # both in order of service
        self._running: list[SequenceState] = []
        self._live: dict[str, SequenceState] = {}
        self._suspects: set[SequenceState] = set()
        self._num_arrivals = 0
        self._foreseen: ScheduledBatch | None = None
        self._updated_at = 0.0
        self._filler_room = FillerRoom()
        self.stats = EngineStats()
        """The totals so far; the gauges stay 0."""

    @property
    def num_running(self) -> int:
        """How many sequences hold a running slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many sequences wait for a running slot, for the first time or again."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self._live)

    def add(self, request: AnyRequest) -> SequenceState:
        """Queue a request. It has passed Request.check and no live request has its id."""
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        num_prompt, known, max_len, num_scored = len(request.prompt_token_ids), [*request.prompt_token_ids], 0, 0
        if isinstance(request, Request):
            assert num_prompt < self._max_model_len, "the prompt must leave room for a token"
            known += request.generated_token_ids
            max_len = min(num_prompt + request.params.max_tokens, self._max_model_len)
            num_scored = request.num_scored_tokens
        assert 0 < num_prompt <= self._max_model_len
        sequence = SequenceState(
            *(request, self._num_arrivals, known, self._clock()),
            max_len=max_len or num_prompt,
            num_scored=num_scored,
            blame=request.blame,
        )
        sequence.is_always_foreseeable = foresight.is_always_foreseeable(sequence, self._drafter)
        self._num_arrivals += 1
        if sequence.blame.is_suspect:
            self._suspects.add(sequence)
        self._live[request.request_id] = sequence
        insort(self._waiting, sequence, key=_in_order_of_service)
        return sequence

    def abort(self, request_id: str) -> SequenceState | None:
        """End a request and free its blocks at once; None if no live request has this id. Allowed during a step."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)
        return sequence

    def complete(self, sequence: SequenceState) -> None:
        """End a running sequence whose prompt is all that was wanted, and is computed."""
        self._end(sequence, FinishReason.STOP)

    def fail(self, sequence: SequenceState) -> None:
        """End a running sequence whose numbers are not finite; its blocks are shared no more."""
        self._blocks.forget(sequence)
        self._end(sequence, FinishReason.ERROR)

    def schedule(self) -> ScheduledBatch:
        """Choose what the next step computes and allocate its blocks; empty only if there is no work that can begin.

        Call `update` or `abandon` before the next `schedule`, or `foresee`.
        """
        scheduled_at, unfilled = self._clock(), self._blocks.begin_step()
        items: list[ScheduledSequence] = []
        if self._suspects:
            self._schedule_alone(min(self._suspects, key=_in_order_of_service), items)
            return ScheduledBatch(tuple(items), scheduled_at, unfilled)
        num_preemptions = self.stats.num_preemptions
        budget = self._new_budget()
        self._schedule_running(items, budget, fillers=False)
        if self.stats.num_preemptions == num_preemptions:
            self._schedule_waiting(items, budget, fillers=False)
        num_kept = max(0, budget.tokens - self._filler_room.max_tokens(len(items)))
        budget.tokens -= num_kept
        self._schedule_running(items, budget, fillers=True)
        if not items:  # those that decode lacked blocks and gave up theirs
            budget.chunk_tokens = budget.tokens
            self._schedule_running(items, budget, fillers=False)
            self._schedule_running(items, budget, fillers=True)
        if self.stats.num_preemptions == num_preemptions:
            self._schedule_waiting(items, budget, fillers=True)
        budget.tokens += num_kept
        num_scheduled = self._max_num_batched_tokens - budget.tokens
        self._add_drafts(items, min(budget.tokens, self._drafter.max_step_tokens - num_scheduled))
        return ScheduledBatch(tuple(items), scheduled_at, unfilled)

    def foresee(self, batch: ScheduledBatch, *, host_counts: bool = True) -> bool:
        """Count the step that runs as computed, so that `schedule` can plan the next one; return whether it can.

        It cannot if the host needs the tokens of this one, as it does with host_counts for penalties; if the next step
        might preempt, as an end may make that needless; or while there are suspects. Otherwise each sequence that goes
        on gets a foreseen token (SequenceState.is_foreseen). If the real token ends the sequence, its part of the next
        step is void.
        """
        is_short_of_blocks = foresight.num_missing_blocks(self._running, self._blocks) > self._pool.num_free
        asked = [item for item in batch.items if not item.sequence.is_always_foreseeable]
        is_needed = any(foresight.must_be_known(item, self._drafter, host_counts=host_counts) for item in asked)
        if self._suspects or is_short_of_blocks or is_needed or self._may_preempt():
            return False
        foresight.foresee(batch)
        self._foreseen = batch
        return True

    def expire_waiting(self) -> list[SequenceState]:
        """End and return the sequences that have waited for max_queue_time_s; call it after `schedule`.

        A sequence that may have run before is never among them.
        """
        if self._max_queue_time_s is None:
            return []
        latest = self._clock() - self._max_queue_time_s
        overdue = (s for s in self._waiting if s.queued_at <= latest)
        expired = [s for s in overdue if not (s.may_have_run or s.request.is_filler)]
        for sequence in expired:
            self._end(sequence, FinishReason.QUEUE_TIMEOUT)
        return expired

    def update(self, batch: ScheduledBatch, sampled: Iterable[tuple[int | None, ...]]) -> list[Progress]:
        """Accept the results of a step: the sampled tokens of each item that needs sampling, in order.

        They are the token after the known ones, then the token after each draft token. None stands for unusable logits:
        if a sequence needs that token, it fails and its blocks are no longer shared. Sequences that were aborted during
        the step are skipped.
        """
        begun_at, self._updated_at = max(batch.scheduled_at, self._updated_at), self._clock()
        if any(item.sequence.is_running for item in batch.items):  # a void step may have ended long ago
            self._pace.observe(batch, self._updated_at - begun_at)
            self._filler_room.observe(batch, self._updated_at - begun_at)
            self._drafter.observe(batch, self._updated_at - begun_at)
        sampling = [item for item in batch.items if item.needs_sampling]
        if batch is not self._foreseen:
            foresight.count_computed(batch)
        self._foreseen = None
        results = zip(sampling, sampled, strict=True)
        progressed = [self._accept(item, token_ids) for item, token_ids in results if item.sequence.is_running]
        self._blocks.register_known()
        return progressed

    def abandon(self, batch: ScheduledBatch, *, blames: bool = True) -> SequenceState | None:
        """Undo a step that raised: its sequences are recomputed, as the step may have stored anything.

        A convicted sequence ends instead and is returned. Blocks that the step was to fill are forgotten. Blocks that
        earlier steps filled stay valid and shared. Without `blames` the step is undone for what one before it did.
        """
        self._blocks.forget_unfilled(batch.unfilled)
        self._foreseen = None
        failed = [item.sequence for item in batch.items if item.sequence.is_running]
        for sequence in failed:
            foresight.drop_foreseen(sequence)
            if blames:
                sequence.blame = sequence.blame.step_raised(alone=len(batch.items) == 1)
            if sequence.blame.is_convicted:
                self._end(sequence, FinishReason.ERROR)
                return sequence
            self._running.remove(sequence)
            self._requeue(sequence)
            if sequence.blame.is_suspect:
                self._suspects.add(sequence)
        return None

    def _new_budget(self) -> Budget:
        uncomputed = [len(sequence.token_ids) - sequence.num_computed for sequence in self._running]
        num_decoding, num_ending = uncomputed.count(1), uncomputed.count(0)  # 0: their last token is on its way
        num_slots = min(self._max_num_seqs, len(self._running) + len(self._waiting)) - num_ending
        return self._pace.budget(self._max_num_batched_tokens, num_decoding, num_slots - num_decoding)

    def _schedule_running(self, items: list[ScheduledSequence], budget: Budget, *, fillers: bool) -> None:
        for sequence in self._running:  # preemption may shorten the list meanwhile, only at its end
            if sequence.request.is_filler is fillers and budget.has_room_for(sequence.num_uncomputed):
                if not (self._blocks.grow(sequence) or self._make_room(sequence)):
                    break
                self._schedule_tokens(sequence, items, budget)

    def _make_room(self, sequence: SequenceState) -> bool:
        """Give a running sequence the blocks it lacks, preempting others if needed; False if it preempted itself."""
        while not self._blocks.grow(sequence):
            last = self._running.pop()
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self._requeue(sequence)
        self.stats.num_preemptions += 1

    def _requeue(self, sequence: SequenceState) -> None:
        """Take the blocks of a sequence and put it into its old place in the queue, to be recomputed."""
        self._blocks.free(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        insort(self._waiting, sequence, key=_in_order_of_service)

    def _schedule_alone(self, suspect: SequenceState, items: list[ScheduledSequence]) -> None:
        """Schedule only this suspect; preempt others, last in order first, until it has a running slot and blocks."""
        while not (self._blocks.grow(suspect) if suspect.is_running else self._admit(suspect)):
            last = max((s for s in self._running if s is not suspect), key=_in_order_of_service)
            self._running.remove(last)
            self._preempt(last)
        self._schedule_tokens(suspect, items, Budget(self._max_num_batched_tokens))

    def _schedule_waiting(self, items: list[ScheduledSequence], budget: Budget, *, fillers: bool) -> None:
        while (sequence := self._blocks.first_ready(self._waiting)) and budget.has_room_for(sequence.num_uncomputed):
            if sequence.request.is_filler is not fillers or not self._admit_before_fillers(sequence):
                break
            self._schedule_tokens(sequence, items, budget)

    def _admit_before_fillers(self, sequence: SequenceState) -> bool:
        """Admit a waiting sequence; one that is no filler preempts fillers that run, last in order first, if needed."""
        while not self._admit(sequence):
            if self._foreseen is not None or not self._may_preempt():
                return False
            self._preempt(self._running.pop())
        return True

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence a running slot and blocks for all its tokens; False if either is lacking."""
        if len(self._running) == self._max_num_seqs:
            return False
        use_cache = self._pool.enable_prefix_caching and not sequence.reads_whole_prompt
        if not self._blocks.allocate(sequence, use_cache=use_cache):
            return False
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_in_order_of_service)
        if sequence.begun_at is None:
            sequence.begun_at = self._clock()
        if use_cache and sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed
            self.stats.num_prefix_queried_tokens += sequence.num_prompt_tokens
            self.stats.num_prefix_hit_tokens += sequence.num_cached_tokens
        return True

    def _may_preempt(self) -> bool:
        """Whether the first that waits may take the slot and blocks of the last one that runs: it alone is a filler."""
        ends = [*self._waiting[:1], *self._running[-1:]]
        return [sequence.request.is_filler for sequence in ends] == [False, True]

    def _schedule_tokens(self, sequence: SequenceState, items: list[ScheduledSequence], budget: Budget) -> None:
        """Schedule tokens of a sequence that has its blocks, within the budget."""
        num_tokens = budget.take(self._blocks.num_schedulable(sequence))
        self._blocks.register(sequence, sequence.num_computed, sequence.num_computed + num_tokens)
        items.append(ScheduledSequence(sequence, num_tokens, state=self._blocks.place_state(sequence, num_tokens)))

    def _add_drafts(self, items: list[ScheduledSequence], room: int) -> None:
        """Add drafts to the items that need sampling, at most `room` tokens, which nobody else can use."""
        if room <= 0:
            return
        self._drafter.begin_step(len(items))
        sampling = [index for index, item in enumerate(items) if item.needs_sampling]
        for num_left, index in zip(range(len(sampling), 0, -1), sampling, strict=True):
            sequence, num_tokens = items[index].sequence, items[index].num_tokens
            max_tokens = min(-(-room // num_left), sequence.max_len - len(sequence.token_ids) - 1)
            if max_tokens <= 0:
                continue
            draft = self._drafter.draft(sequence, max_tokens)
            if draft and (draft := draft[: self._blocks.reserve(sequence, len(draft))]):
                items[index] = ScheduledSequence(sequence, num_tokens + len(draft), draft)
                room -= len(draft)

    def _accept(self, item: ScheduledSequence, sampled: tuple[int | None, ...]) -> Progress:
        """Append sampled tokens, up to the first that differs from the draft or ends the sequence."""
        sequence, draft, token_ids = item.sequence, item.draft, item.sequence.token_ids
        if token_ids[-1] < 0:  # foreseen
            token_ids.pop()
        newest = sampled[0]
        if newest is None:
            self.fail(sequence)
            return Progress(sequence, (), FinishReason.ERROR)
        if sequence.blame.num_failures:
            sequence.blame = sequence.blame.step_gave_token()
            if not sequence.blame.is_suspect:
                self._suspects.discard(sequence)
        assert len(sampled) == 1 + len(draft)
        token_ids.append(newest)
        accepted: tuple[int, ...] = (newest,)
        reason = sequence.end_reason(self._eos_token_ids)
        if draft:
            for guess, following in zip(draft, sampled[1:], strict=True):
                if reason is not None or newest != guess or following is None:
                    break  # None: the next step computes it again, as its first token
                newest = following
                token_ids.append(newest)
                accepted, reason = (*accepted, newest), sequence.end_reason(self._eos_token_ids)
            self._rollback(item, accepted)
        if reason is not None:
            self._end(sequence, reason)
        return Progress(sequence, accepted, reason, newest if reason is FinishReason.STOP else None)

    def _rollback(self, item: ScheduledSequence, accepted: Sequence[int]) -> None:
        """Count the accepted tokens of a draft as computed, and free the blocks of the rejected ones."""
        sequence, num_before = item.sequence, item.sequence.num_computed
        num_held = sum(map(eq, accepted, item.draft))
        self.stats.num_draft_tokens += len(item.draft)
        self.stats.num_accepted_tokens += num_held
        self._drafter.note(sequence, len(item.draft), num_held)
        sequence.num_computed = len(sequence.token_ids) - 1
        self._blocks.register(sequence, num_before, sequence.num_computed)
        self._blocks.trim(sequence)

    def waits(self, sequence: SequenceState) -> tuple[float, float] | None:
        """Return TokenOutput.waits of a sequence whose first token has come now."""
        begun_at = sequence.begun_at
        return None if begun_at is None else (begun_at - sequence.queued_at, self._clock() - begun_at)

    def _end(self, sequence: SequenceState, reason: FinishReason) -> None:
        foresight.drop_foreseen(sequence)
        queue = self._running if sequence.is_running else self._waiting
        queue.remove(sequence)
        del self._live[sequence.request.request_id]
        self._suspects.discard(sequence)
        self._blocks.free(sequence)
        self._drafter.forget(sequence)
        sequence.finish_reason = reason
