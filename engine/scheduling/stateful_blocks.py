"""The blocks of sequences and their states, where layers of the model keep a state in place of keys and values.

A prefix can be found again only where its state was kept. Scheduler has it in the place of SequenceBlocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.sequence import SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks
from gptserve.engine.scheduling.state_pool import HeldState, StatePool
from gptserve.engine.state_place import StatePlace


class StatefulBlocks(SequenceBlocks):
    """Changes SequenceState.held, too."""

    def __init__(self, pool: BlockPool, states: StatePool) -> None:
        super().__init__(pool)
        self._states = states
        self._keeping: dict[SequenceState, int] = {}
        """Those that run and are yet to keep a state, and after how many of their tokens that is."""

    def begin_step(self) -> list[int]:
        self._states.begin_step()
        return super().begin_step()

    def allocate(self, sequence: SequenceState, *, use_cache: bool) -> bool:
        """Give a sequence a slot for its state and all blocks; False, and nothing changes, if either is lacking.

        Nor does it get them while one that runs is to keep a state that spares it half of its tokens or more.

        Its state is to be kept at the end of its prompt's last block, and where others that began alike went on
        otherwise: where the cached prefix ends whose state nobody has kept.
        """
        if use_cache and self._is_spared_by_waiting(sequence):
            return False
        matched = self._pool.match(sequence.token_ids, sequence.request.cache_salt) if use_cache else []
        num_found, source = self._states.find([self._pool.prefix_of(block_id) for block_id in matched]) or (0, -1)
        slot = self._states.take()
        if slot is None:
            return False
        block_ids = self._pool.allocate(self.num_needed(sequence) - num_found, matched[:num_found])
        if block_ids is None:
            self._states.give_back(slot)
            return False
        sequence.block_ids.extend(block_ids)
        sequence.num_computed = num_found * self.block_size
        ends = {len(matched), (sequence.num_prompt_tokens - 1) // self.block_size}
        keep_at = [num * self.block_size for num in sorted(ends) if num > num_found]
        sequence.held = HeldState(slot, source, keep_at if self._pool.enable_prefix_caching else [])
        if sequence.held.keep_at:
            self._keeping[sequence] = keep_at[-1]
        return True

    def _is_spared_by_waiting(self, sequence: SequenceState) -> bool:
        """Whether a running sequence is to keep the state after tokens that are at least half of this one's."""
        token_ids, salt = sequence.token_ids, sequence.request.cache_salt
        for other, num in self._keeping.items():
            is_much = num * 2 >= len(token_ids) > num
            if is_much and other.request.cache_salt == salt and other.token_ids[:num] == token_ids[:num]:
                return True
        return False

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

    def forget_unfilled(self, unfilled: Iterable[int]) -> None:
        """Make the blocks unfindable that a step, which failed, was to fill, and forget the states it was to keep."""
        super().forget_unfilled(unfilled)
        self._states.drop_written()
