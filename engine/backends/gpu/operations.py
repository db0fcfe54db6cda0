"""Operations of a layer as Triton kernels (kernels/operations.py): this file chooses tiles and launches.

It imports Triton only when it is made. With TRITON_INTERPRET=1 in the environment the kernels run on a CPU, far too
slowly for anything but tests. selfcheck/operations.py makes it and compares it with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.engine.backends.gpu.attention import power_of_two
from gptserve.engine.model.experts import Routing
from gptserve.engine.model.norm import Norm
from gptserve.engine.model.operations import Operations
from gptserve.engine.model.rotary import Rotation
from gptserve.weights.config import Activation

_TILES = {4: (16, 64, 32), 2: (64, 64, 64)}
"""Rows, columns and depth of a tile of a product, by the bytes of a number. They do not depend on the step, and so the
bits of a row do not either. In fp32 rows are multiplied without tensor cores, where empty ones cost time."""
_COLUMNS = 1024
"""Of a row that one program computes."""
_MIN_EXPERTS = 128
"""A kernel has room for as many at least, so that one that computes with few is the one that computes with all."""


class TritonOperations:
    """The kernels' launches. Tensors are contiguous."""

    def __init__(self) -> None:
        """Load the kernels; they are compiled when they are first called. Raises ImportError without Triton."""
        import triton

        from gptserve.engine.backends.gpu.kernels import operations as triton_kernels

        self._kernels = triton_kernels
        self.build = f"triton {triton.__version__}"

    def operations(self) -> Operations:
        """Return all of them."""
        return Operations(
            self.normalize, self.add_normalize, self.rotate_and_write, self.gate, experts=self, mxfp4_experts=self
        )

    def normalize(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """normalize_by_torch; x may be a strided view [rows, vectors, width] of one projection."""
        return self._normalize(x, norm, residual, None, None)

    def add_normalize(self, x: Tensor, term: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Operations.add_normalize for [rows, width]."""
        assert x.is_contiguous() and term.is_contiguous() and x.shape == term.shape
        total = torch.empty_like(x)
        return total, self._normalize(x, norm, None, term, total)

    def _normalize(
        self, x: Tensor, norm: Norm, residual: Tensor | None, term: Tensor | None, total: Tensor | None
    ) -> Tensor:
        num_vectors, width = x.shape[1:-1].numel(), x.shape[-1]
        assert x.dim() in (2, 3) and x.stride(-1) == 1 and (residual is None or residual.is_contiguous())
        assert not norm.has_own_weights or (norm.weight is not None and norm.weight.shape == x.shape[1:])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        padded = power_of_two(width)
        self._kernels.normalize[x.shape[:-1].numel(),](
            *(x, term, total, norm.weight, norm.bias, residual, out, x.stride(0), x.stride(-2), norm.eps),
            IS_LAYERNORM=norm.kind == "layernorm",
            VECTORS=num_vectors,
            OWN_WEIGHTS=norm.has_own_weights,
            WIDTH=width,
            PADDED=padded,
            num_warps=min(16, max(1, padded // 512)),
        )
        return out

    def rotate_and_write(self, heads_TXD: Tensor, rotation: Rotation, cache_2NGBD: Tensor, slots_T: Tensor) -> None:
        """Operations.rotate_and_write."""
        (cos_T1N, sin_T1N, *_), (num_rows, num_vectors, head_size) = rotation, heads_TXD.shape
        num_kv_heads, block_size = cache_2NGBD.shape[2:4]
        num_pairs = cos_T1N.shape[-1]
        assert heads_TXD.stride(1) == head_size == cache_2NGBD.shape[4] and heads_TXD.stride(2) == 1
        assert cache_2NGBD.is_contiguous() and cache_2NGBD.dtype is heads_TXD.dtype and len(slots_T) == num_rows
        assert cos_T1N.stride(0) == sin_T1N.stride(0) and cos_T1N.stride(2) == sin_T1N.stride(2) == 1
        self._kernels.rotate_and_write[num_rows, num_vectors](
            *(heads_TXD, cos_T1N, sin_T1N, cache_2NGBD[0], cache_2NGBD[1], slots_T),
            *(heads_TXD.stride(0), cos_T1N.stride(0)),
            NUM_HEADS=num_vectors - 2 * num_kv_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            NUM_PAIRS=num_pairs,
            BLOCK_SIZE=block_size,
            PADDED_PAIRS=power_of_two(num_pairs),
            PADDED=power_of_two(head_size),
            num_warps=1,
            enable_fp_fusion=False,  # each product rounds, as torch's do
        )

    def gate(self, x: Tensor, activation: Activation, limit: float | None) -> Tensor:
        """activation.gated for [rows, 2 * width]."""
        assert x.is_contiguous()
        num_rows, width = len(x), x.shape[1] // 2
        out = x.new_empty(num_rows, width)
        columns = min(_COLUMNS, power_of_two(width))
        self._kernels.gate[num_rows, -(-width // columns)](
            *(x, out), ACTIVATION=activation, LIMIT=limit, WIDTH=width, COLUMNS=columns
        )
        return out

    def multiply(
        self,
        x: Tensor,
        weight_ENI: Tensor,
        bias_EN: Tensor | None,
        routing: Routing,
        out_dtype: torch.dtype | None = None,
        scales_ENG: Tensor | None = None,
    ) -> Tensor:
        """ExpertProducts.multiply."""
        num_experts, num_out = weight_ENI.shape[:2]
        num_pairs, num_in, (rows, columns, depth) = len(routing.pairs_P), x.shape[1], _TILES[x.itemsize]
        assert x.is_contiguous() and weight_ENI.is_contiguous() and num_pairs % len(x) == 0
        group = 1
        if scales_ENG is None:
            assert x.dtype is weight_ENI.dtype and weight_ENI.shape[2] == num_in
        else:
            group = 2 * weight_ENI.shape[3]
            assert scales_ENG.is_contiguous() and scales_ENG.shape == weight_ENI.shape[:3]
            assert weight_ENI.dtype is scales_ENG.dtype is torch.uint8 and scales_ENG.shape[2] * group == num_in
        out_PN = x.new_empty(num_pairs, num_out, dtype=out_dtype or x.dtype)
        # As many as any routing may need: an expert's last tile may be partly empty.
        num_tiles = min(num_pairs, num_pairs // rows + num_experts)
        self._kernels.multiply_experts[-(-num_out // columns), num_tiles](
            *(x, weight_ENI, scales_ENG, bias_EN, out_PN, *routing, num_experts),
            NUM_IN=num_in,
            NUM_OUT=num_out,
            GROUP=group,
            PAIRS_PER_ROW=num_pairs // len(x),
            EXPERTS=max(_MIN_EXPERTS, power_of_two(num_experts)),
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth,
            num_stages=3,
        )
        return out_PN

    def sum(self, parts_PN: Tensor, weights_TK: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """ExpertProducts.sum."""
        (num_rows, num_active), width = weights_TK.shape, parts_PN.shape[1]
        assert weights_TK.is_contiguous() and (residual is None or residual.is_contiguous())
        out_TN = parts_PN.new_empty(num_rows, width, dtype=dtype)
        columns = min(_COLUMNS, power_of_two(width))
        self._kernels.sum_experts[num_rows, -(-width // columns)](
            *(parts_PN, weights_TK, residual, out_TN), NUM_ACTIVE=num_active, WIDTH=width, COLUMNS=columns
        )
        return out_TN
