"""Products with weights in int8 in torch, for an installation without a compiler.

Such weights are codes of 8 bits with scales in groups (weights/quantized/coded.py). csrc/rounding.cpp makes the same
codes, and csrc/groups.cpp computes the same products, bit for bit up to the activation. Where the squares of inputs are
known (runner/input_squares.py), scales are those of small errors of products. Elements of a row become codes of 8 bits,
too, with a scale for each group. What that leaves of the groups with the largest scales, in which most of the error of
rows is, is multiplied as well.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.model.activation import activate
from gptserve.weights.config import Activation
from gptserve.weights.quantized.coded import GROUP, CodedWeight, CodeFormat

FORMAT = CodeFormat(8, "scales")
STEP = 127
"""The largest code of a row."""
REMAINDER_STEPS = 2 * STEP
"""The codes of a remainder, which is at most half a scale, are multiples of the scale divided by this."""
REMAINDER_SHARE = 16
"""One group of a row in this many has a remainder."""
NUM_SCALES = 16
"""As many scales of a group are tried where the squares of inputs are known."""
_FLOOR = 0.03
"""What the least square of an input counts as, in means of all: other tokens than those that were tried may use it."""
_TINY = 1e-30
_HALF_SPLIT = 2**13 + 1
"""fp32 has 13 bits more than fp16: Veltkamp's split."""
_MAX_SHORT, _MAX_SHARE = 32767.0, 4095.0
_STEP_FACTOR = 256 * 32768 / 32767
"""Two steps in 7 bits, for the upper halves of products."""
_MAX_HALF = 65504.0
_MIN_BOUND = 1e-30
"""In fp32, STEP divided by less is infinite."""
_ELEMENTS = 2**22
"""As many products with remainders are computed at once."""


def shares_of(squares: Tensor) -> Tensor:
    """Return what an error of a weight of each input counts, fp32 [in], from the means of their squares.

    All count alike if some square is not finite.
    """
    return (squares.float() / squares.mean().clamp(min=_TINY)).nan_to_num_(0.0, 0.0) + _FLOOR


def quantize_weight(weight: Tensor, shares: Tensor | None = None) -> CodedWeight:
    """Return a weight [out, in], with in a multiple of GROUP, as codes. A group's largest weight is a code at its end.

    With `shares`, fp32 [in], scales are those of `fitted_scales`. The scale of a group that is not finite is NaN.
    """
    groups = _groups(weight.float())
    is_finite = groups.isfinite().all(2)
    groups = torch.where(is_finite[..., None], groups, 0.0)
    exact = largest_weights(groups) / -FORMAT.zero if shares is None else fitted_scales(groups, shares, FORMAT)
    halves = (exact.clamp(-_MAX_HALF, _MAX_HALF) + 0.0).half()  # no -0
    scales = halves.float()
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    codes = (groups + (scales * FORMAT.zero)[..., None]) * inverse[..., None]
    codes = codes.round_().clamp_(0, 2 * FORMAT.zero - 1).to(torch.uint8)
    return CodedWeight(FORMAT, weight.dtype, codes.flatten(1), torch.where(is_finite, halves, torch.nan))


def largest_weights(groups: Tensor) -> Tensor:
    """Return the largest weight by magnitude of each group [rows, groups, GROUP], the first of these."""
    return groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]


