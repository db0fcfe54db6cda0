"""From the tokens that a step computes to the integers that one forward pass reads, in arrays on the host.

Rows are the tokens of all sequences, one sequence after the other. Torch-free. runner/batch.py lays out what was
scheduled; the checks at start lay out steps of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptserve.engine.state_place import StatePlace


class Span(NamedTuple):
    """Consecutive tokens of one sequence, which a step computes."""

    token_ids: Sequence[int]
    """negative where a token is foreseen: ~row, for the one that the step before samples in that row, from 0"""
    first: int
    """the position of the first one"""
    block_ids: Sequence[int]
    """of the whole sequence; the keys and values of position p lie in block_ids[p // block_size]"""
    num_sampled: int = 0
    """after how many of the tokens, the last ones, the next one is sampled"""
    state: StatePlace | None = None
    """None: the slot with the number of the sequence in the step"""


SpanFields = tuple[Sequence[int], int, Sequence[int], int, StatePlace | None]
"""A Span, or its fields, which take less time to make."""


class StepArrays(NamedTuple):
    """The integers of a step, on the host: T rows, S sequences that have up to N blocks, R rows that are sampled."""

    token_ids: array[int]
    """int64 [T], negative where a token is foreseen"""
    positions: array[int]
    """int64 [T]"""
    sampled: array[int]
    """int64 [R], the rows after which tokens are sampled, those of a sequence together"""
    query_starts: array[int]
    """int32 [S + 1]; with the following as in AttentionMetadata"""
    kv_lens: array[int]
    """int32 [S]"""
    block_tables: array[int]
    """int32 [S * N]"""
    slots: array[int]
    """int64 [T]"""
    states: array[int]
    """int32 [S * 4], the fields of the StatePlace of each sequence; empty if no span has one (state_place.py)"""

    def as_numpy(self) -> tuple[NDArray[Any], ...]:
        """Return all fields but the states, in the same memory; the table as [S, N]."""
        *arrays, tables, slots = map(np.asarray, self[:-1])
        return *arrays, tables.reshape(len(self.kv_lens), -1), slots


def lay_out(spans: Sequence[SpanFields], block_size: int) -> StepArrays:
    """Return the integers of a step of these tokens, each sequence at most once. All tokens must have blocks."""
    token_ids, positions, rows, slots, tables = array("q"), array("q"), array("q"), array("q"), array("i")
    starts, kv_lens, states = array("i", (0,)), array("i"), array("i")
    num_blocks = max([len(block_ids) for _, _, block_ids, _, _ in spans])
    padding = array("i", bytes(4 * num_blocks))
    for ids, first, block_ids, num_sampled, state in spans:
        if state is not None:
            states.extend(state)
        tables.extend(block_ids)
        tables.extend(padding[len(block_ids) :])
        if len(ids) == 1:
            token_ids.append(ids[0])
            starts.append(len(token_ids))
            kv_lens.append(first + 1)
            positions.append(first)
            slots.append(block_ids[first // block_size] * block_size + first % block_size)
            if num_sampled:
                rows.append(len(token_ids) - 1)
            continue
        end = first + len(ids)
        token_ids.extend(ids)
        starts.append(len(token_ids))
        kv_lens.append(end)
        positions.extend(range(first, end))
        slots.extend(_slots(block_ids, first, end, block_size))
        if num_sampled:
            rows.extend(range(len(token_ids) - num_sampled, len(token_ids)))
    return StepArrays(token_ids, positions, rows, starts, kv_lens, tables, slots, states)


def _slots(block_ids: Sequence[int], first: int, end: int, block_size: int) -> list[int]:
    """Return the slots of positions [first, end) in the cache."""
    slots = list[int]()
    for block_id in block_ids[first // block_size : -(-end // block_size)]:
        slots += range(block_id * block_size, (block_id + 1) * block_size)
    start = first % block_size
    return slots[start : start + end - first]
