"""From a ScheduledBatch to tensors: what one forward pass reads.

Rows are the scheduled tokens of all sequences, one sequence after the other, then padding up to min_rows.
ModelRunner calls it once a step. It schedules and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.attention import AttentionMetadata
from gptserve.engine.model.linear import MIN_ROWS
from gptserve.engine.scheduling.sequence import ScheduledBatch


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tensors of one step: T rows."""

    token_ids_T: Tensor
    """int64 [T], 0 in padding rows"""
    positions_T: Tensor
    """int64 [T], 0 in padding rows"""
    metadata: AttentionMetadata


def build_model_input(
    batch: ScheduledBatch, block_size: int, device: torch.device, min_rows: int = MIN_ROWS
) -> ModelInput:
    """Return the step's tensors on `device`. All scheduled tokens must have blocks."""
    num_rows = max(batch.num_tokens, min_rows)
    token_ids = np.zeros(num_rows, np.int64)
    positions = np.zeros(num_rows, np.int64)
    slots = np.full(num_rows, -1, np.int64)
    starts, kv_lens = [0], []
    tables = np.zeros((len(batch.items), max(len(item.sequence.block_ids) for item in batch.items)), np.int32)
    for s, item in enumerate(batch.items):
        sequence, first = item.sequence, item.sequence.num_computed
        start, end, last = starts[-1], starts[-1] + item.num_tokens, first + item.num_tokens
        token_ids[start : end - len(item.draft)] = sequence.token_ids[first:last]
        if item.draft:
            token_ids[end - len(item.draft) : end] = item.draft
        positions[start:end] = np.arange(first, last)
        tables[s, : len(sequence.block_ids)] = sequence.block_ids
        starts.append(end)
        kv_lens.append(last)
    owners, scheduled = np.repeat(np.arange(len(batch.items)), np.diff(starts)), positions[: starts[-1]]
    block_ids = tables[owners, scheduled // block_size].astype(np.int64)
    slots[: starts[-1]] = block_ids * block_size + scheduled % block_size
    metadata = AttentionMetadata(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32).to(device),
        kv_lens_S=torch.tensor(kv_lens, dtype=torch.int32).to(device),
        block_tables_SN=torch.from_numpy(tables).to(device),
        slots_T=torch.from_numpy(slots).to(device),
    )
    return ModelInput(torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device), metadata)
