"""Weights that become codes of 4, 5 or 8 bits in groups while they load, and rows of such a weight.

weights/quantized/coded.py says what codes are, csrc/rounding.cpp makes and csrc/groups.cpp multiplies with them.
runner/memory.py says which weights become what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import GroupedRows, NativeCodedLinear
from gptserve.weights.config import Activation
from gptserve.weights.huge_pages import HugePages
from gptserve.weights.loading_threads import map_pieces
from gptserve.weights.quantized.coded import CodeFormat
from gptserve.weights.stored_tensor import Shape

_PIECE_ELEMENTS = 2**18
"""As many weights are rounded in a call: threads share them evenly."""
_FLOOR = 0.03
"""What the least square of an input counts as, in means of all: other tokens than those that were tried may use it."""
_TINY = 1e-30


def shares_of(squares: Tensor) -> Tensor:
    """Return what an error of a weight of each input counts, fp32 [in], from the means of their squares."""
    return squares.float() / squares.mean().clamp(min=_TINY) + _FLOOR


@dataclass(frozen=True, slots=True)
class _Floats:
    """A weight [out, in] that is to become codes."""

    format: CodeFormat
    values: Tensor
    squares: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> Shape:
        return tuple(self.values.shape)

    @property
    def parts(self) -> tuple[_Floats, ...]:
        return (self,)


class NativeInt4Linear(NativeCodedLinear):
    """The library of engine/backends/cpu with a weight that it quantizes: not only in 4 bits, as the format says."""

    def __init__(
        self,
        weight: Tensor,
        its: CodeFormat,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        variant: native.Variant | None = None,
        memory: HugePages | None = None,
        squares: Tensor | None = None,
    ) -> None:
        """Quantize and pack the weight; rows of x are of its dtype.

        With scales alone the largest weight of a group is a code at its end; with least values the largest and the
        least. With `squares`, fp32 [in], the means of the squares that a weight's inputs have, scales and least values
        are instead those of a small sum of the squared errors of products, as if no two inputs had to do with each
        other. A group that is not finite gives NaN.
        """
        super().__init__(_Floats(its, weight, squares), bias, activation, out_dtype, variant, memory)

    def _pack_codes(self, weight: GroupedRows) -> int:
        """Keep the weight in the library's layout; return where it begins. Threads pack what they quantize."""
        assert isinstance(weight, _Floats)
        its, (num_out, num_in) = weight.format, weight.shape
        number = native.CODE_FORMATS.index(its)
        packed = self._keep(self._memory.take(self._library.native_grouped_size(num_in, num_out, number)))
        num = max(1, _PIECE_ELEMENTS // num_in // native.COLUMNS) * native.COLUMNS
        values = weight.values.contiguous()
        shares = None if weight.squares is None else shares_of(weight.squares)
        kind = values.dtype is torch.float32, None if shares is None else shares.data_ptr(), num_in

        def pack(start: int) -> None:
            rows = values[start : start + num]
            address = packed + self._library.native_grouped_size(num_in, start, number)
            self._library.native_round_groups(rows.data_ptr(), *kind, len(rows), number, self._variant, address)

        for _ in map_pieces(pack, range(0, num_out, num)):
            pass
        return packed


class RowsOfCodes:
    """Rows of the weight of a NativeCodedLinear, rounded to the dtype of computation. A Rows."""

    device = torch.device("cpu")
    KIND = native.CODED_ROWS
    FORMAT = CodeFormat(8, "scales")

    @classmethod
    def of(cls, linear: NativeCodedLinear) -> RowsOfCodes | None:
        """Return the rows, if they can be read: in 8 bits with scales alone."""
        formats = [native.CODE_FORMATS[part.format] for part in linear.weight.parts[: linear.weight.num_parts]]
        return cls(linear) if formats == [cls.FORMAT] else None

    def __init__(self, linear: NativeCodedLinear) -> None:
        self.linear, self.dtype = linear, linear.x_dtype
        self.address = linear.weight.parts[0].weight
        """Where they are packed."""

    def __getitem__(self, numbers_R: Tensor) -> Tensor:
        weight, numbers_R = self.linear.weight, numbers_R.contiguous()
        assert numbers_R.dtype is torch.int64 and numbers_R.dim() == 1
        rows = torch.empty(len(numbers_R), weight.num_in)
        of_weight = self.address, weight.num_in
        native.library().native_unpack_codes(*of_weight, numbers_R.data_ptr(), len(numbers_R), rows.data_ptr())
        return rows.to(self.dtype)
