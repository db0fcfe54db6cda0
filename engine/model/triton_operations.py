"""Operations of a layer as Triton kernels (triton_kernels.py): this file chooses tiles and launches.

It imports Triton only when it is made. With TRITON_INTERPRET=1 in the environment the kernels run on a CPU, far too
slowly for anything but tests. operations_choice.py makes it and compares it with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.engine.model.experts import Routing
from gptserve.engine.model.operations import Operations

_TILES = {4: (16, 64, 32), 2: (64, 64, 64)}
"""Rows, columns and depth of a tile of a product, by the bytes of a number. They do not depend on the step, and so the
bits of a row do not either. In fp32 rows are multiplied without tensor cores, where empty ones cost time."""
_COLUMNS = 1024
"""Of a row that one program sums."""


class TritonOperations:
    """The kernels' launches. Tensors are contiguous."""

    def __init__(self) -> None:
        """Load the kernels; they are compiled when they are first called. Raises ImportError without Triton."""
        import triton

        from gptserve.engine.model import triton_kernels

        self._kernels = triton_kernels
        self.build = f"triton {triton.__version__}"

    def operations(self) -> Operations:
        """Return all of them."""
        return Operations(experts=self, build=self.build)

    def multiply(
        self,
        x: Tensor,
        weight_ENI: Tensor,
        bias_EN: Tensor | None,
        routing: Routing,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """ExpertProducts.multiply."""
        assert x.is_contiguous() and weight_ENI.is_contiguous() and x.dtype is weight_ENI.dtype
        num_experts, num_out, num_in = weight_ENI.shape
        num_pairs, (rows, columns, depth) = len(routing.pairs_P), _TILES[x.itemsize]
        assert x.shape[1] == num_in and num_pairs % len(x) == 0
        out_PN = x.new_empty(num_pairs, num_out, dtype=out_dtype or x.dtype)
        # As many as any routing may need: an expert's last tile may be partly empty.
        num_tiles = min(num_pairs, num_pairs // rows + num_experts)
        self._kernels.multiply_experts[-(-num_out // columns), num_tiles](
            *(x, weight_ENI, bias_EN, out_PN, *routing, num_experts),
            NUM_IN=num_in,
            NUM_OUT=num_out,
            PAIRS_PER_ROW=num_pairs // len(x),
            EXPERTS=1 << (num_experts - 1).bit_length(),
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
        self._kernels.sum_experts[num_rows, -(-width // _COLUMNS)](
            *(parts_PN, weights_TK, residual, out_TN),
            NUM_ACTIVE=num_active,
            WIDTH=width,
            COLUMNS=min(_COLUMNS, 1 << (width - 1).bit_length()),
        )
        return out_TN
