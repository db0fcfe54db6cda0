"""AWQ: codes of 4 bits, with a scale and a zero for a group of inputs (Lin et al. 2023), in the layout "gemm".

Of a linear X, packed along its outputs: X.qweight, int32 [in, out / 8]; X.qzeros, int32 [groups, out / 8]; X.scales
[groups, out]. A weight is scale * (code - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from gptserve.weights.quantized.codes import (
    Bits,
    codes_of,
    num_groups,
    of_inputs,
    read_bits,
    read_choice,
    read_group_size,
    require_matrix,
)
from gptserve.weights.quantized.integers import coded_weight, format_of, has_whole_groups
from gptserve.weights.quantized.stored_type import FLOATS, Expected, Found
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS: Bits = 4
_PER_WORD = 32 // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of the outputs of a word, which has them as 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on."""


@dataclass(frozen=True, slots=True)
class Awq:
    """The StoredType, and CodedType."""

    group_size: int | None
    name: str = "AWQ"

    def holds(self, found: Found) -> bool:
        return "qweight" in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num_out, num_in = require_matrix(shape, (_PER_WORD, self.group_size or 1))
        groups = num_groups(num_in, self.group_size)
        return {
            "qweight": Expected((num_in, num_out // _PER_WORD), ("I32",)),
            "qzeros": Expected((groups, num_out // _PER_WORD), ("I32",)),
            "scales": Expected((groups, num_out), FLOATS),
        }

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        codes, zeros = _codes(tensors, rows)
        groups = shape[1], self.group_size
        return of_inputs(tensors["scales"][:, rows].t().float(), *groups) * (codes - of_inputs(zeros, *groups))

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        if not has_whole_groups(shape[1], self.group_size):
            return None
        return format_of(_BITS, tensors["scales"], tensors["qzeros"], 1 << _BITS - 1)

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        codes, zeros = _codes(tensors, rows)
        its = CodeFormat(_BITS, "scales and zeros")
        return coded_weight(its, dtype, codes, tensors["scales"][:, rows].t(), zeros, self.group_size)


def _codes(tensors: Mapping[str, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    """Return the codes [rows, in] and the zeros [rows, groups], int32."""
    words = slice(rows.start // _PER_WORD, rows.stop // _PER_WORD)
    codes, zeros = (
        codes_of(tensors[name][:, words], _BITS, _PLACES).t().contiguous() for name in ("qweight", "qzeros")
    )
    return codes, zeros


def read_awq(section: RawConfig) -> tuple[Awq, ...]:
    """Return the type; some files have other names for its settings."""
    read_bits(section, "bits" if "bits" in section else "w_bit", choices=(_BITS,))
    section.forbid("zero_point", True, "AWQ without zeros is not read")
    read_choice(section, "version", ("gemm",), "gemm")
    return (Awq(read_group_size(section, "group_size" if "group_size" in section else "q_group_size")),)
