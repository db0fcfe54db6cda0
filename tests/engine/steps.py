"""Builds the inputs of one forward pass by hand, for tests of the parts below the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptserve.engine.model.attention import AttentionMetadata


def make_metadata(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    pad: int = 0,
) -> AttentionMetadata:
    """Return metadata for sequences whose last query_lens[s] of kv_lens[s] tokens are this step's rows."""
    starts = [0]
    slots: list[int] = []
    for query_len, kv_len, table in zip(query_lens, kv_lens, block_tables, strict=True):
        starts.append(starts[-1] + query_len)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(kv_len - query_len, kv_len)]
    width = max(len(table) for table in block_tables)
    return AttentionMetadata(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        kv_lens_S=torch.tensor(kv_lens, dtype=torch.int32),
        block_tables_SN=torch.tensor(
            [[*table, *[0] * (width - len(table))] for table in block_tables], dtype=torch.int32
        ),
        slots_T=torch.tensor(slots + [-1] * pad),
    )


def positions(query_lens: Sequence[int], kv_lens: Sequence[int], pad: int = 0) -> torch.Tensor:
    """Return the position of every row, 0 for padding."""
    rows = [p for q, k in zip(query_lens, kv_lens, strict=True) for p in range(k - q, k)]
    return torch.tensor(rows + [0] * pad)


def shuffled_tables(kv_lens: Sequence[int], block_size: int, num_blocks: int, seed: int = 0) -> list[list[int]]:
    """Return disjoint block tables scattered over the pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = []
    for kv_len in kv_lens:
        needed = -(-kv_len // block_size)
        tables.append(order[:needed])
        order = order[needed:]
    return tables
