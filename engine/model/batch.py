"""From a ScheduledBatch to arrays on the host, and from these to tensors: what one forward pass reads.

Rows are the scheduled tokens of all sequences, one sequence after the other.
ModelRunner and program_steps.py call it. It schedules and computes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.attention import AttentionMetadata
from gptserve.engine.scheduling.sequence import ScheduledBatch
from gptserve.engine.staging import Array, to_device


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tensors of one step: T rows."""

    token_ids_T: Tensor
    """int64 [T], negative where a token is foreseen (SequenceState.is_foreseen)"""
    positions_T: Tensor
    """int64 [T]"""
    sampled_R: Tensor
    """int64, the rows after which tokens are sampled, those of an item together"""
    metadata: AttentionMetadata


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


def build_model_input(batch: ScheduledBatch, block_size: int, device: torch.device) -> ModelInput:
    """Return the step's tensors on `device`. All scheduled tokens must have blocks."""
    return model_input(build_arrays(batch, block_size), device)


def build_arrays(batch: ScheduledBatch, block_size: int) -> tuple[Array, ...]:
    """Return what model_input takes: the fields of StepArrays, the table as [S, N]."""
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


def model_input(arrays: tuple[Array, ...], device: torch.device) -> ModelInput:
    """Return the arrays of build_arrays as tensors on `device`."""
    token_ids_T, positions_T, rows_R, *tensors = to_device(device, *arrays)
    metadata = AttentionMetadata(tuple(arrays[3].tolist()), tuple(arrays[4].tolist()), *tensors)
    return ModelInput(token_ids_T, positions_T, rows_R, metadata)


def known_token_ids(token_ids_T: Tensor, chosen_R: Tensor) -> Tensor:
    """Return the token ids, int64 [T], with those that the step before chose, int64 [R], for the foreseen ones.

    A row that chose none, -1, gives the id 0: what follows is void.
    """
    rows_T = (~token_ids_T).clamp(min=0)
    return torch.where(token_ids_T < 0, chosen_R[rows_T].clamp(min=0), token_ids_T)
