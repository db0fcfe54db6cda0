"""Numbers in int8 and int10: how weights and rows are quantized, and a product in int8 in torch.

The weights of an output are whole multiples, -127 to 127, of its scale; so are most elements of a row of x. Products
are sums of integers, exact in any order. csrc/int8.cpp computes the same, bit for bit up to the activation, where the
compiled library is there. It alone multiplies in int10, for the weights whose errors count most: their multiples are
-511 to 511, and int8.cpp says the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import WeightType
from gptserve.engine.model.activation import activate
from gptserve.weights.config import Activation
from gptserve.weights.loading_threads import map_pieces

_STEP = 127
"""The largest multiple of a scale."""
_STEP_10 = 511
"""The same of a weight in int10."""
_ELEMENTS = 2**18
"""About as many weights are quantized at once: in fp32 they take 1 MB."""
_ROWS = 32
"""They are a multiple of this many rows, but for the last."""
_LARGE, _SMALL = 8, 1 / 2
"""Columns of weights this many times as large as the median one get a factor, at most 2^16.

One that is 2 to 5 times as large seldom has an output's largest weight, so a factor makes no scale finer, and only that
column coarser: where its element of x is large, too, as in SmolLM2, that was most of the error of all int8.
"""

_FAR_SHARE = 128
"""One element of a row in this many may lie beyond _STEP: 20 times the rest are 0.5 % of GPT-2's channels."""
_LEVEL_BITS, _LEVELS = 20, 48
"""A row's scale is a power of two times 8/8 to 15/8. Its bound is at most 6 octaves below its largest element."""
_EXACT_SCALE = 4
"""One output or channel in native.EXACT_SHARE, if its size is this many times the median one, is not quantized."""
_LANES = 32
"""A sum of products that are not quantized is made of as many sums."""
_MIN_BOUND = 1e-30
"""In fp32, _STEP divided by less is infinite."""
_INFINITY_BITS = 0x7F800000

_EXACT_COLUMNS = 1024
"""As many products of two multiples sum to less than 2^24, so fp32 holds each partial sum exactly."""


def large_channels(embedding: Tensor, positions: Tensor | None) -> Tensor:
    """Return the outlier channels of the residual stream, in ascending order, int64.

    They are those of the tables [tokens, hidden] that it begins with. Products of the stream do not quantize them: most
    of a row's size is in them, and so would be most of the error.
    """
    squares = torch.zeros(embedding.shape[1], device=embedding.device)
    for table in (embedding,) if positions is None else (embedding, positions):
        for sums in map_pieces(lambda rows: rows.float().square().sum(0), _some_rows(table)):
            squares += sums / len(table)
    return _by_far_largest(squares.sqrt())


def column_factors(weight: Tensor, exact_inputs: Tensor | None = None) -> Tensor | None:
    """Return a power of two for each column of a weight [out, in], fp32; None if all would be 1.

    Weights are divided by the factors and rows of x multiplied by them, as in SmoothQuant (Xiao et al. 2023). So a few
    large columns do not make the scale of every output coarse, and a small one, whose elements of x are often large,
    does not lose its digits. Large is the root mean square, small the largest element: no scale becomes coarser. They
    are in units of their output's mean element: otherwise the few large outputs, such as those that write to outlier
    channels, would decide alone. The factor of an exact input, whose column is not quantized, is 0.
    """
    squares = torch.zeros(weight.shape[1], device=weight.device)
    largest = torch.zeros_like(squares)
    for its_squares, its_largest in map_pieces(_column_sizes, _some_rows(weight)):
        squares += its_squares
        largest = torch.maximum(largest, its_largest)
    root, most = (squares / squares.median()).sqrt(), largest / largest.median()
    factors = torch.where(root > _LARGE, root.log2().round().exp2(), 1.0)
    factors = torch.where((most > 0) & (most < _SMALL), most.log2().ceil().exp2(), factors)
    factors = torch.where(factors.isfinite(), factors, 1.0).clamp(2**-16, 2**16)
    if exact_inputs is not None:
        factors[exact_inputs] = 0.0
    return None if (factors == 1).all() else factors


def _column_sizes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of squares and the largest elements [in] of some rows, in units of a row's mean element."""
    size = rows.float().abs()
    size /= size.mean(1, keepdim=True).clamp(min=_MIN_BOUND)
    return size.square().sum(0), size.amax(0)


def quantize_weight(
    weight: Tensor,
    factors: Tensor | None,
    weight_type: WeightType = "int8",
    *,
    keep: Callable[[int, Tensor], object],
) -> Tensor:
    """Return the fp32 scales [out] of a weight [out, in]; call `keep` with multiples [rows, in] and their first row.

    The multiples are int8; those of int10, -511 to 511, are int16. The scale of an output with NaN or infinity is NaN.
    Threads call `keep` at once (loading_threads.py).
    """
    most, dtype = (_STEP, torch.int8) if weight_type == "int8" else (_STEP_10, torch.int16)

    def quantize(rows: Tensor, start: int) -> Tensor:
        divided = rows.float() if factors is None else torch.where(factors == 0, 0.0, rows.float() / factors)
        largest = divided.abs().amax(1)
        is_finite = largest.isfinite()
        scales = torch.where(is_finite, largest / most, torch.nan)
        divisor = torch.where(is_finite & (scales > 0), scales, 1.0)
        multiples = (divided / divisor[:, None]).round_().clamp_(-most, most)
        keep(start, torch.where(is_finite[:, None], multiples, 0.0).to(dtype))
        return scales

    pieces = _some_rows(weight)
    return torch.cat(list(map_pieces(quantize, pieces, range(0, len(weight), len(pieces[0])))))


