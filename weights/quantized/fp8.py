"""FP8: 8-bit floats (e4m3, Micikevicius et al. 2022) with a scale for a block of a weight, or for all of it.

DeepSeek and Qwen have blocks of 128 by 128: X.weight, e4m3 [out, in], and X.weight_scale_inv [out / 128, in / 128],
rounded up. A weight is its 8-bit number times the scale, in spite of the name. Activations are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.quantized.codes import (
    Block,
    block_shape,
    of_blocks,
    read_block,
    read_choice,
    require_matrix,
    scalar_shape,
)
from gptserve.weights.quantized.stored_type import FLOATS, Expected, Found
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SCALES = ("weight_scale_inv", "weight_scale")
_NOT_USED = ("activation_scale", "input_scale", "k_scale", "v_scale")
"""Scales of activations and of a cache."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """The StoredType. Without a block a weight has one scale."""

    block: Block | None
    name: str = "FP8"

    def holds(self, found: Found) -> bool:
        return any(scale in found for scale in _SCALES)

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        require_matrix(shape)
        scale = next(scale for scale in _SCALES if scale in found)
        scales = scalar_shape(found, scale) if self.block is None else block_shape(shape, self.block)
        not_used = (name for name in _NOT_USED if name in found)
        return {
            "weight": Expected(shape, ("F8_E4M3",)),
            scale: Expected(scales, (*FLOATS, "F8_E8M0")),
            **{name: Expected(scalar_shape(found, name), FLOATS) for name in not_used},
        }

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        scales = next(tensors[scale] for scale in _SCALES if scale in tensors).float()
        of_rows = scales if self.block is None else of_blocks(scales, rows, shape[1], self.block)
        return tensors["weight"][rows].float() * of_rows


def read_fp8(section: RawConfig) -> tuple[Fp8, ...]:
    """Return the type."""
    read_choice(section, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return (Fp8(read_block(section, "weight_block_size")),)
