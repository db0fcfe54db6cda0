"""Weights that become codes of 4, 5, 6 or 8 bits in groups while they load.

weights/quantized/coded.py says what codes are, csrc/rounding.cpp makes and csrc/groups.cpp multiplies with them.
runner/memory.py says which weights become what.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int8 import shares_of
from gptserve.engine.backends.cpu.linear import NativeCodedLinear
from gptserve.engine.model.linear import Weight
from gptserve.weights.config import Activation
from gptserve.weights.huge_pages import HugePages
from gptserve.weights.loading_threads import map_pieces
from gptserve.weights.quantized.coded import CodeFormat
from gptserve.weights.unread import UnreadWeight

_PIECE_ELEMENTS = 2**18
"""As many weights are rounded in a call: threads share them evenly."""


class NativeInt4Linear(NativeCodedLinear):
    """The library of engine/backends/cpu with a weight that it quantizes: not only in 4 bits, as the format says."""

    def __init__(
        self,
        weight: Tensor | UnreadWeight,
        its: CodeFormat,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        variant: native.Variant | None = None,
        memory: HugePages | None = None,
        squares: Tensor | None = None,
    ) -> None:
        """Quantize and pack the weight; rows of x are of its dtype.

        With scales alone the largest weight of a scale is a code at its end; with least values the largest and the
        least. With `squares`, fp32 [in], the means of the squares that a weight's inputs have, scales and least values
        are instead those of a small sum of the squared errors of products, as if no two inputs had to do with each
        other. A group that is not finite gives NaN.
        """
        self._format, self._shares = its, None if squares is None else shares_of(squares)  # until it is packed
        super().__init__(weight, bias, activation, out_dtype, variant, memory)

    def _pack(self, weight: Weight, bias: Tensor | None) -> dict[str, Any]:
        """Return the members; threads read and pack what they quantize."""
        assert isinstance(weight, UnreadWeight) or (isinstance(weight, Tensor) and weight.device.type == "cpu")
        its, num_out, num_in, shares = self._format, self._num_out, self.num_in + self._padding, self._shares
        self._shares = None
        shares = None if shares is None else functional.pad(shares, (0, self._padding))
        number = native.CODE_FORMATS.index(its)
        packed = self._keep(self._memory.take(self._library.native_grouped_size(num_in, num_out, number)))
        num = max(1, _PIECE_ELEMENTS // num_in // native.COLUMNS) * native.COLUMNS
        kind = self.dtype is torch.float32, None if shares is None else shares.data_ptr(), num_in

        def pack(start: int) -> None:
            its_rows = slice(start, min(start + num, num_out))
            rows = weight.rows(its_rows) if isinstance(weight, UnreadWeight) else weight[its_rows].contiguous()
            rows = functional.pad(rows, (0, self._padding)) if self._padding else rows
            address = packed + self._library.native_grouped_size(num_in, start, number)
            self._library.native_round_groups(rows.data_ptr(), *kind, len(rows), number, self._variant, address)

        for _ in map_pieces(pack, range(0, num_out, num)):
            pass
        return self._members([(packed, 0, its)], bias)
