"""Keeps the blocks of each sequence in step with its tokens.

It joins SequenceState and BlockPool: it counts, allocates, registers and frees the blocks of one sequence at a time.
Scheduler calls it and decides which sequence gets blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.sequence import SequenceState
from gptserve.engine.state_place import StatePlace


class _Refusal(NamedTuple):
    """`allocate` found too few free blocks for a sequence of so many tokens: it needs num_lacking that nobody holds.

    That was when the pool's num_offers had this value.
    """

    arrival: int
    num_tokens: int
    num_lacking: int
    num_offers: int


class SequenceBlocks:
    """Changes SequenceState.block_ids; `allocate` sets num_computed, too."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool, self.block_size = pool, pool.block_size
        self._unfilled: list[int] = []
        self._unknown: list[tuple[SequenceState, int, int]] = []  # positions that end with a foreseen token
        self._refusal: _Refusal | None = None  # the newest

    def begin_step(self) -> list[int]:
        """Return the ScheduledBatch.unfilled of a new step, to which `register` adds from here on."""
        self._unfilled = []
        return self._unfilled

    def num_needed(self, sequence: SequenceState, num_more: int = 0) -> int:
        """Return how many blocks the known tokens of a sequence and num_more tokens after them take."""
        return -(-(len(sequence.token_ids) + num_more) // self.block_size)

    def allocate(self, sequence: SequenceState, *, use_cache: bool) -> bool:
        """Give a sequence without blocks all it needs; False, and nothing changes, if too few are free.

        With use_cache the first ones are those of the longest cached prefix; its tokens count as computed. A prefix is
        not matched again while too few blocks have become free or shared to change an earlier refusal.
        """
        if use_cache and self._is_still_refused(sequence):
            return False
        matched = self._pool.match(sequence.token_ids, sequence.request.cache_salt) if use_cache else []
        return self._take_blocks(sequence, matched)

    def _take_blocks(self, sequence: SequenceState, matched: Sequence[int]) -> bool:
        """Give a sequence these blocks, which are computed, and the others it needs; False if too few are free."""
        block_ids = self._pool.allocate(self.num_needed(sequence) - len(matched), matched)
        if block_ids is None:
            num_held = sum(self._pool.num_references[block_id] > 0 for block_id in matched)
            num_lacking = self.num_needed(sequence) - num_held
            self._refusal = _Refusal(sequence.arrival, len(sequence.token_ids), num_lacking, self._pool.num_offers)
            return False
        self._refusal = None
        sequence.block_ids.extend(block_ids)
        sequence.num_computed = len(matched) * self.block_size
        return True

    def first_ready(self, waiting: Sequence[SequenceState]) -> SequenceState | None:
        """Return the first of those that wait whose turn it is; None if there is none."""
        return waiting[0] if waiting else None

    def num_schedulable(self, sequence: SequenceState) -> int:
        """Return how many of a sequence's uncomputed tokens one step may compute."""
        return sequence.num_uncomputed

    def place_state(self, sequence: SequenceState, num_tokens: int) -> StatePlace | None:
        """Return where a step of so many tokens, which are registered, has the state; None: the model has none."""
        return None

    def _is_still_refused(self, sequence: SequenceState) -> bool:
        """Whether it is certain, without a look at the tokens, that `allocate` would refuse a sequence again."""
        refusal = self._refusal
        if refusal is None or (refusal.arrival, refusal.num_tokens) != (sequence.arrival, len(sequence.token_ids)):
            return False
        num_offers = self._pool.num_offers - refusal.num_offers  # each may spare the sequence one block
        return refusal.num_lacking - num_offers > self._pool.num_free

    def grow(self, sequence: SequenceState) -> bool:
        """Give a running sequence the blocks it lacks; False, and nothing changes, if too few are free."""
        if len(sequence.token_ids) <= len(sequence.block_ids) * self.block_size:
            return True
        new = self._pool.allocate(self.num_needed(sequence) - len(sequence.block_ids))
        sequence.block_ids.extend(new or ())
        return new is not None

    def reserve(self, sequence: SequenceState, num_tokens: int) -> int:
        """Give a sequence free blocks for num_tokens after its known ones; return how many tokens fit."""
        num_missing = self.num_needed(sequence, num_tokens) - len(sequence.block_ids)
        new = self._pool.allocate(min(num_missing, self._pool.num_free))
        assert new is not None, "no more was asked for than is free"
        sequence.block_ids.extend(new)
        return len(sequence.block_ids) * self.block_size - len(sequence.token_ids)

    def trim(self, sequence: SequenceState) -> None:
        """Free the blocks after the known tokens."""
        num_blocks = self.num_needed(sequence)
        self._pool.free(sequence.block_ids[num_blocks:])
        del sequence.block_ids[num_blocks:]

    def free(self, sequence: SequenceState) -> None:
        """Free all blocks of a sequence."""
        self._pool.free(sequence.block_ids)
        del sequence.block_ids[:]

    def forget(self, sequence: SequenceState) -> None:
        """Make all blocks of a sequence unfindable, as their content cannot be trusted."""
        self._pool.forget(sequence.block_ids)

    def register(self, sequence: SequenceState, start: int, end: int) -> None:
        """Make the blocks findable that known tokens at positions [start, end) complete.

        If the last of them is foreseen, `register_known` does it.
        """
        first, last = start // self.block_size, end // self.block_size
        if first == last:
            return
        if sequence.is_foreseen:
            self._unknown.append((sequence, start, end))
            return
        for index in range(first, last):
            if self._pool.register(sequence.block_ids, index, sequence.token_ids, sequence.request.cache_salt):
                self._unfilled.append(sequence.block_ids[index])

    def register_known(self) -> None:
        """Make the blocks findable that wait for tokens which were foreseen and are known now."""
        known, self._unknown = self._unknown, []
        for sequence, start, end in known:
            if sequence.is_running:
                self.register(sequence, start, end)

    def forget_unfilled(self, unfilled: Iterable[int]) -> None:
        """Make the blocks unfindable that a step, which failed, was to fill."""
        self._pool.forget(unfilled)
        self._unknown.clear()
