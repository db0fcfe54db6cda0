"""MLX: codes of 4 or 8 bits, with a scale and a bias for a group of inputs.

Of a linear or an embedding X: X.weight, uint32 [out, in * bits / 32], the first input in the lowest bits; X.scales and
X.biases [out, groups]. A weight is scale * code + bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from gptserve.weights.quantized.codes import Bits, codes_of, of_inputs, read_bits, read_choice, require_matrix
from gptserve.weights.quantized.integers import coded_weight, has_whole_groups
from gptserve.weights.quantized.stored_type import FLOATS, Expected, Found
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_TYPES = 16
"""Far more than any file has of bits and group sizes."""


@dataclass(frozen=True, slots=True)
class Mlx:
    """The StoredType, and CodedType."""

    bits: Bits
    group_size: int
    name: str = "MLX's type"

    def holds(self, found: Found) -> bool:
        return "scales" in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num_out, num_in = require_matrix(shape, (1, self.group_size))
        groups = Expected((num_out, num_in // self.group_size), FLOATS)
        return {"weight": Expected((num_out, num_in * self.bits // 32), ("U32",)), "scales": groups, "biases": groups}

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        import torch

        codes = codes_of(tensors["weight"][rows].view(torch.int32), self.bits)
        scales, biases = (
            of_inputs(tensors[name][rows].float(), shape[1], self.group_size) for name in ("scales", "biases")
        )
        return scales * codes + biases

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        if not has_whole_groups(shape[1], self.group_size):
            return None
        fits = tensors["scales"].has_halves() and tensors["biases"].has_halves()
        return CodeFormat(self.bits, "scales and leasts") if fits else None

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        import torch

        codes = codes_of(tensors["weight"][rows].view(torch.int32), self.bits)
        its = CodeFormat(self.bits, "scales and leasts")
        return coded_weight(its, dtype, codes, tensors["scales"][rows], tensors["biases"][rows], self.group_size)


def read_mlx(section: RawConfig) -> tuple[Mlx, ...]:
    """Return the types. The section has an object for each module that has other bits or groups."""
    modules = [section.section(name) for name in section.names() if isinstance(section.value(name), dict)]
    found = tuple(dict.fromkeys(map(_read, [section, *modules])))
    if len(found) > MAX_TYPES:
        raise UnsupportedModelError(f"{section.file_name} must have at most {MAX_TYPES} bits and group sizes")
    return found


def _read(section: RawConfig) -> Mlx:
    """Return the type of most modules, or of one."""
    read_choice(section, "mode", ("affine",), "affine")
    return Mlx(read_bits(section, "bits"), section.size("group_size"))
