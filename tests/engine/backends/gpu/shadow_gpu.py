"""A GPU of which all that matters for overlapping steps is real, and no number is computed.

Stream is its queue. ShadowRunner is a ModelRunner on it, with a cache that knows what it holds and the engine's own
counts for penalties: the host's part of a step comes at its launch, the device's when the stream gets to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from zlib import crc32

import torch

from gptserve.engine.backends.gpu.token_counts import DeviceCounts, News
from gptserve.engine.info import EngineInfo
from gptserve.engine.request import Request
from gptserve.engine.runner.runner import Collect, StepResult
from gptserve.engine.runner.sampler import SampledTokens
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.sampling.adjustments import SequenceAdjustments
from gptserve.engine.sampling.token_counts import TokensBefore
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from tests.engine.batches import KnownStep
from tests.engine.test_scheduler_machine import EOS, FickleDrafter, Prefix, next_token, prefix_at

MAX_MODEL_LEN, BLOCK_SIZE, VOCAB = 12, 2, 4


def as_launched(batch: ScheduledBatch) -> ScheduledBatch:
    """Return the batch with copies of its sequences, as they are now. They share what the sampler keeps."""

    def item_of(item: ScheduledSequence) -> ScheduledSequence:
        sequence = copy(item.sequence)
        sequence.token_ids, sequence.block_ids = list(sequence.token_ids), list(sequence.block_ids)
        return ScheduledSequence(sequence, item.num_tokens, item.draft)

    return ScheduledBatch(tuple(map(item_of, batch.items)))


def batch_of(step: StepInput) -> ScheduledBatch:
    """Return the batch of a step, or of the engine's own a like one."""
    if isinstance(step, KnownStep):
        return step.batch
    (_, known, *_), arrays = step.positions[0], step.arrays
    request = Request("probe", (known[0],), step.positions[0].state.params, seed=0)
    [position] = arrays.positions
    sequence = SequenceState(request, 0, list(known), num_computed=position, block_ids=arrays.block_tables)
    return ScheduledBatch((ScheduledSequence(sequence, 1),))


def adjustments_of(sequence: SequenceState) -> SequenceAdjustments:
    """Return what the sampler keeps for a sequence; made if need be."""
    state = sequence.sampling
    if state.adjustments is None:
        state.adjustments = SequenceAdjustments(state.params, state.num_prompt_tokens, VOCAB)
    return state.adjustments


class Stream:
    """A device's queue: steps are computed in order, `choose_delay` of them later than they could be."""

    def __init__(self, choose_delay: Callable[[], int]) -> None:
        self._choose_delay = choose_delay
        self._queue: list[Callable[[], None]] = []
        self.num_launched = 0
        self.num_ahead = 0
        """How many steps were collected after a later one had been launched."""

    def launch(self, compute: Callable[[], StepResult]) -> Collect:
        """Queue a step. What it raises comes when it is collected."""
        number, results = self.num_launched, list[StepResult | BaseException]()
        self.num_launched += 1

        def computed() -> None:
            try:
                results.append(compute())
            except Exception as error:
                results.append(error)

        def collect() -> StepResult:
            while not results:
                self._queue.pop(0)()
            self.num_ahead += self.num_launched > number + 1
            if isinstance(results[0], BaseException):
                raise results[0]
            return results[0]

        self._queue.append(computed)
        while len(self._queue) > self._choose_delay():
            self._queue.pop(0)()
        return collect


class Violation(BaseException):
    """A rule was broken; no Exception, which the engine would take for a failed step."""


@dataclass
class Faults:
    """Which steps fail, and how, by their number; the engine's own warm-up never does."""

    launches: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    unusable: frozenset[int] = frozenset()

    def without(self, number: int) -> Faults:
        return Faults(*(steps - {number} for steps in (self.launches, self.steps, self.unusable)))


