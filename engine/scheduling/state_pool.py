"""Which slots hold the states of sequences, and which keep the state after a prefix, to be found again.

A state is what layers of linear attention have in place of keys and values: one of fixed size for all tokens before.
So a prefix can be found again only where its state was kept. It knows slots and prefixes; no tensors, no tokens.
StatefulBlocks calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gptserve.engine.scheduling.block_pool import PrefixId

NUM_RESERVED = 1
"""The first slots are for steps that are no sequence's, such as the one that shows whether the engine can decode."""


@dataclass(slots=True, eq=False)
class HeldState:
    """Where layers that keep a state have that of a running sequence."""

    slot: int
    source: int
    """The slot that its next step reads; -1: none, as that begins with the first token."""
    keep_at: list[int]
    """Ascending: after so many tokens the state is to be kept, for others that begin with them."""


class StatePool:
    """A slot is held by a sequence, keeps a prefix's state, or is blank.

    New ones come from the blank ones, then from those that keep, least recently used first. But one that `read` has
    returned is read by the step that is planned, and until the next `begin_step` nobody gets it.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > NUM_RESERVED + 1, "a sequence needs a slot, and may read one that keeps a state"
        self._blank = list(reversed(range(NUM_RESERVED, num_slots)))
        self._kept: OrderedDict[PrefixId, int] = OrderedDict()  # the least recently used first
        self._read: set[PrefixId] = set()
        self._written: list[tuple[PrefixId, int]] = []

    @property
    def num_kept(self) -> int:
        """How many slots keep a state that `find` could return."""
        return len(self._kept)

    @property
    def num_blank(self) -> int:
        """How many slots nobody holds and that keep nothing."""
        return len(self._blank)

    def begin_step(self) -> None:
        """Let the slots go that the step before has read."""
        self._read.clear()

    @property
    def can_take(self) -> bool:
        """Whether `take` would return a slot."""
        return bool(self._blank) or any(prefix not in self._read for prefix in self._kept)

    def take(self, besides: PrefixId | None = None) -> int | None:
        """Return a slot for a sequence, whose content is undefined; None if there is none.

        Where none is left but that of the prefix `besides`, it is that one, with the state, which is kept no longer.
        """
        if self._blank:
            return self._blank.pop()
        for prefix in self._kept:
            if prefix not in self._read and prefix != besides:
                return self._kept.pop(prefix)
        return self._kept.pop(besides) if besides is not None and besides not in self._read else None

    def give_back(self, slot: int) -> None:
        """Take back the slot of a sequence."""
        self._blank.append(slot)

    def find(self, prefixes: Sequence[PrefixId]) -> int:
        """Return how many blocks the longest of these prefixes has whose state is kept, 0 if none is.

        The prefixes are of 1, 2 and more blocks.
        """
        return next((num for num in range(len(prefixes), 0, -1) if prefixes[num - 1] in self._kept), 0)

    def read(self, prefix: PrefixId) -> int:
        """Return the slot of a state that `find` has found, and which the step that is planned reads."""
        self._kept.move_to_end(prefix)
        self._read.add(prefix)
        return self._kept[prefix]

    def forget(self, prefixes: Iterable[PrefixId]) -> None:
        """Drop the states after these prefixes, as they cannot be trusted."""
        dropped = set(prefixes)
        self._blank += [self._kept.pop(prefix) for prefix in dropped & self._kept.keys()]
        self._blank += [slot for prefix, slot in self._written if prefix in dropped]
        self._written = [(prefix, slot) for prefix, slot in self._written if prefix not in dropped]

    def keep(self, prefix: PrefixId) -> int | None:
        """Return the slot to which the step that is planned is to copy the state after a prefix.

        None if it is kept already, or no slot is left. It can be found after `count_written`.
        """
        if prefix in self._kept or any(prefix == other for other, _ in self._written):
            return None
        slot = self.take()
        if slot is not None:
            self._written.append((prefix, slot))
        return slot

    def count_written(self) -> None:
        """Let the states be found that a step was to copy, which has ended."""
        self._kept.update(self._written)
        self._written.clear()

    def drop_written(self) -> None:
        """Forget the states that a step was to copy, which has failed."""
        self._blank += [slot for _, slot in self._written]
        self._written.clear()
