"""Where the states of a step lie, as the library reads it: those of each layer, and the place of each sequence's.

decoder.py calls it before each step.
"""

from __future__ import annotations

from array import array
from ctypes import Array, addressof, c_void_p
from itertools import chain

from gptserve.engine.backends.cpu.program import StateCache
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.model.states import State
from gptserve.engine.state_place import StatePlace, places_of


class StateAddresses:
    """The addresses of the states of one cache, and of the places in a step. They are valid until the next call."""

    def __init__(self) -> None:
        self._states: list[State | None] = []
        self._caches: list[StateCache | None] = []
        self._addresses = (c_void_p * 0)()
        self._places = array("i")

    def of(self, states: list[State | None], arrays: StepArrays) -> tuple[int, Array[c_void_p]]:
        """Return the address of the places, int32 [S, 4], and those of all layers' StateCaches."""
        if states is not self._states:
            self._states = states
            self._caches = [None if its is None else _describe(its) for its in states]
            addresses = [None if its is None else addressof(its) for its in self._caches]
            self._addresses = (c_void_p * len(states))(*addresses)
        self._places = arrays.states
        if not self._places:
            places = places_of((), arrays.query_starts, arrays.kv_lens)
            self._places = array("i", chain.from_iterable(places))
        assert len(self._places) == len(StatePlace._fields) * len(arrays.kv_lens)
        return self._places.buffer_info()[0], self._addresses


def _describe(state: State) -> StateCache:
    assert all(its.is_contiguous() and its.device.type == "cpu" for its in state)
    return StateCache(state.latest_NSC.data_ptr(), state.memory_NHKV.data_ptr())
