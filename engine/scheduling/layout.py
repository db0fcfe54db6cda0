"""From a ScheduledBatch to the integers that one forward pass reads, in arrays on the host.

Rows are the scheduled tokens of all sequences, one sequence after the other. Torch-free. ModelRunner and what it calls
lay steps out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptserve.engine.scheduling.sequence import ScheduledBatch


class StepArrays(NamedTuple):
    """The integers of a step, on the host: T rows, S sequences that have up to N blocks, R rows that are sampled."""

    token_ids: array[int]
    """int64 [T], negative where a token is foreseen (SequenceState.is_foreseen)"""
    positions: array[int]
    """int64 [T]"""
    sampled: array[int]
    """int64 [R], the rows after which tokens are sampled, those of an item together"""
    query_starts: array[int]
    """int32 [S + 1]; with the following as in AttentionMetadata"""
    kv_lens: array[int]
    """int32 [S]"""
    block_tables: array[int]
    """int32 [S * N]"""
    slots: array[int]
    """int64 [T]"""


def build_arrays(batch: ScheduledBatch, block_size: int) -> tuple[NDArray[Any], ...]:
    """Return the fields of StepArrays, the table as [S, N]."""
    *arrays, tables, slots = map(np.asarray, lay_out(batch, block_size))
    return *arrays, tables.reshape(len(batch.items), -1), slots


def lay_out(batch: ScheduledBatch, block_size: int) -> StepArrays:
    """Return the integers of a step. All scheduled tokens must have blocks."""
    token_ids, positions, rows, slots, tables = array("q"), array("q"), array("q"), array("q"), array("i")
    starts = array("i", accumulate([item.num_tokens for item in batch.items], initial=0))
    kv_lens = array("i", [item.sequence.num_computed + item.num_tokens for item in batch.items])
    num_blocks = max([len(item.sequence.block_ids) for item in batch.items])
    padding = array("i", bytes(4 * num_blocks))
    for item in batch.items:
        sequence, first, block_ids = item.sequence, item.sequence.num_computed, item.sequence.block_ids
        tables.extend(block_ids)
        tables.extend(padding[len(block_ids) :])
        if item.num_tokens == 1:
            token_ids.append(sequence.token_ids[first])
            positions.append(first)
            slots.append(block_ids[first // block_size] * block_size + first % block_size)
            if item.needs_sampling:
                rows.append(len(token_ids) - 1)
            continue
        end = first + item.num_tokens
        token_ids.extend(sequence.token_ids[first:end])
        token_ids.extend(item.draft)
        positions.extend(range(first, end))
        slots.extend(_slots(block_ids, first, end, block_size))
        if item.needs_sampling:
            rows.extend(range(len(token_ids) - 1 - len(item.draft), len(token_ids)))
    return StepArrays(token_ids, positions, rows, starts, kv_lens, tables, slots)


def _slots(block_ids: Sequence[int], first: int, end: int, block_size: int) -> list[int]:
    """Return the slots of positions [first, end) in the cache."""
    slots = list[int]()
    for block_id in block_ids[first // block_size : -(-end // block_size)]:
        slots += range(block_id * block_size, (block_id + 1) * block_size)
    start = first % block_size
    return slots[start : start + end - first]
