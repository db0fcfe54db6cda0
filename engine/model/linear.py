"""Matrix products with weights, y = x W^T + b: their interface, and torch's own, which defines it.

layers.py and decoder.py have one `Linear` made for each weight. They know nothing of packing and quantizing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.model.activation import activate
from gptserve.weights.config import Activation
from gptserve.weights.quantized.blocked import BlockedWeight
from gptserve.weights.quantized.coded import CodedWeight, JoinedWeight
from gptserve.weights.unread import UnreadWeight

Weight = Tensor | CodedWeight | BlockedWeight | JoinedWeight | UnreadWeight
"""Those of some linears come as codes, or stay in their files until they are packed."""
_ALIGNED_ROWS = 8
"""On an H100 the head of GPT-2, of 50,257 rows, takes 108 us for 32 sequences without rows of zeros."""


@dataclass(frozen=True, slots=True)
class Affine:
    """What a linear computes, act(x W^T + b), for a weight [out, in] in the dtype of computation, or of codes.

    `out_dtype` float32 spares a bf16 result its rounding where the product can give it.
    """

    weight: Weight
    bias: Tensor | None = None
    activation: Activation | None = None
    out_dtype: torch.dtype | None = None


class Linear(Protocol):
    """y = act(x W^T + b) + residual for x [rows, in], contiguous, in the weight's dtype."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, out]; residual ([rows, out]) is added after the product. Mutates nothing."""


class Rows(Protocol):
    """The rows of a matrix [num, width], such as a tensor; tokens are embedded by them."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, numbers_R: Tensor, /) -> Tensor:
        """Return the rows [R, width] of these numbers, int64, in [0, num)."""


class DenseLinear:
    """torch's linear: any device and dtype; the others are tested against it.

    cuBLAS chooses its kernel by the number of rows, so with `call_rows` each call has this many, the last ones zeros.
    It chooses a slow one for fp32 results of a width that is no multiple of _ALIGNED_ROWS: such a weight gets rows of
    zeros.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        call_rows: int | None = None,
    ) -> None:
        self._bias, self._activation, self._call_rows = bias, activation, call_rows
        self._is_wide = out_dtype is torch.float32 is not weight.dtype and weight.device.type != "cpu"
        self._weight, self._num_out = with_aligned_rows(weight) if self._is_wide else weight, len(weight)

    @property
    def copied_rows(self) -> Tensor | None:
        """The weight [out, in], where it was copied for rows of zeros."""
        return self._weight[: self._num_out] if len(self._weight) > self._num_out else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._call_rows is None:
            y = self._multiply(x)
        else:
            padded = functional.pad(x, (0, 0, 0, -len(x) % self._call_rows))
            pieces = padded.tensor_split(len(padded) // self._call_rows)
            y = torch.cat([self._multiply(piece) for piece in pieces])[: len(x)]
        y = activate(y, self._activation)
        return y if residual is None else y + residual

    def _multiply(self, x: Tensor) -> Tensor:
        if not self._is_wide:
            return functional.linear(x, self._weight, self._bias)
        y = torch.mm(x, self._weight.t(), out_dtype=torch.float32)[:, : self._num_out]
        return y if self._bias is None else y + self._bias


def with_aligned_rows(weight: Tensor) -> Tensor:
    """Return the weight [out, in], with rows of zeros behind it up to a multiple of _ALIGNED_ROWS if it needs any."""
    missing = -len(weight) % _ALIGNED_ROWS
    return functional.pad(weight, (0, 0, 0, missing)) if missing else weight


class LinearMaker(Protocol):
    """Makes the linears of a model, in the order in which a step needs them."""

    def make(self, name: str, affine: Affine) -> Linear:
        """Return the linear of this canonical name. The caller may drop the weight."""

    def rows_of(self, linear: Linear) -> Rows | None:
        """Return the rows of the weight, bit for bit, if a linear that was made here holds them in a copy of its own.

        Then the weight need not be kept for its rows.
        """


class DenseLinears:
    """Makes torch's linears. A LinearMaker."""

    def __init__(self, call_rows: int | None = None) -> None:
        self._call_rows = call_rows

    def rows_of(self, linear: Linear) -> Rows | None:
        return linear.copied_rows if isinstance(linear, DenseLinear) else None

    def make(self, name: str, affine: Affine) -> Linear:
        assert isinstance(affine.weight, Tensor)
        return DenseLinear(affine.weight, affine.bias, affine.activation, affine.out_dtype, self._call_rows)
