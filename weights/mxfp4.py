"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

gpt-oss stores a tensor [..., in, out] as two: NAME_blocks, uint8 [..., out, in / 32, 16], two values a byte, the lower
half first, and NAME_scales, uint8 [..., out, in / 32], the exponents plus 127. Called by the checkpoint only.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUFFIXES = ("_blocks", "_scales")
GROUP = 32
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of blocks and scales for a tensor of this shape [..., in, out]."""
    *outer, num_in, num_out = shape
    scales = (*outer, num_out, num_in // GROUP)
    return (*scales, GROUP // 2), scales


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor [..., in, out]; exact in fp32 and bf16."""
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2).to(torch.int32)
    grouped = torch.ldexp(values[halves], scales.to(torch.int32)[..., None] - _EXPONENT_BIAS)
    return grouped.flatten(-2).to(dtype).mT
