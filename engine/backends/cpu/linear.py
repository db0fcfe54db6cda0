"""Products with weights on a CPU: by our own code and, in an installation without a C++ compiler, by oneDNN.

The weight is packed once: for our own code, which reads it at memory speed and computes each row by itself, or for
oneDNN. There the bits of a row do not depend on the other rows if a call has at least 2 rows and, with AMX, at most 32;
PackedLinear makes such calls. runner/products.py chooses.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu import native
from gptserve.engine.model.activation import activate
from gptserve.engine.model.linear import Weight
from gptserve.weights.config import Activation
from gptserve.weights.huge_pages import HugePages
from gptserve.weights.quantized.blocked import BlockedWeight
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat, JoinedWeight

_MIN_ROWS = 2
"""Minimum rows of a call of oneDNN: it sums a single row in another order. Two and more agree bit for bit."""
_AMX_ROWS = 32
"""Maximum rows of a call with AMX: in bf16 oneDNN sums more rows in another order. From 2 to 32 rows no bit differed in
16 shapes up to 14336x4096, for any order of the rows and number of threads."""

_FUSED_ACTIVATIONS: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
"""What oneDNN calls the activations it can apply to a product."""


def has_onednn() -> bool:
    """Return whether this build of torch can pack weights for the CPU."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class NativeLinear:
    """The library of engine/backends/cpu, for fp32 and bf16 on a CPU, with the weight in its own layout.

    The bits of a row depend on that row alone: not on the number of rows, nor on native.num_threads(). They may differ
    between variants. Bias, activation and residual, which may be fp32, are added in fp32; the result is rounded once.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        variant: native.Variant | None = None,
        memory: HugePages | None = None,
    ) -> None:
        """Pack the weight into `memory`. `variant` is one of native.supported_variants; None means the fastest."""
        self._library, self.dtype, self._out_dtype = native.library(), weight.dtype, out_dtype or weight.dtype
        self._num_out, self.num_in = weight.shape
        self._padding = -self.num_in % native.ROW_MULTIPLE
        self._memory, self._kept = memory or HugePages(), list[Tensor]()
        bits = self._bits()
        self._variant = native.VARIANTS[bits].index(variant or native.supported_variants(bits)[-1]) + 1
        self.weight = native.PackedWeight(
            num_out=self._num_out,
            activation=native.ACTIVATIONS.index(activation),
            variant=self._variant,
            **{"num_in": self.num_in, "element_bits": bits, **self._pack(weight, bias)},
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dtype is self.dtype and x.is_contiguous() and x.shape[1:] == (self.num_in,)
        out = torch.empty(len(x), self._num_out, dtype=self._out_dtype)
        address = None
        if residual is not None:
            assert residual.dtype in (self.dtype, torch.float32)
            assert residual.is_contiguous() and residual.shape == out.shape
            address = residual.data_ptr()
        if self._padding:
            x = functional.pad(x, (0, self._padding))
        width = native.WIDE_OUT * (self._out_dtype is torch.float32) | native.WIDE_X * (x.dtype is torch.float32)
        width |= native.WIDE_RESIDUAL * (residual is not None and residual.dtype is torch.float32)
        self._library.native_multiply(self.weight, x.data_ptr(), address, out.data_ptr(), len(x), width)
        return out

    def _bits(self) -> int:
        """Return the bits of an element of the packed weight, as native.VARIANTS has them."""
        return 8 * self.dtype.itemsize

    def _pack(self, weight: Weight, bias: Tensor | None) -> dict[str, Any]:
        """Return the members of PackedWeight that depend on the weight's type; addresses are of tensors in _kept."""
        assert isinstance(weight, Tensor) and weight.dtype in (torch.float32, torch.bfloat16)
        packed = self._take_packed()
        self._pack_rows(packed, 0, weight)
        return {"weight": packed, "bias": self._pad_outputs(bias)}

    def _take_packed(self) -> int:
        """Keep memory for the weight in the library's layout; return where it begins."""
        sizes = self.num_in, self._num_out, self._bits()
        return self._keep(self._memory.take(self._library.native_packed_size(*sizes)))

    def _pack_rows(self, packed: int, start: int, rows: Tensor) -> None:
        """Pack rows [rows, in] of the weight from row `start`, which begins a panel; whole panels or up to the end."""
        assert rows.device.type == "cpu"
        rows, bits, num_in = rows.contiguous(), self._bits(), self.num_in
        address = packed + self._library.native_packed_size(num_in, start, bits)
        self._library.native_pack(rows.data_ptr(), num_in, len(rows), bits, address)

    def _pad_outputs(self, values: Tensor | None) -> int | None:
        """Keep one number an output in fp32, padded with zeros, as the library reads whole vectors of them."""
        if values is None:
            return None
        kept = self._memory.take(4 * -(-self._num_out // native.COLUMNS) * native.COLUMNS).view(torch.float32)
        kept[: self._num_out] = values
        return self._keep(kept)

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor that the library reads; return its address."""
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


class PackedRows:
    """The rows of a NativeLinear, as a Rows: with their bits in fp32 or bf16, rounded to its dtype if codes."""

    device = torch.device("cpu")

    @classmethod
    def of(cls, linear: object) -> PackedRows | None:
        """Return the rows, if they can be read."""
        if not isinstance(linear, NativeLinear):
            return None
        return cls(linear) if linear.weight.num_parts == 1 or linear.weight.element_bits >= 16 else None

    def __init__(self, linear: NativeLinear) -> None:
        self.linear, self.dtype = linear, linear.dtype
        weight, self._are_codes = linear.weight, linear.weight.num_parts > 0
        self.kind = native.CODED_ROWS if self._are_codes else native.PACKED_ROWS
        self.address = ctypes.addressof(weight.parts[0]) if self._are_codes else weight.weight
        """Of the packed weight, or of the CodedRows that say where it is."""

    def __getitem__(self, numbers_R: Tensor) -> Tensor:
        weight, numbers_R = self.linear.weight, numbers_R.contiguous()
        assert numbers_R.dtype is torch.int64 and numbers_R.dim() == 1
        rows = torch.empty(len(numbers_R), weight.num_in, dtype=torch.float32 if self._are_codes else self.dtype)
        of_rows = numbers_R.data_ptr(), len(numbers_R), rows.data_ptr()
        if self._are_codes:
            native.library().native_unpack_codes(weight.parts, weight.num_in, *of_rows)
        else:
            native.library().native_unpack(self.address, weight.num_in, weight.element_bits, *of_rows)
        return rows[:, : self.linear.num_in].to(self.dtype)


class NativeCodedLinear(NativeLinear):
    """The library of engine/backends/cpu with codes in groups, as they are stored; its variants give the same bits."""

    def _bits(self) -> int:
        return native.CODED_VARIANTS

    def _pack(self, weight: Weight, bias: Tensor | None) -> dict[str, Any]:
        assert isinstance(weight, CodedWeight | BlockedWeight | JoinedWeight)
        row, parts = 0, list[tuple[int, int, CodeFormat]]()
        for part in weight.parts:
            assert row % native.COLUMNS == 0
            parts.append((self._pack_codes(part), row // native.COLUMNS, part.format))
            row += part.shape[0]
        return self._members(parts, bias)

    def _members(self, parts: Sequence[tuple[int, int, CodeFormat]], bias: Tensor | None) -> dict[str, Any]:
        """Return what `_pack` does for parts of which each is packed somewhere and begins at a panel."""
        of_parts = [native.CodedRows(*place, native.CODE_FORMATS.index(its)) for *place, its in parts]
        return {
            "num_in": self.num_in + self._padding,
            "bias": self._pad_outputs(bias),
            "element_bits": max(its.bits for *_, its in parts),
            "num_parts": len(parts),
            "parts": (native.CodedRows * len(parts))(*of_parts),
        }

    def _pack_codes(self, weight: CodedWeight | BlockedWeight) -> int:
        """Keep rows in the library's layout; return where they begin. Raises InvalidCheckpointError."""
        sizes = self.num_in, weight.shape[0], native.CODE_FORMATS.index(weight.format)
        packed = self._keep(self._memory.take(self._library.native_grouped_size(*sizes)))
        if isinstance(weight, BlockedWeight):
            rows, its_type = weight.addresses(), native.BLOCK_TYPES.index(weight.type_name)
            if not self._library.native_pack_blocks(rows.data_ptr(), *sizes[:2], its_type, packed):
                weight.require_finite()
            return packed
        assert all(part is None or part.is_contiguous() for part in weight.tensors)
        numbers = native.NumbersOfCodes(*(None if part is None else part.data_ptr() for part in weight.tensors))
        self._library.native_pack_groups(numbers, *sizes, packed)
        return packed


class PackedLinear:
    """oneDNN with the weight in its own blocked layout; bias, activation and residual are fused into the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._attr, self._algorithm = _FUSED_ACTIVATIONS.get(activation, _FUSED_ACTIVATIONS[None])
        self._activation = None if activation in _FUSED_ACTIVATIONS else activation
        uses_amx = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._max_rows = _AMX_ROWS if uses_amx else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None or (self._attr == "none" and self._activation is None), "a residual or an activation"
        num_rows = len(x)
        if num_rows < _MIN_ROWS:
            padding = (0, 0, 0, _MIN_ROWS - num_rows)
            x, residual = functional.pad(x, padding), None if residual is None else functional.pad(residual, padding)
        num_calls = 1 if self._max_rows is None else math.ceil(len(x) / self._max_rows)
        if num_calls == 1:
            return activate(self._multiply(x, residual)[:num_rows], self._activation)
        pieces = x.tensor_split(num_calls)
        added = [None] * num_calls if residual is None else residual.tensor_split(num_calls)
        y = torch.cat([self._multiply(*pair) for pair in zip(pieces, added, strict=True)])
        return activate(y, self._activation)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return x W^T + b, with the residual added or the fused activation applied."""
        ops = torch.ops.mkldnn
        y: Tensor
        if residual is None:
            y = ops._linear_pointwise(x, self._packed, self._bias, self._attr, [], self._algorithm)
        else:
            y = ops._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return y
