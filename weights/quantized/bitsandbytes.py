"""bitsandbytes: codes of 4 bits into a table of 16 floats (nf4, Dettmers et al. 2023, or fp4), or 8-bit integers.

In 4 bits a linear X has X.weight, uint8 [out * in / 2, 1], two codes a byte, the first in the upper half;
X.weight.quant_map [16]; X.weight.absmax, the factor of each block of numbers in the order of rows; and
X.weight.quant_state.bitsandbytes__nf4, a JSON text. absmax is fp32, or nested: uint8, codes into
X.weight.nested_quant_map [256] with factors of their own, X.weight.nested_absmax, plus an offset in the text.
In 8 bits it has X.weight, int8 [out, in], and X.SCB [out], 127 times the scale of an output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.errors import shown
from gptserve.weights.quantized.codes import read_choice, require_matrix
from gptserve.weights.quantized.stored_type import Expected, Found, StoredType, UnfitError
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 2**12
_BLOCK_SIZE = 64
"""Of all files. Rows from a multiple of 64 on begin with a block."""
_NESTED = 256
"""So many factors have one of their own."""
_PER_SCB = 1 / 127


@dataclass(frozen=True, slots=True)
class FourBits:
    """The StoredType of nf4 and fp4, whose tables the files have."""

    name: str = "bitsandbytes' 4 bits"

    def holds(self, found: Found) -> bool:
        return any(state in found for state in _STATES)

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num_out, num_in = require_matrix(shape)
        if num_out * num_in % 2:
            raise UnfitError("takes an even number of weights")
        state = next(state for state in _STATES if state in found)
        num_blocks = -(-num_out * num_in // _BLOCK_SIZE)
        length = math.prod(found[state].shape)
        if length > MAX_STATE_BYTES:
            raise UnfitError(f"takes a {state} of at most {MAX_STATE_BYTES} bytes")
        is_nested = "weight.nested_absmax" in found
        tensors = {
            "weight": Expected((num_out * num_in // 2, 1), ("U8",)),
            "weight.absmax": Expected((num_blocks,), ("U8",) if is_nested else ("F32",)),
            "weight.quant_map": Expected((16,), ("F32",)),
            state: Expected((length,), ("U8",)),
        }
        if is_nested:
            tensors["weight.nested_absmax"] = Expected((-(-num_blocks // _NESTED),), ("F32",))
            tensors["weight.nested_quant_map"] = Expected((256,), ("F32",))
        return tensors

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        num_in = shape[1]
        offset = _offset(next(tensors[state] for state in _STATES if state in tensors), shape)
        start, end = rows.start * num_in, rows.stop * num_in
        blocks = slice(start // _BLOCK_SIZE, -(-end // _BLOCK_SIZE))
        absmax = tensors["weight.absmax"][blocks]
        if "weight.nested_absmax" in tensors:
            nested = tensors["weight.nested_absmax"].repeat_interleave(_NESTED)[blocks]
            absmax = tensors["weight.nested_quant_map"][absmax.int()] * nested + offset
        table = tensors["weight.quant_map"].tolist()
        pairs = absmax.new_tensor([(table[byte // 16], table[byte % 16]) for byte in range(256)])
        numbers = pairs[tensors["weight"].flatten()[start // 2 : -(-end // 2)].int()].flatten()[: end - start]
        return (numbers * absmax.repeat_interleave(_BLOCK_SIZE)[: end - start]).reshape(-1, num_in)


@dataclass(frozen=True, slots=True)
class EightBits:
    """The StoredType of LLM.int8()."""

    name: str = "bitsandbytes' 8 bits"

    def holds(self, found: Found) -> bool:
        return "SCB" in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num_out, _ = require_matrix(shape)
        tensors = {"weight": Expected(shape, ("I8",)), "SCB": Expected((num_out,), ("F32",))}
        return tensors | ({"weight_format": Expected((), ("U8",))} if "weight_format" in found else {})

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        layout = tensors.get("weight_format")
        if layout is not None and int(layout) != 0:
            raise UnfitError(f"takes a weight_format of 0, rows, got {int(layout)}")
        return tensors["weight"][rows].float() * tensors["SCB"][rows, None] * _PER_SCB


def read_bitsandbytes(section: RawConfig) -> tuple[StoredType, ...]:
    """Return the types. What a file has, the names of its tensors show."""
    read_choice(section, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    return FourBits(), EightBits()


def _offset(state: Tensor, shape: Shape) -> float:
    """Return what is added to nested factors. Raises UnfitError for a text that does not say what is read here."""
    try:
        values = json.loads(bytes(state.tolist()))
    except (ValueError, RecursionError) as fault:
        raise UnfitError("takes a quant_state in JSON") from fault
    values = values if isinstance(values, dict) else {}
    expected = {"shape": list(shape), "blocksize": _BLOCK_SIZE, "nested_blocksize": _NESTED}
    for name, its in expected.items():
        value = values.get(name, its if name == "nested_blocksize" else None)
        if value != its:
            raise UnfitError(f"takes a quant_state with {name} {its}, got {shown(value)}")
    offset = values.get("nested_offset", 0.0)
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise UnfitError(f"takes a quant_state with a finite nested_offset, got {shown(offset)}")
    return offset
