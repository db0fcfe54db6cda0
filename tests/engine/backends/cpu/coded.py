"""Products with codes in groups by torch, which define what csrc/groups_kernel.h computes, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.weights.quantized.coded import GROUP, CodedWeight, CodeFormat

STEP = 127
"""The largest code of a row of x."""


def random_weight(its: CodeFormat, num_out: int, num_in: int, dtype: torch.dtype = torch.float32) -> CodedWeight:
    """Return a weight of random numbers; some scales are 0, subnormal or large."""
    codes = torch.randint(0, 1 << its.bits, (num_out, num_in), dtype=torch.uint8)
    scales = torch.randn(num_out, num_in // GROUP) / (1 << its.bits)
    scales.view(-1)[::7] = 0
    scales.view(-1)[::11] *= 1e-4
    scales.view(-1)[::13] *= 1e4
    others = None
    if its.kind == "scales and leasts":
        others = (torch.randn_like(scales) / 2).half()
    elif its.kind == "scales and zeros":
        others = torch.randint_like(scales, 0, 1 << its.bits).half()
    return CodedWeight(its, dtype, codes, scales.half(), others)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [rows, groups, GROUP] and scales [rows, groups] of fp32 rows; 0 and NaN if not finite."""
    groups = x.unflatten(1, (-1, GROUP))
    is_finite = groups.isfinite().all(2)
    bound = torch.where(is_finite, groups.abs().amax(2), 0.0).clamp(min=1e-30)
    codes = (groups * (torch.full_like(bound, STEP) / bound)[..., None]).round()
    return torch.where(is_finite[..., None], codes, 0.0), torch.where(is_finite, bound / STEP, torch.nan)


def product(x: Tensor, weight: CodedWeight) -> Tensor:
    """Return the fp32 products [rows, out] of fp32 rows: group after group, without fused multiply-adds."""
    codes, scales = quantize_rows(x)
    zero = weight.format.zero if weight.format.kind == "scales" else 0
    y = torch.zeros(len(x), len(weight.codes))
    for g in range(scales.shape[1]):
        of_x, of_weight = codes[:, g], weight.codes[:, g * GROUP : (g + 1) * GROUP].float()
        sums = of_x.sum(1, keepdim=True)
        whole = of_x @ of_weight.T - zero * sums  # integers below 2^24
        its, scale = scales[:, g, None], weight.scales[:, g].float()
        if weight.format.kind == "scales and zeros":
            assert weight.others is not None
            whole -= weight.others[:, g].float() * sums
        y = y + whole * (scale * its)
        if weight.format.kind == "scales and leasts":
            assert weight.others is not None
            y = y + weight.others[:, g].float() * (sums * its)
    return y
