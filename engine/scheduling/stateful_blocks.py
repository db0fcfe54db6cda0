"""The blocks of sequences and their states, where layers of the model keep a state in place of keys and values.

A prefix can be found again only where its state was kept. Scheduler has it in the place of SequenceBlocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.sequence import SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks
from gptserve.engine.scheduling.state_pool import HeldState, StatePool
from gptserve.engine.state_place import StatePlace

_MAX_PASSED_OVER = 64
"""Sequences that wait for states are looked at in each step."""


class StatefulBlocks(SequenceBlocks):
    """Changes SequenceState.held, too."""

    def __init__(self, pool: BlockPool, states: StatePool) -> None:
        super().__init__(pool)
        self._states = states
        self._keeping: dict[SequenceState, tuple[int, int]] = {}
        """Those that run and are yet to keep a state: where they began, and after how many tokens that is."""
        self._awaited: dict[SequenceState, SequenceState] = {}
        """Those that wait for such a state, and whose."""

    def begin_step(self) -> list[int]:
        self._states.begin_step()
        return super().begin_step()

    def allocate(self, sequence: SequenceState, *, use_cache: bool) -> bool:
        """Give a sequence a slot for its state and all blocks; False, and nothing changes, if either is lacking.

        With use_cache its state is to be kept at the end of its prompt's last block, and where others that began alike
        went on otherwise: where the cached prefix ends whose state nobody has kept.
        """
        if not self._states.can_take or (use_cache and self._is_still_refused(sequence)):
            return False
        matched = self._pool.match(sequence.token_ids, sequence.request.cache_salt) if use_cache else []
        prefixes = [self._pool.prefix_of(block_id) for block_id in matched]
        num_found = self._states.find(prefixes)
        if not self._take_blocks(sequence, matched[:num_found]):
            return False
        found = prefixes[num_found - 1] if num_found else None
        slot = self._states.take(besides=found)
        assert slot is not None
        is_kept = found is not None and self._states.find([found])
        source = -1 if found is None else self._states.read(found) if is_kept else slot
        ends = {len(matched), (sequence.num_prompt_tokens - 1) // self.block_size}
        keep_at = [num * self.block_size for num in sorted(ends) if num > num_found] if use_cache else []
        sequence.held = HeldState(slot, source, keep_at)
        if keep_at:
            self._keeping[sequence] = sequence.num_computed, keep_at[-1]
        return True

    def first_ready(self, waiting: Sequence[SequenceState]) -> SequenceState | None:
        """Return the first that does not wait for a state; of many that do, those behind wait, too."""
        for sequence in islice(waiting, _MAX_PASSED_OVER):
            other = self._awaited.get(sequence)
            if other not in self._keeping:
                self._awaited.pop(sequence, None)
                other = next((other for other in self._keeping if self._spares_half(other, sequence)), None)
                if other is None:
                    return sequence
                self._awaited[sequence] = other
        return None

    def _spares_half(self, other: SequenceState, sequence: SequenceState) -> bool:
        """Whether the state that a running sequence is to keep spares another half of its tokens or more."""
        (start, end), token_ids = self._keeping[other], sequence.token_ids
        if sequence.reads_whole_prompt or 2 * (end - start) < len(token_ids) - start or end >= len(token_ids):
            return False
        is_alike = other.request.cache_salt == sequence.request.cache_salt and other.token_ids[0] == token_ids[0]
        return is_alike and other.token_ids[:end] == token_ids[:end]

    def forget(self, sequence: SequenceState) -> None:
        """Make all blocks of a sequence unfindable, and what was kept after them."""
        self._states.forget(self._pool.prefix_of(block_id) for block_id in sequence.block_ids)
        super().forget(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Free all blocks of a sequence, and its state."""
        super().free(sequence)
        if sequence.held is not None:
            self._states.give_back(sequence.held.slot)
            sequence.held = None
            self._keeping.pop(sequence, None)

    def num_schedulable(self, sequence: SequenceState) -> int:
        """Return how many uncomputed tokens one step may compute: a step keeps one state of a sequence."""
        held, num = sequence.held, sequence.num_uncomputed
        if held is None or len(held.keep_at) < 2:
            return num
        return min(num, held.keep_at[0] - sequence.num_computed)

    def place_state(self, sequence: SequenceState, num_tokens: int) -> StatePlace:
        """Return where a step of so many tokens, which are registered, has the state."""
        held, start = sequence.held, sequence.num_computed
        assert held is not None
        kept_row = kept_slot = -1
        if held.keep_at and held.keep_at[0] <= start + num_tokens:
            end = held.keep_at.pop(0)
            slot = self._states.keep(self._pool.prefix_of(sequence.block_ids[end // self.block_size - 1]))
            if slot is not None:
                kept_row, kept_slot = end - start - 1, slot
        place = StatePlace(held.slot, held.source, kept_row, kept_slot)
        held.source = held.slot
        return place

    def register_known(self) -> None:
        """Make what a step that has ended gave findable: blocks, and the states that it kept."""
        super().register_known()
        self._states.count_written()
        for sequence in [its for its in self._keeping if its.held is None or not its.held.keep_at]:
            del self._keeping[sequence]
        self._refusal = None  # what was kept may spare a sequence blocks
        left = self._awaited.items()
        self._awaited = {its: other for its, other in left if other in self._keeping and its.finish_reason is None}

    def forget_unfilled(self, unfilled: Iterable[int]) -> None:
        """Make the blocks unfindable that a step, which failed, was to fill, and forget the states it was to keep."""
        super().forget_unfilled(unfilled)
        self._states.drop_written()
