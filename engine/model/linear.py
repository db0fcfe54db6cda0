"""Matrix products with weights: the one place that decides how y = x W^T + b is computed.

On a CPU the weight is packed once for oneDNN, which reads it near memory speed. The bits of a row do not depend on the
other rows if a call has at least 2 rows (the batch pads a single one) and, with AMX, at most 32. Elsewhere torch's own
linear is used. layers.py and decoder.py build one `Linear` for each weight and know nothing of packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.weights.config import Activation

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
    """y = act(x W^T + b) + residual for x [rows, in], in the weight's dtype; rows >= MIN_ROWS."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, out]; residual ([rows, out]) is added after the product. Mutates nothing."""


def has_onednn() -> bool:
    """Return whether this build of torch can pack weights for the CPU."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def rows_are_independent(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Return whether packed weights of these shapes (in, out) give a row the same bits for any number of rows.

    A probe, not a proof: it compares some row counts, on all threads, all but one, half of them and one.
    """
    generator, num_threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    widths = {max(1, number) for number in (1, num_threads // 2, num_threads - 1, num_threads)}
    try:
        for num_in, num_out in shapes:
            weight = torch.randn(min(num_out, _PROBED_COLUMNS), num_in, generator=generator).to(dtype)
            x = torch.randn(_PROBED_ROWS[-1], num_in, generator=generator).to(dtype)
            linear = PackedLinear(weight, None)
            whole = linear(x)
            for width in widths:
                torch.set_num_threads(width)
                if not all(torch.equal(linear(x[:num_rows]), whole[:num_rows]) for num_rows in _PROBED_ROWS):
                    return False
    finally:
        torch.set_num_threads(num_threads)
    return True


def make_linear(weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Linear:
    """Return the fastest exact Linear for a weight [out, in] on its device. The caller may drop the weight."""
    if weight.device.type == "cpu" and has_onednn() and weight.dtype != torch.float16:
        return PackedLinear(weight, bias, activation)
    return DenseLinear(weight, bias, activation)


class DenseLinear:
    """torch's linear: any device and dtype; PackedLinear is tested against it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = activate(functional.linear(x, self._weight, self._bias), self._activation)
        return y if residual is None else y + residual


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
