"""How weights become codes in groups, by torch: what csrc/rounding_kernel.h computes, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptserve.engine.backends.cpu.int8 import fitted_scales, largest_weights, shares_of
from gptserve.weights.quantized.coded import GROUP, SUPER_GROUP, CodedWeight, CodeFormat

_MAX_HALF, _LARGEST, _TINY = 65504.0, 127, 1e-30
_MAX_WEIGHT = 2e9
_ZERO_STARTS = (0.0, -2.0, 2.0)


def quantize_groups(rows: Tensor, its: CodeFormat, squares: Tensor | None = None) -> CodedWeight:
    """Return rows [rows, in] as the nearest codes. The scale of a group that is not finite is NaN.

    With scales alone the largest weight of a group is a code at its end; with least values the largest and the least.
    With sub-scales there are least values, which are rounded before the scales. Weights too close for any scale are 0.
    With `squares`, fp32 [in], the means of the squares that a weight's inputs have, the numbers of groups are instead
    those of a small sum of the squared errors of products, as if no two inputs had to do with each other.
    """
    groups, most = rows.float().view(len(rows), -1, GROUP), (1 << its.bits) - 1
    is_finite = groups.isfinite().all(2)
    groups = torch.where(is_finite[..., None], groups, 0.0).clamp(-_MAX_WEIGHT, _MAX_WEIGHT)
    if its.kind == "scales":
        groups = groups.view(len(rows), -1, its.sub_group or GROUP)
        scales = _Numbers.of(_scales(groups, squares, its), its)
        offsets, others = scales.values * its.zero, None
    else:
        if squares is None:
            others = _Numbers.of(groups.amin(2), its)
            exact = (groups.amax(2) - others.values).clamp(min=0) / most
        else:
            fit = _Fit(groups, squares, most)
            others = _Numbers.of(fit.leasts, its)
            exact = fit.scales_above(others.values)
        scales = _Numbers.of(exact, its)
        others = others.without((scales.values == 0) & (groups.amax(2) > groups.amin(2)))
        offsets = -others.values
    inverse = torch.where(scales.values != 0, 1 / scales.values, 0.0)
    codes = ((groups + offsets[..., None]) * inverse[..., None]).round_().clamp_(0, most).to(torch.uint8)
    per_half = SUPER_GROUP // GROUP if its.sub_group else 1
    has_meaning = is_finite.view(len(rows), -1, per_half).all(2)
    halves = torch.where(has_meaning, scales.halves, torch.nan)
    if others is None:
        return CodedWeight(its, rows.dtype, codes.flatten(1), halves, sub_scales=scales.integers)
    return CodedWeight(its, rows.dtype, codes.flatten(1), halves, others.halves, scales.integers, others.integers)


def _scales(groups: Tensor, squares: Tensor | None, its: CodeFormat) -> Tensor:
    """Return scales [rows, groups] of groups [rows, groups, size], whose codes are zero + w / scale.

    The largest weight is a code at its end or, with squares of inputs, somewhere near, where the weighted squared error
    is small: _Fit.ROUNDS regressions follow from each of _ZERO_STARTS, and one has the scale with the smallest error.
    Codes of 8 bits have those of `fitted_scales`.
    """
    largest, zero = largest_weights(groups), its.zero
    if squares is None:
        return largest / -zero
    if its.bits == 8:
        return fitted_scales(groups, shares_of(squares), its)
    weights = shares_of(squares).view(-1, groups.shape[2])
    best, best_gains = None, torch.zeros_like(largest)
    for start in _ZERO_STARTS:
        scales, gains = largest / -(zero + start), torch.zeros_like(largest)
        for _ in range(_Fit.ROUNDS):
            inverse = torch.where(scales.abs() > _TINY, 1 / scales, 0.0)
            codes = (groups * inverse[..., None]).clamp_(-zero, zero - 1).round_()
            weighted = codes * weights
            sum_qx, sum_qq = (_sums(its.permute(2, 0, 1)) for its in (weighted * groups, weighted * codes))
            is_new = sum_qq > _TINY
            scales = torch.where(is_new, sum_qx / sum_qq.clamp(min=_TINY), scales)
            gains = torch.where(is_new, scales * sum_qx, 0.0)
        best = scales if best is None else torch.where(gains > best_gains, scales, best)
        best_gains = torch.maximum(best_gains, gains)
    assert best is not None
    return best


class _Fit:
    """Scales and least values of groups [rows, groups, GROUP] with few errors, weighted by squares of inputs [in].

    Codes that are rounded determine both by the least weighted squares, a regression of two numbers, and these give
    codes anew. Each of STARTS is the range of the weights, with so many more steps than there are between codes, from
    which ROUNDS regressions follow; the best of them gets one more.
    """

    STARTS, ROUNDS = (1.0, 0.0, -1.0), 2

    def __init__(self, groups: Tensor, squares: Tensor, most: int) -> None:
        # The weights of a group lie apart from here on.
        self._groups, self._most = groups.permute(2, 0, 1).contiguous(), most
        self._weights = shares_of(squares).view(-1, GROUP).T.contiguous()[:, None]
        lowest = self._groups.amin(0)
        span, self._above = self._groups.amax(0) - lowest, self._groups - lowest
        weighted = self._weights * self._above
        self._sums = _sums(self._weights), _sums(weighted), _sums(weighted.mul_(self._above))
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for start in self.STARTS:
            steps = most + start
            line = span / steps, span * (start / (2 * steps)), span
            for _ in range(self.ROUNDS):
                line = self._regressed(*line[:2])
            if best is not None:
                is_better = line[2] < best[2]
                line = tuple(torch.where(is_better, *pair) for pair in zip(line, best, strict=True))  # type: ignore
            best = line
        assert best is not None
        self._scales, leasts, _ = self._regressed(*best[:2])
        self.leasts = lowest + leasts
        """fp32 [rows, groups]."""

    def _regressed(self, scales: Tensor, leasts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scales, least values above the lowest weights, and errors, all by the codes that these two give."""
        sum_w, sum_x, sum_xx = self._sums
        codes = self._codes(self._above - leasts, scales)
        weighted = codes * self._weights
        sum_q, sum_qx, sum_qq = _sums(weighted), _sums(weighted * self._above), _sums(weighted.mul_(codes))
        spread = sum_w * sum_qq - sum_q * sum_q
        is_new = spread > _TINY
        divisor = torch.where(is_new, spread, 1.0)
        slopes = ((sum_w * sum_qx - sum_q * sum_x) / divisor).clamp_(min=0)
        others = (sum_qq * sum_x - sum_q * sum_qx) / divisor
        errors = (sum_xx - slopes * sum_qx) - others * sum_x
        return tuple(torch.where(is_new, *its) for its in ((slopes, scales), (others, leasts), (errors, sum_xx)))  # type: ignore

    def scales_above(self, leasts: Tensor) -> Tensor:
        """Return the scales that go with these least values, fp32 [rows, groups]."""
        above = self._groups - leasts
        codes = self._codes(above.clone(), self._scales)
        weighted = codes * self._weights
        sum_qx, sum_qq = _sums(above.mul_(weighted)), _sums(weighted.mul_(codes))
        best = (sum_qx / sum_qq.clamp(min=_TINY)).clamp_(min=0)
        return torch.where(sum_qq > _TINY, best, self._scales)

    def _codes(self, above: Tensor, scales: Tensor) -> Tensor:
        """Return the codes of weights above least values, in their place."""
        inverse = torch.where(scales > _TINY, 1 / scales, 0.0)
        return above.mul_(inverse).round_().clamp_(0, self._most)


