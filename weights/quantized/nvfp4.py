"""NVFP4: 4-bit floats (e2m1) with an 8-bit scale (e4m3) for 16 inputs and one scale in fp32 for all of a weight.

Of a linear X, two numbers a byte, the first in the lower half: X.weight_packed, uint8 [out, in / 2], X.weight_scale
[out, in / 16], and X.weight_global_scale, by which compressed-tensors divides the scales. modelopt has X.weight,
X.weight_scale, and X.weight_scale_2, with which it multiplies them. Activations are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.quantized.codes import of_inputs, require_matrix, scalar_shape
from gptserve.weights.quantized.mxfp4 import E2M1
from gptserve.weights.quantized.stored_type import Expected, Found
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = 16
_NOT_USED = ("input_global_scale", "input_scale", "k_scale", "v_scale")
"""Scales of activations and of a cache."""


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """The StoredType, with its names of the packed weight and of the scale of all of it."""

    packed: str
    global_scale: str
    name: str = "NVFP4"

    def holds(self, found: Found) -> bool:
        return self.global_scale in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num_out, num_in = require_matrix(shape, (1, GROUP))
        return {
            self.packed: Expected((num_out, num_in // 2), ("U8",)),
            "weight_scale": Expected((num_out, num_in // GROUP), ("F8_E4M3",)),
            self.global_scale: Expected(scalar_shape(found, self.global_scale), ("F32",)),
            **{name: Expected(scalar_shape(found, name), ("F32", "BF16")) for name in _NOT_USED if name in found},
        }

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        packed, scales, of_all = (
            tensors[self.packed][rows],
            tensors["weight_scale"][rows].float(),
            tensors[self.global_scale],
        )
        pairs = scales.new_tensor([(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)])
        scales = scales / of_all if self == COMPRESSED_NVFP4 else scales * of_all
        return pairs[packed.int()].flatten(-2) * of_inputs(scales, shape[1], GROUP)


COMPRESSED_NVFP4 = Nvfp4("weight_packed", "weight_global_scale")
MODELOPT_NVFP4 = Nvfp4("weight", "weight_scale_2")
