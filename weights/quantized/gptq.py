"""GPTQ: codes of 4 or 8 bits, with a scale and a zero for a group of inputs (Frantar et al. 2022).

Of a linear X, packed along its inputs: X.qweight, int32 [in * bits / 32, out]; X.qzeros, int32 [groups, out * bits /
32], packed along outputs; X.scales [groups, out]; X.g_idx, int32 [in], the group of each input, which is no ramp where
act-order (desc_act) took the inputs in another order. A weight is scale * (code - zero). The layout "gptq" has words of
zeros less 1 each, so one of 0 borrows from the next; "gptq_v2" has them as they are.
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

MAX_RULES = 64
"""Far more than any file has for modules that have other bits or groups than most."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """The StoredType, and CodedType. zero_offset is added to the zeros of the files, all of a word at once."""

    bits: Bits
    group_size: int | None
    zero_offset: int
    name: str = "GPTQ"

    def holds(self, found: Found) -> bool:
        return "qweight" in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        per_word = 32 // self.bits
        num_out, num_in = require_matrix(shape, (per_word, per_word))
        groups = num_groups(num_in, self.group_size)
        tensors = {
            "qweight": Expected((num_in // per_word, num_out), ("I32",)),
            "qzeros": Expected((groups, num_out // per_word), ("I32",)),
            "scales": Expected((groups, num_out), FLOATS),
        }
        return tensors | ({"g_idx": Expected((num_in,), ("I32",))} if "g_idx" in found else {})

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        codes, zeros = self._codes(tensors, rows)
        scales = tensors["scales"][:, rows].float()
        groups = shape[1], self.group_size, tensors.get("g_idx")
        return of_inputs(scales.t(), *groups) * (codes - of_inputs(zeros, *groups))

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        if not has_whole_groups(shape[1], self.group_size, tensors.get("g_idx")):
            return None
        return format_of(self.bits, tensors["scales"], tensors["qzeros"], (1 << self.bits - 1) - self.zero_offset)

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        codes, zeros = self._codes(tensors, rows)
        its = CodeFormat(self.bits, "scales and zeros")
        return coded_weight(its, dtype, codes, tensors["scales"][:, rows].t(), zeros, self.group_size)

    def _codes(self, tensors: Mapping[str, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
        """Return the codes [rows, in] and the zeros [rows, groups], int32."""
        codes = codes_of(tensors["qweight"][:, rows].t(), self.bits)
        words = slice(rows.start * self.bits // 32, rows.stop * self.bits // 32)
        ones = 0xFFFFFFFF // ((1 << self.bits) - 1)  # 1 in each code of a word
        return codes, codes_of(tensors["qzeros"][:, words] + self.zero_offset * ones, self.bits).t()


def read_gptq(section: RawConfig) -> tuple[Gptq, ...]:
    """Return the types: `dynamic` gives some modules other bits or groups."""
    layout = read_choice(section, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    offset = 1 if layout == "gptq" else 0
    first = Gptq(read_bits(section, "bits"), read_group_size(section, "group_size"), offset)
    types, rules = [first], section.section("dynamic")
    if len(rules.names()) > MAX_RULES:
        raise section.error("dynamic", f"at most {MAX_RULES} rules")
    for pattern in rules.names():
        if not pattern.startswith("-"):  # which are not quantized
            rule = rules.section(pattern)
            size = read_group_size(rule, "group_size") if "group_size" in rule else first.group_size
            types.append(Gptq(read_bits(rule, "bits", first.bits), size, offset))
    return tuple(dict.fromkeys(types))
