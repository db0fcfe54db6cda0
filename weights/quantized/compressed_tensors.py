"""compressed-tensors, the format of llm-compressor: codes of 4 or 8 bits in words, 8-bit integers, or 8-bit floats.

Of a linear X, whose X.weight_scale is one number, or [out, 1], or [out, groups], or of blocks:

- packed: X.weight_packed, int32 [out, in * bits / 32], and X.weight_shape. If not symmetric, X.weight_zero_point,
  int32 [out * bits / 32, groups], is packed along outputs. Half of the number of codes is added to both.
- int: X.weight, int8 [out, in]; if not symmetric, X.weight_zero_point, int8, of the shape of the scales.
- float: X.weight, e4m3 [out, in].
- 4-bit floats: nvfp4.py and mxfp4.py read them.

A weight is scale * (code - zero). X.weight_g_idx, int32 [in], has the group of each input where act-order took them in
another order. Activations are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from gptserve.weights.quantized.codes import (
    Bits,
    Block,
    block_shape,
    codes_of,
    num_groups,
    of_blocks,
    of_inputs,
    read_bits,
    read_block,
    read_choice,
    read_group_size,
    require_matrix,
    scalar_shape,
)
from gptserve.weights.quantized.integers import coded_weight, format_of, has_whole_groups
from gptserve.weights.quantized.mxfp4 import CompressedMxfp4
from gptserve.weights.quantized.nvfp4 import COMPRESSED_NVFP4
from gptserve.weights.quantized.stored_type import FLOATS, Expected, Found, StoredType
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP4_TYPES: Mapping[str, StoredType] = {
    "nvfp4-pack-quantized": COMPRESSED_NVFP4,
    "mxfp4-pack-quantized": CompressedMxfp4(),
}
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *FP4_TYPES)
MIXED = "mixed-precision"
"""A format whose groups say theirs."""
STRATEGIES = ("tensor", "channel", "group", "block")
KINDS = ("int", "float")
MAX_GROUPS = 64
"""Far more than any file has of modules that are quantized alike."""
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True, slots=True)
class Compressed:
    """The StoredType, and CodedType, of a group of modules. group_size and block are those of these two strategies."""

    kind: str
    bits: Bits
    strategy: str
    group_size: int | None = None
    block: Block | None = None
    name: str = "compressed-tensors"

    def holds(self, found: Found) -> bool:
        return "weight_packed" in found or "weight_scale" in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num_out, num_in = require_matrix(shape)
        scales = self._scale_shape(shape, found)
        zeros, dtypes = scales, ("I8",) if self.kind == "int" else ("F8_E4M3",)
        if "weight_packed" in found:
            per_word, dtypes = 32 // self.bits, ("I32",)
            zeros = (-(-num_out // per_word), scales[1]) if len(scales) == 2 else (1,)
            tensors = {"weight_packed": Expected((num_out, -(-num_in // per_word)), dtypes)}
            tensors["weight_shape"] = Expected((2,), ("I64", "I32"))
        else:
            tensors = {"weight": Expected(shape, dtypes)}
        tensors["weight_scale"] = Expected(scales, FLOATS)
        if "weight_zero_point" in found:
            tensors["weight_zero_point"] = Expected(zeros, dtypes)
        if "weight_g_idx" in found:
            tensors["weight_g_idx"] = Expected((num_in,), ("I32",))
        for name in (name for name in _OF_ACTIVATIONS if name in found):
            tensors[name] = Expected(scalar_shape(found, name), (*FLOATS, "I8", "F8_E4M3"))
        return tensors

    def _scale_shape(self, shape: Shape, found: Found) -> Shape:
        if self.strategy == "block":
            assert self.block is not None
            return block_shape(shape, self.block)
        if self.strategy == "tensor":
            return scalar_shape(found, "weight_scale")
        return shape[0], num_groups(shape[1], self.group_size)

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        codes = self._codes(shape, tensors, rows)
        scales = self._of_rows(tensors["weight_scale"], shape, tensors, rows).float()
        zeros = self._zeros(tensors, rows)
        if zeros is None:
            return codes * scales
        rows = slice(0, len(zeros))
        return (codes - self._of_rows(zeros, shape, tensors, rows).float()) * scales

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        zeros = tensors.get("weight_zero_point")
        is_odd = self.kind != "int" or self.strategy == "block" or (self.strategy == "tensor" and zeros is not None)
        if is_odd or not has_whole_groups(shape[1], self.group_size, tensors.get("weight_g_idx")):
            return None
        half = 1 << self.bits - 1
        return format_of(self.bits, tensors["weight_scale"], zeros, half if "weight_packed" in tensors else 0)

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        half, zeros = 1 << self.bits - 1, self._zeros(tensors, rows)
        scales = tensors["weight_scale"] if self.strategy == "tensor" else tensors["weight_scale"][rows]
        its = CodeFormat(self.bits, "scales" if zeros is None else "scales and zeros")
        zeros = None if zeros is None else zeros.int() + half
        return coded_weight(its, dtype, self._codes(shape, tensors, rows) + half, scales, zeros, self.group_size)

    def _zeros(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor | None:
        """Return the signed zeros of rows [rows, groups], or that of a tensor; None if all are 0."""
        zeros = tensors.get("weight_zero_point")
        if zeros is None or "weight_packed" not in tensors:
            return zeros if zeros is None or self.strategy in ("tensor", "block") else zeros[rows]
        per_word = 32 // self.bits
        words = zeros[rows.start // per_word : -(-rows.stop // per_word)]
        return codes_of(words.t(), self.bits).t()[: rows.stop - rows.start] - (1 << (self.bits - 1))

    def _codes(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return the signed codes of rows, fp32."""
        if "weight_packed" not in tensors:
            return tensors["weight"][rows].float()
        codes = codes_of(tensors["weight_packed"][rows], self.bits)[:, : shape[1]]
        return (codes - (1 << (self.bits - 1))).float()

    def _of_rows(self, values: Tensor, shape: Shape, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return what is to be multiplied with or subtracted from these rows, of values of the scales' shape."""
        if self.strategy == "tensor":
            return values
        if self.strategy == "block":
            assert self.block is not None
            return of_blocks(values, rows, shape[1], self.block)
        return of_inputs(values[rows], shape[1], self.group_size, tensors.get("weight_g_idx"))


def read_compressed(section: RawConfig) -> tuple[StoredType, ...]:
    """Return the types, one of each group of modules."""
    layout = read_choice(section, "format", (*FORMATS, MIXED))
    read_choice(section.section("sparsity_config"), "format", ("dense",), "dense")
    transforms = section.section("transform_config").section("config_groups")
    if transforms.names():
        raise UnsupportedModelError(f"{transforms.file_name} must be absent: transformed weights are not read")
    groups = section.section("config_groups")
    if not 0 < len(groups.names()) <= MAX_GROUPS:
        raise section.error("config_groups", f"1 to {MAX_GROUPS} groups")
    return tuple(dict.fromkeys(_read_group(groups.section(name), layout) for name in groups.names()))


def _read_group(group: RawConfig, layout: str) -> StoredType:
    """Return the type of a group of modules in this format, or in its own."""
    if "format" in group:
        layout = read_choice(group, "format", FORMATS)
    if layout in FP4_TYPES:
        return FP4_TYPES[layout]
    weights = group.section("weights")
    kind = read_choice(weights, "type", KINDS, "int")
    bits = read_bits(weights, "num_bits", choices=(4, 8) if kind == "int" else (8,))
    has_groups = "group_size" in weights and weights.value("group_size") != -1
    strategy = read_choice(weights, "strategy", STRATEGIES, "group" if has_groups else "tensor")
    if strategy == "group":
        return Compressed(kind, bits, strategy, group_size=read_group_size(weights, "group_size"))
    if strategy != "block":
        return Compressed(kind, bits, strategy)
    block = read_block(weights, "block_structure")
    if block is None:
        raise weights.error("block_structure", "two sizes above 0")
    return Compressed(kind, bits, strategy, block=block)
