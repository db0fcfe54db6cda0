"""A product in int10 by torch, which defines what engine/backends/cpu/csrc/int10_kernel.h computes, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu.int8 import DenseInt8Linear

ROW_STEP = 1023
"""The largest multiple of a row's scale, but for outliers."""
SEGMENT = 2048
"""So many elements of a row are summed as integers; these sums are added in fp32."""
MAX_FAR, FAR_SHARE = 64, 128
"""Outliers of a row: at most so many, and one element in so many."""
LEVEL_BITS, LEVELS = 20, 40
"""As in int8.py, but a row's bound is at most 5 octaves below its largest element, so that multiples have 16 bits."""


class DenseInt10Linear(DenseInt8Linear):
    """Its weights are multiples, -511 to 511, of the scales of outputs."""

    _WEIGHT_TYPE = "int10"

    def _sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole, scales = quantize_rows(x)
        sums = torch.zeros(len(x), len(self._values))
        pairs = (torch.split(t.double(), SEGMENT, dim=1) for t in (whole, self._values))
        for some, values in zip(*pairs, strict=True):
            sums += (some @ values.T).float()
        return sums, scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 multiples [rows, in] and scales [rows, 1] of fp32 rows; not finite ones have the scale NaN."""
    bits = x.abs().view(torch.int32)
    levels = functional.pad(bits >> LEVEL_BITS, (0, 1))
    descending = levels.sort(descending=True).values
    num_far = min(MAX_FAR, -(-x.shape[1] // FAR_SHARE))
    level = torch.maximum(descending[:, num_far : num_far + 1], descending[:, :1] - LEVELS)
    bound = ((level + 1) << LEVEL_BITS).to(torch.int32).view(torch.float32)
    is_finite = x.isfinite().all(1, keepdim=True) & bound.isfinite()
    bound = bound.clamp(min=1e-30)
    whole = torch.where(is_finite, x * (torch.full_like(bound, ROW_STEP) / bound), 0.0).round()
    return whole, torch.where(is_finite, bound / ROW_STEP, torch.nan)
