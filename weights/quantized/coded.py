"""Weights as codes in groups: what many stored types are, and what a CPU multiplies with as it is.

A code is an unsigned number of 4 or 8 bits. GROUP of them, along the inputs, share numbers in fp16. A weight
is, by its kind,
  scales             scale * (code - zero), with the zero 2^(bits - 1) for all
  scales and leasts  scale * code + least
  scales and zeros   scale * (code - zero)
Importing this does not import torch. checkpoint.py reads such weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from gptserve.weights.quantized.stored_type import StoredType
from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = 32
"""Codes that share a scale. Stored types with larger groups repeat theirs."""

Kind = Literal["scales", "scales and leasts", "scales and zeros"]


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """What the numbers of a weight are."""

    bits: Literal[4, 8]
    kind: Kind

    @property
    def name(self) -> str:
        """What a report calls it."""
        return f"codes of {self.bits} bits"

    @property
    def zero(self) -> int:
        """The zero of all codes, of the kind that has one."""
        return 1 << self.bits - 1

    def num_bytes(self, shape: Shape) -> int:
        """Return the bytes that a weight [out, in] takes in memory."""
        num_out, num_in = shape
        return num_out * (num_in * self.bits // 8 + num_in // GROUP * (2 if self.kind == "scales" else 4))


def joined_format(formats: Iterable[CodeFormat | None]) -> CodeFormat | None:
    """Return the format of a weight whose rows have these, which then changes none of them; None if there is none."""
    found = set(formats)
    kinds = {its.kind for its in found if its is not None} - {"scales"}
    if not found or None in found or len(kinds) > 1:
        return None
    bits: Literal[4, 8] = 8 if any(its is not None and its.bits == 8 for its in found) else 4
    return CodeFormat(bits, kinds.pop() if kinds else "scales")


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in], or some of its rows: `codes`, uint8 [out, in], and `scales`, fp16 [out, in / GROUP].

    `others` has the least values or the zeros, alike; None for a kind without. `dtype` is that of computation.
    """

    format: CodeFormat
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    others: Tensor | None = None

    @property
    def shape(self) -> Shape:
        """[out, in]."""
        return tuple(self.codes.shape)

    def set_rows(self, rows: slice | Tensor, part: CodedWeight) -> None:
        """Set some rows to those of a weight, in whose place this one's format has the same numbers."""
        its, shift = part.format, 0
        if self.format.kind == "scales":
            shift = self.format.zero - its.zero
        self.codes[rows] = part.codes + shift if shift else part.codes
        self.scales[rows] = part.scales
        if self.others is not None and part.others is not None:
            self.others[rows] = part.others
        elif self.others is not None:
            self.others[rows] = -its.zero * part.scales if self.format.kind == "scales and leasts" else its.zero

    def values(self, rows: slice) -> Tensor:
        """Return some rows of the weight in fp32."""
        scales = self.scales[rows].float()
        codes = self.codes[rows].float().view(*scales.shape, GROUP)
        others = None if self.others is None else self.others[rows, :, None].float()
        if others is not None and self.format.kind == "scales and leasts":
            values = codes * scales[..., None] + others
        else:
            values = (codes - (self.format.zero if others is None else others)) * scales[..., None]
        return values.flatten(1)


@runtime_checkable
class CodedType(StoredType, Protocol):
    """A stored type whose weights may be codes in groups."""

    def code_format(self, shape: Shape, tensors: Mapping[str, StoredTensor]) -> CodeFormat | None:
        """Return the format in which it gives a weight [out, in] as it is; None: such a one is unpacked."""

    def coded(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> CodedWeight:
        """Return rows of a weight that has a code_format; arguments and errors are those of `unpack`.

        Their kind may be "scales and zeros" with the zero that all have in the kind of the format.
        """
