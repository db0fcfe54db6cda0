"""Where the state of a sequence lies during a step: the scheduler says it, the layers that keep a state read it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class StatePlace(NamedTuple):
    """The slots in which layers that keep a state have that of one sequence, during a step."""

    slot: int
    """where the state lies after the step"""
    source: int
    """where it lies before: the same slot, or one that keeps the state after a prefix; -1: there is none yet"""
    kept_row: int = -1
    """the row of the sequence after which the state is copied to kept_slot, from 0; -1: none"""
    kept_slot: int = -1


def places_of(states: Sequence[int], query_starts: Sequence[int], kv_lens: Sequence[int]) -> list[StatePlace]:
    """Return the places whose fields these are, one after the other; without any that of sequence s is slot s.

    query_starts and kv_lens are those of the step: a sequence whose tokens are all in it begins.
    """
    size = len(StatePlace._fields)
    if states:
        return [StatePlace(*states[start : start + size]) for start in range(0, len(states), size)]
    sizes = [end - start for start, end in pairwise(query_starts)]
    return [StatePlace(s, -1 if sizes[s] == num else s) for s, num in enumerate(kv_lens)]
