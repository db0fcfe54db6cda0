"""Weights as codes in groups: what many stored types are, and what a CPU multiplies with as it is.

A code is an unsigned number of 4, 5, 6 or 8 bits, or the place of a value in IQ4_VALUES. GROUP of them, along the
inputs, share numbers in fp16. A weight is, by its kind,
  scales             scale * (code - zero), with the zero 2^(bits - 1) for all
  scales and leasts  scale * code + least
  scales and zeros   scale * (code - zero)
With sub-scales SUPER_GROUP codes share the numbers in fp16 instead, and integers multiply these: one for the scale of
each 16 or 32 codes, and one for the least value of each GROUP.
Importing this does not import torch. checkpoint.py reads such weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeGuard

from gptserve.weights.quantized.stored_type import StoredType
from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptserve.weights.quantized.blocked import BlockedWeight

GROUP = 32
"""Codes that share a scale. Stored types with larger groups repeat theirs."""
SUPER_GROUP = 256
"""Codes whose scales are integers times one number."""
JOINED_ROWS = 32
"""Rows of other formats begin at a multiple of this many."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What codes with a table mean."""

Kind = Literal["scales", "scales and leasts", "scales and zeros"]


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """What the numbers of a weight are."""

    bits: Literal[4, 5, 6, 8]
    kind: Kind
    sub_group: Literal[0, 16, 32] = 0
    """Codes that share a sub-scale; 0: there are none."""
    has_table: bool = False

    @property
    def name(self) -> str:
        """What a report calls it."""
        return codes_name([self.bits])

    @property
    def zero(self) -> int:
        """The zero of all codes, of the kind that has one."""
        return 1 << self.bits - 1

    def num_bytes(self, shape: Shape) -> int:
        """Return the bytes that a weight [out, in] takes in memory."""
        num_out, num_in = shape[0], -(-shape[1] // GROUP) * GROUP
        halves = num_in // (SUPER_GROUP if self.sub_group else GROUP) * (1 if self.kind == "scales" else 2)
        integers = num_in // self.sub_group if self.sub_group else 0
        if self.sub_group and self.kind == "scales and leasts":
            integers += num_in // GROUP
        return num_out * (num_in * self.bits // 8 + 2 * halves + integers)


@dataclass(frozen=True, slots=True)
class JoinedFormat:
    """The formats of a weight whose rows have several: so many rows, and their format, in ascending order."""

    parts: tuple[tuple[int, CodeFormat], ...]

    @property
    def name(self) -> str:
        """What a report calls it."""
        return codes_name(its.bits for _, its in self.parts)

    def num_bytes(self, shape: Shape) -> int:
        """Return the bytes that a weight [out, in] takes in memory."""
        return sum(its.num_bytes((num_rows, shape[1])) for num_rows, its in self.parts)


AnyFormat = CodeFormat | JoinedFormat
_NAME_END = "-bit codes"


def codes_name(bits: Iterable[int]) -> str:
    """Return what a report calls codes of so many bits each."""
    return "/".join(map(str, sorted(set(bits)))) + _NAME_END


def merged_names(names: Iterable[str]) -> list[str]:
    """Return the names of types, those of codes as one, which comes last."""
    others, bits = list[str](), set[int]()
    for name in names:
        if name.endswith(_NAME_END):
            bits |= set(map(int, name.removesuffix(_NAME_END).split("/")))
        else:
            others.append(name)
    return [*others, *([codes_name(bits)] if bits else [])]


def joined_format(parts: Sequence[tuple[int, CodeFormat | None]], *, in_order: bool) -> AnyFormat | None:
    """Return the format of a weight that is joined of so many rows of these each, and changes no number of them.

    None if there is none. `in_order` says that its rows are in the order of its parts.
    """
    merged = list[tuple[int, CodeFormat]]()
    for num_rows, its in parts:
        if its is None:
            return None
        before = merged.pop()[0] if merged and merged[-1][1] == its else 0
        merged.append((before + num_rows, its))
    if len(merged) == 1:
        return merged[0][1]
    common = common_format([its for _, its in merged])
    has_no_more_bits = common is not None and all(its.bits == common.bits for _, its in merged)
    if not has_no_more_bits and in_order and all(num_rows % JOINED_ROWS == 0 for num_rows, _ in merged[:-1]):
        return JoinedFormat(tuple(merged))
    return common


def common_format(formats: Sequence[CodeFormat]) -> CodeFormat | None:
    """Return the format in which rows of each of these keep their numbers, if there is one."""
    if len(set(formats)) == 1:
        return formats[0]
    kinds = {its.kind for its in formats} - {"scales"}
    if len(kinds) > 1 or any(its.sub_group or its.has_table for its in formats):
        return None
    return CodeFormat(max(its.bits for its in formats), kinds.pop() if kinds else "scales")


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in], or some of its rows: `codes`, uint8 [out, in], and `scales`, fp16 [out, in / GROUP].

    `others` has the least values or the zeros, alike; None for a kind without. With sub-scales the numbers in fp16 are
    [out, in / SUPER_GROUP], and there are `sub_scales`, int8 [out, in / sub_group] and, for least values, `sub_leasts`,
    int8 [out, in / GROUP]. `dtype` is that of computation.
    """

    format: CodeFormat
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    others: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_leasts: Tensor | None = None

    @property
    def shape(self) -> Shape:
        """[out, in]."""
        return tuple(self.codes.shape)

    @property
    def parts(self) -> tuple[CodedWeight, ...]:
        """Itself, as a JoinedWeight has several."""
        return (self,)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All its numbers, in the order of its members."""
        return self.codes, self.scales, self.others, self.sub_scales, self.sub_leasts

    def set_rows(self, rows: slice | Tensor, part: CodedWeight) -> None:
        """Set some rows to those of a weight, in whose place this one's format has the same numbers."""
        if self.format == part.format:
            for mine, its_own in zip(self.tensors, part.tensors, strict=True):
                if mine is not None:
                    assert its_own is not None
                    mine[rows] = its_own
            return
        its, shift = part.format, 0
        if self.format.kind == "scales":
            shift = self.format.zero - its.zero
        self.codes[rows] = part.codes + shift if shift else part.codes
        self.scales[rows] = part.scales
        if self.others is not None and part.others is not None:
            self.others[rows] = part.others
        elif self.others is not None:
            self.others[rows] = -its.zero * part.scales if self.format.kind == "scales and leasts" else its.zero

    def in_order(self, order: Tensor) -> CodedWeight:
        """Return the weight with its rows in another order."""
        return CodedWeight(self.format, self.dtype, *(its if its is None else its[order] for its in self.tensors))  # type: ignore[arg-type]

    def values(self, rows: slice) -> Tensor:
        """Return some rows of the weight in fp32."""
        scales = _multiplied(self.scales[rows], None if self.sub_scales is None else self.sub_scales[rows])
        codes = self.codes[rows].view(*scales.shape, -1)
        if self.format.has_table:
            values = self.scales.new_tensor(IQ4_VALUES, dtype=scales.dtype)[codes.long()]
            return (values * scales[..., None]).flatten(1)
        if self.others is None:
            return ((codes.float() - self.format.zero) * scales[..., None]).flatten(1)
        others = _multiplied(self.others[rows], None if self.sub_leasts is None else self.sub_leasts[rows])[..., None]
        if self.format.kind == "scales and leasts":
            return (codes.float() * scales[..., None] + others).flatten(1)
        return ((codes.float() - others) * scales[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """A weight [out, in] of rows in several formats: those of the first part, then those of the next."""

    parts: tuple[CodedWeight | BlockedWeight, ...]

    @property
    def shape(self) -> Shape:
        """[out, in]."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """That of computation."""
        return self.parts[0].dtype


def empty_codes(its: CodeFormat, shape: Shape, dtype: torch.dtype) -> CodedWeight:
    """Return a weight [out, in] whose numbers are to be set; its codes have memory of their own."""
    import torch

    from gptserve.weights.huge_pages import mapped

    num_out, num_in = shape
    scales = torch.empty(num_out, num_in // (SUPER_GROUP if its.sub_group else GROUP), dtype=torch.float16)
    others = None if its.kind == "scales" else torch.empty_like(scales)
    sub_scales = torch.empty(num_out, num_in // its.sub_group, dtype=torch.int8) if its.sub_group else None
    has_leasts = bool(its.sub_group) and its.kind == "scales and leasts"
    sub_leasts = torch.empty(num_out, num_in // GROUP, dtype=torch.int8) if has_leasts else None
    return CodedWeight(
        its, dtype, mapped(num_out * num_in).view(num_out, num_in), scales, others, sub_scales, sub_leasts
    )


def _multiplied(halves: Tensor, integers: Tensor | None) -> Tensor:
    """Return numbers of rows in fp32, times the integers that share them."""
    if integers is None:
        return halves.float()
    return (halves.float()[..., None] * integers.float().view(*halves.shape, -1)).flatten(1)


class CodedType(StoredType, Protocol):
    """A stored type whose weights may be codes in groups."""

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        """Return the format in which it gives a weight [out, in] as it is; None: such a one is unpacked."""

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        """Return rows of a weight that has a code_format; arguments and errors are those of `unpack`.

        Their kind may be "scales and zeros" with the zero that all have in the kind of the format.
        """


def gives_codes(stored: StoredType) -> TypeGuard[CodedType]:
    """Return whether it is a CodedType. isinstance() would look up each member, for each tensor of a model."""
    return hasattr(stored, "code_format")