def _sums(groups: Tensor) -> Tensor:
    """Return the sums of groups [GROUP, ...], in ascending order."""
    total = torch.zeros_like(groups[0])
    for part in groups:
        total = total + part
    return total


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers of groups: in fp16, or integers, int8 [rows, groups], times numbers in fp16 of super groups."""

    values: Tensor
    """fp32 [rows, groups], as they are rounded."""
    halves: Tensor
    integers: Tensor | None = None

    @classmethod
    def of(cls, exact: Tensor, its: CodeFormat) -> _Numbers:
        """Round numbers, fp32 [rows, groups]."""
        if not its.sub_group:
            halves = _halves(exact)
            return cls(halves.float(), halves)
        supers = exact.view(len(exact), -1, SUPER_GROUP // its.sub_group)
        halves = _halves(supers.abs().amax(2) / _LARGEST)
        units = halves.float()[..., None]
        integers = (supers / torch.where(units > 0, units, 1.0)).round_().clamp_(-_LARGEST, _LARGEST)
        return cls((integers * units).flatten(1), halves, integers.to(torch.int8).flatten(1))

    def without(self, where: Tensor) -> _Numbers:
        """Return these numbers with zeros at some groups, bool [rows, groups]."""
        values = self.values.masked_fill(where, 0.0)
        if self.integers is None:
            return _Numbers(values, self.halves.masked_fill(where, 0.0))
        return _Numbers(values, self.halves, self.integers.masked_fill(where, 0))


def _halves(values: Tensor) -> Tensor:
    return (values.clamp(-_MAX_HALF, _MAX_HALF) + 0.0).half()  # no -0, but for what is too small
