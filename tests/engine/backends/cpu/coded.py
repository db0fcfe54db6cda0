"""Products with codes in groups by torch, which define what csrc/groups_kernel.h computes, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.engine.backends.cpu.int8 import FORMAT, add_remainders, quantize_rows
from gptserve.weights.quantized.coded import GROUP, IQ4_VALUES, CodedWeight, CodeFormat, empty_codes


def random_weight(its: CodeFormat, num_out: int, num_in: int, dtype: torch.dtype = torch.float32) -> CodedWeight:
    """Return a weight of random numbers; some scales are 0, subnormal or large."""
    weight = empty_codes(its, (num_out, num_in), dtype)
    weight.codes.random_(0, 1 << its.bits)
    scales = torch.randn(weight.scales.shape) / (1 << its.bits)
    scales.view(-1)[::7] = 0
    scales.view(-1)[::11] *= 1e-4
    scales.view(-1)[::13] *= 1e4
    weight.scales.copy_(scales)
    if its.kind == "scales and leasts":
        assert weight.others is not None
        weight.others.copy_(torch.randn_like(scales) / 2)
    elif its.kind == "scales and zeros":
        assert weight.others is not None
        weight.others.copy_(torch.randint_like(scales, 0, 1 << its.bits))
    if weight.sub_scales is not None:
        weight.sub_scales.random_(-128, 128)
    if weight.sub_leasts is not None:
        weight.sub_leasts.random_(0, 64)
    return weight


def product(x: Tensor, weight: CodedWeight) -> Tensor:
    """Return the fp32 products [rows, out] of fp32 rows: group after group, without fused multiply-adds."""
    its_format, (codes, _, scales) = weight.format, quantize_rows(x)
    num_groups = scales.shape[1]
    zero, of_weights = its_format.zero if its_format.kind == "scales" else 0, weight.codes.float()
    if its_format.has_table:
        zero, of_weights = 0, torch.tensor(IQ4_VALUES, dtype=torch.float32)[weight.codes.long()]
    of_weights = (of_weights - zero).unflatten(1, (num_groups, GROUP))
    factors = weight.scales.float().repeat_interleave(num_groups // weight.scales.shape[1], 1)
    if its_format.sub_group == 16:
        assert weight.sub_scales is not None
        of_weights = of_weights * weight.sub_scales.float().view(-1, num_groups, 2).repeat_interleave(16, 2)
    elif weight.sub_scales is not None:
        factors = factors * weight.sub_scales.float()
    others = None
    if weight.others is not None:
        others = weight.others.float().repeat_interleave(num_groups // weight.others.shape[1], 1)
        others = others if weight.sub_leasts is None else others * weight.sub_leasts.float()
    y = torch.zeros(len(x), len(weight.codes))
    for g in range(num_groups):
        sums, its = codes[:, g].sum(1, keepdim=True), scales[:, g, None]
        whole = codes[:, g] @ of_weights[:, g].T  # integers below 2^24
        if its_format.kind == "scales and zeros":
            assert others is not None
            whole -= others[:, g] * sums
        y = y + whole * (its * factors[:, g])
        if its_format.kind == "scales and leasts":
            assert others is not None
            y = y + others[:, g] * (sums * its)
    if its_format == FORMAT:
        add_remainders(y, x, of_weights, factors)
    return y
