"""Tensors of a GGUF file: floats, or blocks of codes with scales, in llama.cpp's order of rows.

Some architectures have the rows of queries and keys in another order than the checkpoint that they were made from, and
norms with one added (llama.cpp's conversion/llama.py and conversion/gemma.py); both are undone. gguf/architectures.py
says of whose, and gguf/folder.py writes the section of config.json that is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.gguf.block_sizes import BLOCKS, FLOATS
from gptserve.weights.quantized.stored_type import Expected, Found
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gguf:
    """The StoredType of weights of one type of tensor, whose names have a part with this ending.

    num_heads is above 0 where the rows of each head are pairs of neighbours, and are to be halves apart. `offset` is
    what was added to the values.
    """

    type_name: str
    ending: str = ""
    num_heads: int = 0
    offset: float = 0.0

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"GGUF's {self.type_name}"

    def holds(self, found: Found) -> bool:
        if found.own not in found or found[found.own].dtype != self.type_name:
            return False
        return any(part.endswith(self.ending) for part in found.base.split("."))

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        return {found.own: Expected(shape, (self.type_name,))}

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        import torch

        from gptserve.weights.gguf.blocks import UNPACK

        (data,) = tensors.values()
        if self.num_heads:
            half = shape[0] // self.num_heads // 2
            row = torch.arange(rows.start, rows.stop)
            head, place = row // (2 * half), row % (2 * half)
            data = data[head * 2 * half + place % half * 2 + place // half]
        else:
            data = data[rows]
        if self.type_name in FLOATS:
            values = data.float()
        else:
            values = UNPACK[self.type_name](data.reshape(-1, BLOCKS[self.type_name].num_bytes)).view(-1, *shape[1:])
        return values - self.offset if self.offset else values


def read_gguf(section: RawConfig) -> tuple[Gguf, ...]:
    """Return the types of all tensors: those of queries, keys and norms first, if theirs differ."""
    heads = {name: section.size(f"paired_{name}_heads", default=0) for name in ("q_proj", "k_proj")}
    offset = 1.0 if section.boolean("norms_have_one_added", default=False) else 0.0
    names = section.value("types")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in BLOCKS for name in names):
        raise section.error("types", f"a list of {', '.join(BLOCKS)}")
    special = [Gguf(name, ending, num) for ending, num in heads.items() if num for name in names]
    special += [Gguf(name, "norm", offset=offset) for name in names if name in FLOATS and offset]
    return (*special, *(Gguf(name) for name in names))