class SomeDrafts(FickleDrafter):
    """Drafts for some requests, and reads none of a sequence whose newest token is foreseen."""

    def __init__(self, mood: str) -> None:
        super().__init__(mood, MAX_MODEL_LEN)

    def may_draft(self, sequence: SequenceState) -> bool:
        return crc32(sequence.request.request_id.encode()) % 5 == 0

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        if not self.may_draft(sequence):
            return ()
        if sequence.is_foreseen:
            raise Violation("a draft was asked for before the tokens were known")
        return super().draft(sequence, max_tokens)


class Seated:
    """The device's part of the counts in one step, with the tensor that there was at the launch."""

    def __init__(
        self, counts: DeviceCounts, seat_of: Mapping[int, int], news: News | None = None, alone: Sequence[int] = ()
    ) -> None:
        self._counts, self._seat_of, self._news, self._alone = copy(counts), seat_of, news, alone

    def update(self) -> None:
        if self._news is not None:
            self._counts.update(*map(torch.from_numpy, self._news))

    def check(self, row: int, sequence: SequenceState) -> None:
        """Raise Violation unless the seat of this row counts the known tokens of its sequence."""
        if row in self._seat_of:
            expected, num_prompt = [0] * VOCAB, sequence.num_prompt_tokens
            for token_id in sequence.token_ids[num_prompt:]:
                expected[token_id] += 2
            for token_id in set(sequence.token_ids[:num_prompt]):
                expected[token_id] += 1
            if (found := self._words()[self._seat_of[row]].tolist()) != expected:
                raise Violation(f"counts {found} instead of {expected}")

    def add_sampled(self, chosen: Sequence[int]) -> None:
        if self._alone:
            seats_C = torch.tensor([self._seat_of[row] for row in self._alone])
            self._counts.add_sampled(seats_C, torch.tensor([chosen[row] for row in self._alone]))

    def spoil(self) -> None:
        """Leave anything in the seats."""
        for seat in self._seat_of.values():
            self._words()[seat] = 77

    def _words(self) -> torch.Tensor:
        assert self._counts.words is not None
        return self._counts.words


