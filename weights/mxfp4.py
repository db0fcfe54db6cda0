"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

gpt-oss stores a tensor [..., in, out] as two. NAME_blocks, uint8 [..., out, in / 32, 16], has two values a byte, the
lower half first. NAME_scales, uint8 [..., out, in / 32], has the exponents plus 127. The checkpoint unpacks them, or
gives them out as they are to a device whose kernel multiplies with them; selfcheck/operations.py compares that kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gptserve.weights.loading_threads import PIECE_ELEMENTS, map_pieces
from gptserve.weights.mxfp4_shapes import GROUP

_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor [..., in, out]; exact in fp32 and bf16. Groups may be smaller than 32."""
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    pair_of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).to(blocks.device, dtype)
    powers = torch.tensor([2.0 ** (exponent - _EXPONENT_BIAS) for exponent in range(256)])
    power_of_byte = powers.to(blocks.device, dtype)

    def unpack_rows(its_blocks: Tensor, its_scales: Tensor) -> Tensor:
        grouped = pair_of_byte[its_blocks.to(torch.int32)].flatten(-2)
        return (grouped * power_of_byte[its_scales.to(torch.int32)][..., None]).flatten(-2)

    num_rows = max(1, PIECE_ELEMENTS * len(blocks) // max(1, 2 * blocks.numel()))
    return torch.cat(list(map_pieces(unpack_rows, torch.split(blocks, num_rows), torch.split(scales, num_rows)))).mT


def cut(blocks: Tensor, scales: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the inputs [start, end) of all outputs, still packed, in groups of the size that `held_shapes` says.

    blocks is [out, in / 32, 16], scales [out, in / 32]. Smaller groups have copies of the scale.
    """
    group = math.gcd(GROUP, end - start)
    assert start % group == 0, "a rank's inputs begin after those of others, which are as many"
    span = slice(start // group, end // group)
    return blocks.reshape(len(blocks), -1, group // 2)[:, span], scales.repeat_interleave(GROUP // group, 1)[:, span]