def exact_outputs(scales: Tensor) -> Tensor:
    """Return which outputs are not quantized, in ascending order, int64; `scales` is quantize_weight's, of all outputs.

    Where a product is added to the residual stream, these are its outlier channels. They are most of the stream, so
    their errors are most of its error.
    """
    return _by_far_largest(scales.nan_to_num(0.0))


def _by_far_largest(sizes: Tensor) -> Tensor:
    """Return at most one index in EXACT_SHARE, of sizes beyond _EXACT_SCALE times the median, in ascending order."""
    largest = sizes.sort(descending=True, stable=True).indices[: -(-len(sizes) // native.EXACT_SHARE)]
    return largest[sizes[largest] > _EXACT_SCALE * sizes.median()].sort().values


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the fp32 products [rows, out] of fp32 rows [rows, in] and weights [out, in].

    There are _LANES sums, in ascending order, and then the sums of their halves until one is left.
    """
    padding = (0, -x.shape[1] % _LANES)
    pieces = (torch.split(functional.pad(t, padding), _LANES, dim=1) for t in (x, weight))
    sums = torch.zeros(len(x), len(weight), _LANES, device=x.device)
    for some, its_weights in zip(*pieces, strict=True):
        sums += some[:, None] * its_weights
    while sums.shape[2] > 1:
        left, right = sums.chunk(2, dim=2)
        sums = left + right
    return sums[:, :, 0]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return near and far multiples [rows, in] and scales [rows, 1] of fp32 rows: x is scale * (near + 128 * far).

    A row's scale is the finest that leaves at most one element in _FAR_SHARE, the outliers, beyond _STEP; only these
    have a far part. The scale of a row with NaN or infinity is NaN. All are fp32.
    """
    bits = x.abs().view(torch.int32)
    levels = functional.pad(bits >> _LEVEL_BITS, (0, 1))
    descending = levels.sort(descending=True).values
    highest = descending[:, :1]
    num_far = -(-x.shape[1] // _FAR_SHARE)
    level = torch.maximum(descending[:, num_far : num_far + 1], highest - _LEVELS)
    bound_bits = (level + 1) << _LEVEL_BITS
    is_finite = (bits.amax(1, keepdim=True) < _INFINITY_BITS) & (bound_bits < _INFINITY_BITS)
    bound = bound_bits.to(torch.int32).view(torch.float32).clamp(min=_MIN_BOUND)
    inverse = torch.full_like(bound, _STEP) / bound  # torch takes number / tensor for number * (1 / tensor)
    whole = torch.where(is_finite, x * inverse, 0.0).round()
    far = torch.where(whole.abs() > _STEP, ((whole + 64) / 128).floor(), 0.0)
    return whole - 128 * far, far, torch.where(is_finite, bound / _STEP, torch.nan)


def integer_product(multiples: Tensor, values: Tensor) -> Tensor:
    """Return the exact sums, rounded to fp32, of fp32 multiples [rows, in] times int8 values [out, in]."""
    sums = torch.zeros(len(multiples), len(values), dtype=torch.int32, device=values.device)
    start = 0
    for rows in _some_rows(values):
        pieces = (torch.split(t, _EXACT_COLUMNS, dim=1) for t in (multiples, rows))
        for some, its_columns in zip(*pieces, strict=True):
            sums[:, start : start + len(rows)] += functional.linear(some, its_columns.float()).to(torch.int32)
        start += len(rows)
    return sums.float()


def _some_rows(weight: Tensor) -> Sequence[Tensor]:
    """Return a weight [out, in] in pieces of about _ELEMENTS."""
    return torch.split(weight, max(1, _ELEMENTS // weight.shape[1] // _ROWS) * _ROWS)


class DenseInt8Linear:
    """A product in int8 by torch, for an installation without a compiler; slow, as weights become fp32 at each call."""

    _WEIGHT_TYPE: WeightType = "int8"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        exact_inputs: Tensor | None = None,
    ) -> None:
        """Quantize the weight, but for its columns `exact_inputs`, int64, ascending."""
        self._factors = column_factors(weight, exact_inputs)
        values: dict[int, Tensor] = {}
        self._scales = quantize_weight(weight, self._factors, self._WEIGHT_TYPE, keep=values.__setitem__)
        self._values = torch.cat([values[start] for start in sorted(values)])
        self._exact = exact_outputs(self._scales)
        self._exact_weight = weight[self._exact].float()
        self._inputs = torch.empty(0, dtype=torch.int64) if exact_inputs is None else exact_inputs
        self._input_weights = weight[:, self._inputs].float()
        self._bias, self._activation = None if bias is None else bias.float(), activation
        self._out_dtype = out_dtype or weight.dtype

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        wide = x.float() if self._factors is None else x.float() * self._factors
        sums, row_scales = self._sums(wide)
        y = sums * row_scales * self._scales
        for column, its_weights in zip(x[:, self._inputs].float().T, self._input_weights.T, strict=True):
            y += column[:, None] * its_weights
        if len(self._exact):
            exact = exact_product(x.float(), self._exact_weight)
            y[:, self._exact] = torch.where(row_scales.isnan(), torch.nan, exact)
        y = activate(y if self._bias is None else y + self._bias, self._activation)
        return (y if residual is None else y + residual.float()).to(self._out_dtype)

    def _sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the fp32 sums [rows, out] of multiples of fp32 rows [rows, in] times those of weights; the scales."""
        near, far, row_scales = quantize_rows(x)
        return integer_product(near, self._values) + 128 * integer_product(far, self._values), row_scales
