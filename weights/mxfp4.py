"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

gpt-oss stores a tensor [..., in, out] as two. NAME_blocks, uint8 [..., out, in / 32, 16], has two values a byte, the
lower half first. NAME_scales, uint8 [..., out, in / 32], has the exponents plus 127. Called by the checkpoint only.
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
    pair_of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).to(dtype)
    power_of_byte = torch.tensor([2.0 ** (exponent - _EXPONENT_BIAS) for exponent in range(256)]).to(dtype)
    grouped = pair_of_byte[blocks.to(torch.int32)].flatten(-2) * power_of_byte[scales.to(torch.int32)][..., None]
    return grouped.flatten(-2).mT
