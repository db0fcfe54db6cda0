"""Attention on a GPU: the Triton kernels of kernels/attention.py, for fp32, bf16 and fp16 and heads of any size.

This file chooses tiles and launches; it imports Triton only when a backend is made. With TRITON_INTERPRET=1 in the
environment the same kernels run on a CPU, far too slowly for anything but tests.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec

PIECE = 256
"""Keys of a piece: at a batch of 1 and a context of 8,192 tokens, 8 KV heads have 256 of them."""
MAX_SPLIT_ROWS = 1024
"""Programs share pieces while tokens times heads are at most so many; more rows fill a GPU by themselves."""
PROGRAMS = 256
"""So many share the pieces of a sequence: enough to fill a GPU with one. Those of a short one end at once, but a CUDA
graph launches them all for the longest context there may be."""
_TILE_BYTES = 1 << 14
"""Of keys, and of values. Two stages of both fit beside the queries into the 99 KB of a small GPU's multiprocessor."""
_ACCUMULATORS = 1 << 13
"""fp32 numbers of a tile of rows; a program of 128 threads holds two such tiles in its registers."""
_MIN_TILE = 16
"""What tl.dot needs at least, in each direction."""


class TritonAttention:
    """The AttentionBackend for CUDA.

    If `exact`, the tiles depend on dtype and head size alone, and pieces of keys are merged in their order
    (kernels/attention.py). So the bits of a row depend only on its own tokens, as AttentionBackend requires of a CPU.
    Else steps that only decode have tiles of as few rows as they need, of which more fit into a multiprocessor.
    """

    name = "triton"

    def __init__(
        self,
        piece: int = PIECE,
        max_split_rows: int = MAX_SPLIT_ROWS,
        programs: int = PROGRAMS,
        *,
        exact: bool = True,
    ) -> None:
        """Load the kernels; they are compiled when they are first called. Raises ImportError without Triton.

        `piece` is a power of two from 64 on, and another one gives other bits. The bits do not depend on max_split_rows
        and programs.
        """
        import triton

        from gptserve.engine.backends.gpu.kernels import attention as triton_kernels

        self._kernels, self._piece = triton_kernels, piece
        self._max_split_rows, self._programs, self._exact = max_split_rows, programs, exact
        self.build: str = triton.__version__

    @staticmethod
    def is_available() -> bool:
        """Return whether Triton is installed."""
        return find_spec("triton") is not None

    def scratch_bytes(self, max_model_len: int, head_size: int, num_threads: int) -> int:
        """Return the bytes of the pieces of a split step, if a sequence has this length."""
        num_pieces = -(-max_model_len // self._piece)
        return num_pieces * self._max_split_rows * (head_size + 2) * torch.float32.itemsize if num_pieces > 1 else 0

    def write(self, key_TGD: Tensor, value_TGD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> None:
        """Store key and value, which may be strided views of one projection."""
        num_kv_heads, block_size, head_size = _check_cache(cache_2NGBD)
        _check_rows(key_TGD, cache_2NGBD)
        _check_rows(value_TGD, cache_2NGBD)
        assert key_TGD.shape[1] == value_TGD.shape[1] == num_kv_heads
        self._kernels.write[len(metadata.slots_T),](
            *(key_TGD, value_TGD, cache_2NGBD[0], cache_2NGBD[1], metadata.slots_T),
            *(key_TGD.stride(0), value_TGD.stride(0)),
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            BLOCK_SIZE=block_size,
            PADDED=power_of_two(num_kv_heads * head_size),
        )

    def attend(
        self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Return attention as [T, H, D], contiguous; the query may be a strided view."""
        num_kv_heads, block_size, head_size = _check_cache(cache_2NGBD)
        _check_rows(query_THD, cache_2NGBD)
        assert (num_kv_heads, head_size) == (spec.num_kv_heads, spec.head_size)
        num_rows, num_seqs, group = len(query_THD), len(metadata.kv_lens), spec.num_heads // num_kv_heads
        out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        out_THD[metadata.query_starts[-1] :] = 0
        num_pieces = -(-max(metadata.kv_lens) // self._piece)
        is_split = num_pieces > 1 and num_rows * spec.num_heads <= self._max_split_rows
        shape = (num_pieces if is_split else 0, num_rows, spec.num_heads)
        pieces = [query_THD.new_empty(size, dtype=torch.float32) for size in ((*shape, head_size), shape, shape)]
        rows, keys, padded = _tiles(query_THD.dtype, head_size)
        if not self._exact and metadata.query_starts[-1] == num_seqs:  # each has one token
            rows = min(rows, max(_MIN_TILE, power_of_two(group)))
        shared: dict[str, Any] = {
            **{"HEAD_SIZE": head_size, "PADDED": padded, "WINDOW": spec.window or 0, "PIECE": self._piece},
            # Fused multiply-adds could give the pieces that the one kernel merges other bits than those of the other.
            "enable_fp_fusion": False,
        }
        num_tiles = num_rows * group // rows + num_seqs
        num_seen = num_pieces if spec.window is None else min(num_pieces, spec.window // self._piece + 2)
        num_shares = min(num_seen, max(1, self._programs // num_kv_heads)) if is_split else 1
        self._kernels.attend[num_tiles, num_kv_heads, num_shares](
            *(query_THD, cache_2NGBD[0], cache_2NGBD[1], out_THD, *pieces),
            *(metadata.query_starts_S1, metadata.kv_lens_S, metadata.block_tables_SN, spec.alibi_slopes, spec.sinks),
            *(spec.scale, num_seqs, num_rows, metadata.block_tables_SN.stride(0), query_THD.stride(0)),
            GROUP=group,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=block_size,
            SOFTCAP=spec.softcap,
            ROWS=rows,
            KEYS=keys,
            SPLIT=is_split,
            num_stages=2,
            **shared,
        )
        if is_split:
            self._kernels.merge[num_rows, spec.num_heads](
                *(out_THD, *pieces, metadata.query_starts_S1, metadata.kv_lens_S, spec.sinks, num_seqs, num_rows),
                NUM_HEADS=spec.num_heads,
                num_warps=1,
                **shared,
            )
        return out_THD


def _tiles(dtype: torch.dtype, head_size: int) -> tuple[int, int, int]:
    """Return rows and keys of a tile, and the head size padded to a power of two."""
    padded = max(_MIN_TILE, power_of_two(head_size))
    # In fp32 rows are multiplied without tensor cores, where empty ones of a decoding sequence cost time.
    rows = _MIN_TILE if dtype is torch.float32 else min(64, max(_MIN_TILE, _ACCUMULATORS // padded))
    return rows, min(64, max(_MIN_TILE, _TILE_BYTES // (padded * dtype.itemsize))), padded


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least this."""
    return 1 << (number - 1).bit_length()


def _check_cache(cache_2NGBD: Tensor) -> tuple[int, int, int]:
    """Return KV heads, block size and head size."""
    assert cache_2NGBD.is_contiguous() and len(cache_2NGBD) == 2
    num_kv_heads, block_size, head_size = cache_2NGBD.shape[2:]
    return num_kv_heads, block_size, head_size


def _check_rows(rows_TXD: Tensor, cache_2NGBD: Tensor) -> None:
    assert rows_TXD.dtype is cache_2NGBD.dtype and rows_TXD.device == cache_2NGBD.device
    assert rows_TXD.shape[2] == rows_TXD.stride(1) == cache_2NGBD.shape[-1] and rows_TXD.stride(2) == 1
