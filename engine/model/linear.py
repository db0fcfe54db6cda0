"""Matrix products with weights: the one place that decides how y = x W^T + b is computed.

On a CPU the weight is packed once: in bf16 for our own code, which reads it at memory speed and computes each row by
itself; else for oneDNN. There the bits of a row do not depend on the other rows if a call has at least 2 rows (the
batch pads a single one) and, with AMX, at most 32. Elsewhere torch's own linear is used. layers.py and decoder.py build
one `Linear` for each weight and know nothing of packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine import native
from gptserve.weights.config import Activation

Product = Literal["native", "onednn", "torch"]
"""What multiplies: NativeLinear, PackedLinear or DenseLinear."""

MIN_ROWS = 2
"""oneDNN sums a single row in another order; two and more rows agree bit for bit."""

_AMX_ROWS = 32
"""Maximum rows of a call with AMX: in bf16 oneDNN sums more rows in another order. From 2 to 32 rows no bit differed in
16 shapes up to 14336x4096, for any order of the rows and number of threads."""

_PROBED_ROWS = (2, 9, 24, 33, 65, 160, 256)
"""Row counts between which oneDNN with AMX was seen to change its order of summation, in ascending order."""
_PROBED_COLUMNS = 8192  # enough for a large head: more columns take memory and show nothing new

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "tanh": torch.tanh,
}
"""GELU and its approximations as in Hendrycks & Gimpel 2016, section 2."""

_FUSED_ACTIVATIONS: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
"""What oneDNN calls the activations it can apply to a product."""


class Linear(Protocol):
    """y = act(x W^T + b) + residual for x [rows, in], contiguous, in the weight's dtype; rows >= MIN_ROWS."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, out]; residual ([rows, out]) is added after the product. Mutates nothing."""


def has_onednn() -> bool:
    """Return whether this build of torch can pack weights for the CPU."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def product_of(device: torch.device, dtype: torch.dtype) -> Product:
    """Return what multiplies with weights of this dtype on this device."""
    if device.type == "cpu" and dtype is torch.bfloat16 and native.supported_variants():
        return "native"
    return "onednn" if device.type == "cpu" and has_onednn() and dtype != torch.float16 else "torch"


def build_of(product: Product) -> str:
    """Return the product and what else decides its bits; the versions of torch and its libraries decide the others'."""
    return f"native {native.supported_variants()[-1]} {native.digest()}" if product == "native" else product


def rows_are_independent(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Return whether linears of these shapes (in, out) on a CPU give a row the same bits for any number of rows.

    A probe, not a proof: it compares some row counts, on all threads, all but one, half of them and one.
    """
    generator, num_threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    widths = {max(1, number) for number in (1, num_threads // 2, num_threads - 1, num_threads)}
    try:
        for num_in, num_out in shapes:
            weight = torch.randn(min(num_out, _PROBED_COLUMNS), num_in, generator=generator).to(dtype)
            x = torch.randn(_PROBED_ROWS[-1], num_in, generator=generator).to(dtype)
            linear = make_linear(weight, None)
            whole = linear(x)
            for width in widths:
                torch.set_num_threads(width)
                native.set_num_threads(width)
                if not all(torch.equal(linear(x[:num_rows]), whole[:num_rows]) for num_rows in _PROBED_ROWS):
                    return False
    finally:
        torch.set_num_threads(num_threads)
        native.set_num_threads(num_threads)
    return True


def make_linear(
    weight: Tensor, bias: Tensor | None, activation: Activation | None = None, out_dtype: torch.dtype | None = None
) -> Linear:
    """Return the fastest exact Linear for a weight [out, in] on its device. The caller may drop the weight.

    `out_dtype` float32 spares a bf16 result its rounding where the product can give it; only NativeLinear can.
    """
    match product_of(weight.device, weight.dtype):
        case "native":
            return NativeLinear(weight, bias, activation, out_dtype)
        case "onednn":
            return PackedLinear(weight, bias, activation)
        case "torch":
            return DenseLinear(weight, bias, activation)


class DenseLinear:
    """torch's linear: any device and dtype; the others are tested against it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = activate(functional.linear(x, self._weight, self._bias), self._activation)
        return y if residual is None else y + residual


class NativeLinear:
    """The library of engine/native, for bf16 on a CPU, with the weight in its own layout.

    The bits of a row depend on that row alone: not on the number of rows, nor on native.num_threads(). They may differ
    between variants. Bias, activation and residual are added in fp32, and the result is rounded once.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        variant: native.Variant | None = None,
    ) -> None:
        """Pack the weight. `variant` is one of native.supported_variants(); None means the best."""
        assert weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
        variants, self._library = native.supported_variants(), native.library()
        self._num_out, self._num_in = weight.shape
        self._padding = -self._num_in % native.ROW_MULTIPLE
        self._out_dtype = out_dtype or weight.dtype
        size = self._library.native_packed_size(self._num_in, self._num_out)
        self._packed = torch.empty(size, dtype=weight.dtype)
        dense = weight.contiguous()
        self._library.native_pack(dense.data_ptr(), self._num_in, self._num_out, self._packed.data_ptr())
        self._bias = None
        if bias is not None:  # the library reads whole vectors of it
            self._bias = torch.zeros(size // (self._num_in + self._padding))
            self._bias[: self._num_out] = bias
        self.weight = native.PackedWeight(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            *(self._num_in, self._num_out, native.ACTIVATIONS.index(activation)),
            native.VARIANTS.index(variant or variants[-1]) + 1,
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1:] == (self._num_in,)
        out = torch.empty(len(x), self._num_out, dtype=self._out_dtype)
        address = None
        if residual is not None:
            assert residual.dtype is torch.bfloat16 and residual.is_contiguous() and residual.shape == out.shape
            address = residual.data_ptr()
        if self._padding:
            x = functional.pad(x, (0, self._padding))
        wide = self._out_dtype is torch.float32
        self._library.native_multiply(self.weight, x.data_ptr(), address, out.data_ptr(), len(x), wide)
        return out


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
        assert x.shape[0] >= MIN_ROWS, "a single row must be padded: its bits would differ from those in a batch"
        assert residual is None or (self._attr == "none" and self._activation is None), "a residual or an activation"
        num_calls = 1 if self._max_rows is None else math.ceil(len(x) / self._max_rows)
        if num_calls == 1:
            return activate(self._multiply(x, residual), self._activation)
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


def activate(x: Tensor, activation: Activation | None) -> Tensor:
    """Return the activation of x, elementwise."""
    return x if activation is None else _ACTIVATIONS[activation](x)
