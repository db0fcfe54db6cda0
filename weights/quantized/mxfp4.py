"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

gpt-oss stores a tensor [..., in, out] as two. NAME_blocks, uint8 [..., out, in / 32, 16], has two values a byte, the
lower half first. NAME_scales, uint8 [..., out, in / 32], has the exponents plus 127. A GPU's kernel multiplies with
them as they are; selfcheck/operations.py compares that kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.quantized.stored_type import Expected, Found, UnfitError
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUFFIXES = ("_blocks", "_scales")
GROUP = 32

_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
"""The 4-bit floats by their codes."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The StoredType of gpt-oss's experts; a PackedType, too."""

    name: str = "MXFP4"

    def holds(self, found: Found) -> bool:
        return found.own not in found and found.own + SUFFIXES[0] in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        if len(shape) < 2 or shape[-1] % GROUP:
            raise UnfitError(f"takes a multiple of {GROUP} inputs")
        *outer, num_out, num_in = shape
        shapes = packed_shapes((*outer, num_in, num_out))
        endings = (found.own + suffix for suffix in SUFFIXES)
        return {ending: Expected(its_shape, ("U8",)) for ending, its_shape in zip(endings, shapes, strict=True)}

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        blocks, scales = tensors.values()
        return unpack(blocks[rows], scales[rows], dtype).mT

    def held_shapes(self, shape: Shape) -> dict[str, Shape] | None:
        shapes = held_shapes(shape)
        return None if shapes is None else dict(zip(("weight", "scales"), shapes, strict=True))

    def cut(self, tensors: Mapping[str, Tensor], start: int, end: int) -> tuple[Tensor, ...]:
        blocks, scales = tensors.values()
        return cut(blocks, scales, start, end)


MXFP4 = Mxfp4()


@dataclass(frozen=True, slots=True)
class CompressedMxfp4:
    """The StoredType of compressed-tensors: X.weight_packed, uint8 [out, in / 2], and X.weight_scale [out, in / 32]."""

    name: str = "MXFP4"

    def holds(self, found: Found) -> bool:
        return "weight_packed" in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        if len(shape) != 2 or shape[1] % GROUP:
            raise UnfitError(f"takes a multiple of {GROUP} inputs")
        num_out, num_in = shape
        packed, scales = (num_out, num_in // 2), (num_out, num_in // GROUP)
        return {"weight_packed": Expected(packed, ("U8",)), "weight_scale": Expected(scales, ("U8", "F8_E8M0"))}

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        import torch

        blocks, scales = tensors["weight_packed"][rows], tensors["weight_scale"][rows]
        return unpack(blocks.reshape(*scales.shape, GROUP // 2), scales.view(torch.uint8), dtype).mT


def read_mxfp4(section: RawConfig) -> tuple[Mxfp4]:
    """Return the type; nothing of it is left to choose."""
    return (MXFP4,)


def packed_shapes(shape: Shape, group: int = GROUP) -> tuple[Shape, Shape]:
    """Return the shapes of blocks and scales for a tensor of this shape [..., in, out]."""
    *outer, num_in, num_out = shape
    scales = (*outer, num_out, num_in // group)
    return (*scales, group // 2), scales


def held_shapes(shape: Shape) -> tuple[Shape, Shape] | None:
    """Return the shapes of blocks and scales on a device for a weight of this shape [out, in].

    The inputs of a rank may begin and end within a group; then smaller groups have a scale each. None if they may do so
    within a byte, too.
    """
    group = math.gcd(GROUP, shape[1])
    return None if group == 1 else packed_shapes(shape[::-1], group)


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor [..., in, out]; exact in fp32 and bf16. Groups may be smaller than 32."""
    import torch

    values = torch.tensor(E2M1)
    pair_of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).to(blocks.device, dtype)
    powers = torch.tensor([2.0 ** (exponent - _EXPONENT_BIAS) for exponent in range(256)])
    power_of_byte = powers.to(blocks.device, dtype)
    grouped = pair_of_byte[blocks.to(torch.int32)].flatten(-2)
    return (grouped * power_of_byte[scales.to(torch.int32)][..., None]).flatten(-2).mT


def cut(blocks: Tensor, scales: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the inputs [start, end) of all outputs, still packed, in groups of the size that `held_shapes` says.

    blocks is [out, in / 32, 16], scales [out, in / 32]. Smaller groups have copies of the scale.
    """
    group = math.gcd(GROUP, end - start)
    assert start % group == 0, "a rank's inputs begin after those of others, which are as many"
    span = slice(start // group, end // group)
    return blocks.reshape(len(blocks), -1, group // 2)[:, span], scales.repeat_interleave(GROUP // group, 1)[:, span]