@contextmanager
def no_other_failure() -> Iterator[None]:
    """Raise Violation for any Exception but those that Faults ask for."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise Violation("a failure that nobody asked for") from error


class ShadowRunner:
    """Tokens drawn from what was attended to; raises Violation unless each sequence attends to its own prefix, and is
    penalized for the tokens before it."""

    waits_in_launch = False

    def __init__(
        self, num_blocks: int, choose_delay: Callable[[], int], faults: Faults, max_num_seqs: int, *, host_counts: bool
    ) -> None:
        self.info = EngineInfo(
            **dict.fromkeys(EngineInfo.__slots__, 0)
            | {"vocab_size": VOCAB, "max_model_len": MAX_MODEL_LEN, "eos_token_ids": (EOS,), "device": "cuda"}
            | {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "task": "generate"}
        )
        self.host_counts, self.stream, self._faults = host_counts, Stream(choose_delay), faults
        self._counts = DeviceCounts(VOCAB, max_num_seqs, torch.device("cpu"))
        self._cells: dict[tuple[int, int], Prefix | None] = {}
        self._chosen: list[int] = []
        self._known_failures: dict[int, int] = {}  # a step that raised, and how many were launched when that was known
        self._must_be_collected = False
        self.num_foreseen_counts = 0
        """How many rows were penalized for a token that the host did not know."""

    @no_other_failure()
    def launch(self, step: StepInput) -> Collect:
        number, batch = self.stream.num_launched, batch_of(step)
        if batch.items[0].sequence.request.request_id == "probe":
            self._faults = self._faults.without(number)
        if self._must_be_collected:
            raise Violation("launched before the tokens that it reads were known")
        batch = as_launched(batch)
        if number in self._faults.launches:
            self.stream.num_launched += 1
            if number % 2:
                self._seat(batch)  # and the device was not told
            raise MemoryError("told to fail at the launch")
        seated = self._seat(batch)
        self._must_be_collected = any(map(self._is_read, batch.items))
        collect = self.stream.launch(lambda: self._compute(number, batch, seated))

        def seen() -> StepResult:
            self._must_be_collected = False
            try:
                return collect()
            except MemoryError:
                self._known_failures[number] = self.stream.num_launched
                raise

        return seen

    def _is_read(self, item: ScheduledSequence) -> bool:
        params = item.sequence.request.params
        is_counted = self.host_counts and params.repetition_penalty != 1.0
        return bool(item.draft) or (item.needs_sampling and bool(params.bad_words or is_counted))

    def _seat(self, batch: ScheduledBatch) -> Seated:
        """Do the host's part of counting for all rows with penalties."""
        before = list[TokensBefore | None]()
        for item in batch.items:
            sequence = item.sequence
            for i in range(item.needs_sampling * (1 + len(item.draft))):
                adjustment = adjustments_of(sequence).at(sequence.token_ids, item.draft[:i], ())
                before.append(adjustment.before if adjustment is not None and adjustment.before.known else None)
        counted = {row: its for row, its in enumerate(before) if its is not None and not self.host_counts}
        if not counted:
            self._counts.release_if_unused()
            return Seated(self._counts, {})
        self.num_foreseen_counts += sum(its.known[-1] < 0 for its in counted.values())
        seats, news, alone = self._counts.seat(list(counted.values()))
        return Seated(self._counts, dict(zip(counted, seats, strict=True)), news, [list(counted)[i] for i in alone])

    @no_other_failure()
    def _compute(self, number: int, batch: ScheduledBatch, seated: Seated) -> StepResult:
        is_void = [self._resolve(item.sequence) for item in batch.items]
        cells = [(item, position) for item in batch.items for position in _positions(item)]
        self._cells |= {_cell(item, position): prefix_at(item, position) for item, position in cells}
        if number in self._faults.steps:
            self._cells |= dict.fromkeys([_cell(item, position) for item, position in cells])
            seated.spoil()
            self._chosen = [0] * batch.num_tokens
            raise MemoryError("told to fail")
        is_doomed = any(number < self._known_failures.get(f, 1 << 30) for f in self._faults.steps if f < number)
        seated.update()
        chosen = list[int]()
        for item, is_nothing in zip(batch.items, is_void, strict=True):
            if not is_doomed:
                self._attend(item)
            if item.needs_sampling:
                if not is_doomed and not is_nothing:
                    seated.check(len(chosen), item.sequence)
                ends = list(_positions(item))[-1 - len(item.draft) :]
                chosen += [next_token(item.sequence.request, prefix_at(item, position)[1]) for position in ends]
        if chosen and number in self._faults.unusable:
            chosen[number % len(chosen)] = -1
        seated.add_sampled(chosen)
        self._chosen = chosen
        token_ids = tuple([None if token_id < 0 else token_id for token_id in chosen])
        return StepResult(SampledTokens(token_ids, (None,) * len(chosen)), {})

    def _attend(self, item: ScheduledSequence) -> None:
        sequence, limit = item.sequence, item.sequence.request.params.max_tokens
        if sequence.num_generated >= limit or len(sequence.token_ids) >= MAX_MODEL_LEN:
            raise Violation("computes the last token")
        for position in range(item.sequence.num_computed + item.num_tokens):
            content, own = self._cells.get(_cell(item, position)), prefix_at(item, position)
            if content != own:
                raise Violation(f"attends to {content} instead of {own}")

    def _resolve(self, sequence: SequenceState) -> bool:
        """Put in the foreseen token; return whether the step before gave none."""
        if any(token_id < 0 for token_id in sequence.token_ids[:-1]):
            raise Violation("a token was never known")
        if not sequence.is_foreseen:
            return False
        token_id = self._chosen[~sequence.token_ids[-1]]
        sequence.token_ids[-1] = max(0, token_id)
        return token_id < 0


def _positions(item: ScheduledSequence) -> range:
    return range(item.sequence.num_computed, item.sequence.num_computed + item.num_tokens)


def _cell(item: ScheduledSequence, position: int) -> tuple[int, int]:
    return item.sequence.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE
