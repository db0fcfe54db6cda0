"""Tensors of a GGUF file: floats, or blocks of codes with scales, in llama.cpp's order of rows.

Some architectures have the rows of queries and keys in another order than the checkpoint that they were made from,
norms with one added, or powers of numbers (llama.cpp's conversion/llama.py, gemma.py and qwen.py); all are undone.
gguf/architectures.py says of whose, and gguf/folder.py writes the section of config.json that is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from gptserve.weights.gguf.block_sizes import BLOCKS, FLOATS
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from gptserve.weights.quantized.stored_type import Expected, Found, UnfitError
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CODE_FORMATS: Mapping[str, CodeFormat] = {
    "Q4_0": CodeFormat(4, "scales"),
    "Q4_1": CodeFormat(4, "scales and leasts"),
    "Q5_0": CodeFormat(5, "scales"),
    "Q5_1": CodeFormat(5, "scales and leasts"),
    "Q8_0": CodeFormat(8, "scales"),
    "Q4_K": CodeFormat(4, "scales and leasts", 32),
    "Q5_K": CodeFormat(5, "scales and leasts", 32),
    "Q6_K": CodeFormat(6, "scales", 16),
    "IQ4_NL": CodeFormat(4, "scales", has_table=True),
    "IQ4_XS": CodeFormat(4, "scales", 32, has_table=True),
}
"""The types whose weights are codes in groups."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """The StoredType, and CodedType, of weights of one type of tensor, whose names have a part with this ending.

    `num_heads` is above 0 where rows are in another order: those of each head in pairs of neighbours, to be halves
    apart; or, with `num_kv_heads`, all queries, then all keys, then all values, to be one key head after another, each
    behind its queries. `offset` is what was added to the values. `is_power`: they are minus e to the power of what they
    were.
    """

    type_name: str
    ending: str = ""
    num_heads: int = 0
    num_kv_heads: int = 0
    offset: float = 0.0
    is_power: bool = False

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"GGUF's {self.type_name}"

    def holds(self, found: Found) -> bool:
        its = found.files.get(found.base + found.own)
        if its is None or its.dtype != self.type_name:
            return False
        return any(part.endswith(self.ending) for part in found.base.split(".")) and (
            not self.offset or found.own != ""
        )

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        num = self.num_heads + 2 * self.num_kv_heads
        if num and (shape[0] % num or (self.num_kv_heads and self.num_heads % self.num_kv_heads)):
            raise UnfitError(f"has rows of {num} heads")
        return {found.own: Expected(shape, (self.type_name,))}

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        (data,) = tensors.values()
        places = self._stored(shape[0], rows)
        if len(shape) == 1 and self.type_name not in FLOATS:  # elements share blocks
            values = _values(self.type_name, data[None], (1, *shape))[0, places]
        else:
            values = _values(self.type_name, data[places], shape)
        if self.is_power:
            if not bool((values <= 0).all()):
                raise UnfitError("must have no number above 0")
            return (-values).log()
        return values - self.offset if self.offset else values

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        return None if self.offset or len(shape) != 2 else CODE_FORMATS.get(self.type_name)

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        (stored,) = tensors.values()
        return coded_blocks(self.type_name, stored[self._stored(shape[0], rows)], dtype)

    def _stored(self, num_rows: int, rows: slice) -> Tensor | slice:
        """Return the same, without a copy of rows where they are in order."""
        return self.places(num_rows, rows) if self.num_heads else rows

    def places(self, num_rows: int, rows: slice) -> Tensor:
        """Return where these of so many rows are stored, int64."""
        import torch

        row = torch.arange(rows.start, rows.stop)
        if not self.num_heads:
            return row
        size = num_rows // (self.num_heads + 2 * self.num_kv_heads)
        head, place = row // size, row % size
        if self.num_kv_heads:
            num = self.num_heads // self.num_kv_heads  # queries of a group
            group, number = head // (num + 2), head % (num + 2)
            of_keys = self.num_heads + (number - num) * self.num_kv_heads + group
            return torch.where(number < num, group * num + number, of_keys) * size + place
        half = size // 2
        return head * size + place % half * 2 + place // half


HALVES = (("even", "odd"), ("first", "last"))
"""The endings of two tensors with the rows of one: in turn, or the one half behind the other."""


@dataclass(frozen=True, slots=True)
class GgufHalves:
    """The StoredType of a weight whose rows are in two tensors, of these types and with these endings of HALVES."""

    type_names: tuple[str, str]
    endings: tuple[str, str]

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"GGUF's {' and '.join(dict.fromkeys(self.type_names))}"

    def holds(self, found: Found) -> bool:
        if f"{found.own}.{self.endings[0]}" not in found:  # soon, as of most weights all these types are asked
            return False
        names = [f"{found.own}.{ending}" for ending in self.endings]
        return tuple(found[name].dtype for name in names if name in found) == self.type_names

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        at = len(shape) - 1 if found.base.endswith("bias") else len(shape) - 2
        its_shape = (*shape[:at], shape[at] // 2, *shape[at + 1 :])
        return {
            f"{found.own}.{ending}": Expected(its_shape, (its,))
            for ending, its in zip(self.endings, self.type_names, strict=True)
        }

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        import torch

        row, half = torch.arange(rows.start, rows.stop), shape[0] // 2
        which, place = (row % 2, row // 2) if self.endings == HALVES[0] else (row // half, row % half)
        values = torch.empty(len(row), *shape[1:])
        for i, (type_name, data) in enumerate(zip(self.type_names, tensors.values(), strict=True)):
            if (places := place[which == i]).numel():
                values[which == i] = _values(type_name, data[places], shape)
        return values


def _values(type_name: str, data: Tensor, shape: Shape) -> Tensor:
    """Return rows of a tensor of this shape in fp32."""
    import torch

    from gptserve.weights.gguf.blocks import UNPACK

    if type_name in FLOATS:
        return data.float()
    if type_name in CODE_FORMATS:
        return coded_blocks(type_name, data.flatten(1), torch.float32).values(slice(None)).view(-1, *shape[1:])
    return UNPACK[type_name](data.reshape(-1, BLOCKS[type_name].num_bytes)).view(-1, *shape[1:])


def coded_blocks(type_name: str, data: Tensor, dtype: torch.dtype) -> CodedWeight:
    """Return rows of blocks [rows, bytes] as codes."""
    from gptserve.weights.gguf.codes import CODES

    its = CODES[type_name](data.reshape(-1, BLOCKS[type_name].num_bytes))
    codes, scales, *others = (None if part is None else part.reshape(len(data), -1) for part in its)
    assert codes is not None
    assert scales is not None
    return CodedWeight(CODE_FORMATS[type_name], dtype, codes, scales, *others)


def read_gguf(section: RawConfig) -> tuple[Gguf | GgufHalves, ...]:
    """Return the types of all tensors: those of queries, keys and norms first, if theirs differ."""
    heads = {name: section.size(f"paired_{name}_heads", default=0) for name in ("q_proj", "k_proj")}
    joined = section.size("joined_heads", default=0), section.size("joined_kv_heads", default=0)
    offset = 1.0 if section.boolean("norms_have_one_added", default=False) else 0.0
    has_decays = section.boolean("has_decays", default=False)
    names = section.value("types")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in BLOCKS for name in names):
        raise section.error("types", f"a list of {', '.join(BLOCKS)}")
    special = [Gguf(name, ending, num) for ending, num in heads.items() if num for name in names]
    special += [Gguf(name, "query_key_value", *joined) for name in names if all(joined)]
    floats = [name for name in names if name in FLOATS]
    special += [Gguf(name, "A_log", is_power=True) for name in floats if has_decays]
    special += [Gguf(name, "linear_attn") for name in floats if has_decays]
    special += [Gguf(name, "norm", offset=offset) for name in floats if offset]
    halves = [GgufHalves((a, b), endings) for endings in HALVES for a, b in product(names, names)]
    return (*special, *(Gguf(name) for name in names), *halves)