def fitted_scales(groups: Tensor, shares: Tensor, its: CodeFormat) -> Tensor:
    """Return scales, fp32 [rows, groups], of groups [rows, groups, GROUP], with small squared errors of products.

    The error of a weight counts what `shares`, fp32 [in], says. The first of NUM_SCALES that are tried makes the
    largest weight a code `zero` - 1 steps from 0; each after it has zero / 128 steps less. Errors are integers: a
    weight has 16 bits, what its code leaves of it 7 bits of a step, and the square of that, times its share, 26.
    """
    largest, zero = largest_weights(groups), its.zero
    bound, counts = largest.abs(), shares.view(-1, GROUP).T.contiguous()
    counts = (counts * (_MAX_SHARE / counts.amax(0)) + 0.5).int()
    unit = torch.where(bound > _TINY, 1 / bound, 0.0) * _MAX_SHORT
    weights = (groups.permute(2, 0, 1) * unit).round_().int()  # strides cost most
    best = least = torch.empty(0)
    for i in range(NUM_SCALES):
        steps = zero - 1 - i * zero / 128
        exact = largest / -steps
        above = exact * _HALF_SPLIT
        scales = (above - (above - exact)).abs()  # what fp16 has of them
        factors = (bound * torch.where(scales > _TINY, 1 / scales, 0.0) * _STEP_FACTOR).round_().int()
        sums = torch.zeros_like(factors)
        for column, count in zip(weights, counts, strict=True):
            left = ((column * factors) >> 16 << 25) >> 16  # the lower 7 bits, as 16 with a sign
            sums += (left.square_() >> 16).mul_(count)
        errors = sums.float() * (1 / (steps * steps))
        best = exact if i == 0 else torch.where(errors < least, exact, best)
        least = errors if i == 0 else torch.minimum(errors, least)
    return best


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes [rows, groups, GROUP] of fp32 rows [rows, in], those of remainders, and scales [rows, groups].

    A group that is not finite has codes of 0, and NaN for a scale. Remainders have the scale / REMAINDER_STEPS.
    """
    groups = _groups(x)
    is_finite = groups.isfinite().all(2)
    bound = torch.where(is_finite, groups.abs().amax(2), 0.0).clamp(min=_MIN_BOUND)
    multiples = groups * (torch.full_like(bound, STEP) / bound)[..., None]
    multiples = torch.where(is_finite[..., None], multiples, 0.0)
    codes = multiples.round()
    return codes, ((multiples - codes) * REMAINDER_STEPS).round(), torch.where(is_finite, bound / STEP, torch.nan)


def group_sums(codes: Tensor, weights: Tensor, scales: Tensor, factors: Tensor) -> Tensor:
    """Return the fp32 products [rows, out] of rows, as quantize_rows has them, and integers [out, groups, GROUP].

    The integers are multiplied by `factors`, fp32 [out, groups]. A group is added after the other, without fused
    multiply-adds; its own sum is one of integers below 2^24.
    """
    y = torch.zeros(len(codes), len(weights))
    for g in range(scales.shape[1]):
        y += codes[:, g] @ weights[:, g].T * (scales[:, g, None] * factors[:, g])
    return y


def add_remainders(y: Tensor, x: Tensor, weights: Tensor, factors: Tensor) -> None:
    """Add the products with the remainders of fp32 rows [rows, in] to y [rows, out]; the others are as in group_sums.

    The largest scale comes first, of equal ones the first.
    """
    num_groups = factors.shape[1]
    num = -(-num_groups // REMAINDER_SHARE)
    for its_y, rows in zip(*(torch.split(t, max(1, _ELEMENTS // (GROUP * len(weights)))) for t in (y, x)), strict=True):
        largest = _groups(rows).abs().amax(2)
        _, codes, scales = quantize_rows(rows)
        all_rows = torch.arange(len(rows))
        for places in largest.sort(dim=1, descending=True, stable=True).indices[:, :num].T:
            sums = (codes[all_rows, places] * weights[:, places]).sum(2).T
            its_y += sums * ((scales[all_rows, places] / REMAINDER_STEPS)[:, None] * factors[:, places].T)


def _groups(values: Tensor) -> Tensor:
    """Return numbers [rows, in] as [rows, groups, GROUP]."""
    return values.view(len(values), -1, GROUP)


class DenseInt8Linear:
    """A product in int8 by torch; slow, as weights become fp32 at each call. Its rows are a Rows."""

    device = torch.device("cpu")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        squares: Tensor | None = None,
    ) -> None:
        self.dtype, self._num_in = weight.dtype, weight.shape[1]
        self._padding = 0, -self._num_in % GROUP
        shares = None if squares is None else functional.pad(shares_of(squares), self._padding)
        self._weight = quantize_weight(functional.pad(weight, self._padding), shares)
        self._bias, self._activation = None if bias is None else bias.float(), activation
        self._out_dtype = out_dtype or weight.dtype

    def __getitem__(self, numbers_R: Tensor) -> Tensor:
        values = _groups(self._weight.codes[numbers_R].float() - FORMAT.zero)
        rows: Tensor = (values * self._weight.scales[numbers_R].float()[..., None]).flatten(1)
        return rows[:, : self._num_in].to(self.dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        wide = functional.pad(x.float(), self._padding)
        weights = _groups(self._weight.codes.float() - FORMAT.zero)
        factors = self._weight.scales.float()
        codes, _, scales = quantize_rows(wide)
        y = group_sums(codes, weights, scales, factors)
        add_remainders(y, wide, weights, factors)
        y = activate(y if self._bias is None else y + self._bias, self._activation)
        return (y if residual is None else y + residual.float()).to(self._out_dtype)
