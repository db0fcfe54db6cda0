"""A stored type: how the files hold the numbers of a weight. Its interface, and the type of plain floats.

A product computes with something else, in the dtype of computation or packed anew: the backends know nothing of this.
Importing these files does not import torch, as the server reads configurations, too. `__init__.py` lists the types.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOATS = ("BF16", "F16", "F32")

UNPACKED_ROWS = 64
"""`unpack` is asked for rows from a multiple of this on: types that pack outputs into words need not cut a word."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor of the files must be, to be a part of a weight."""

    shape: Shape
    dtypes: tuple[str, ...]


class UnfitError(ValueError):
    """A weight of this shape cannot have this type. The message goes on after "the type, which"."""


class StoredType(Protocol):
    """How the files hold a weight. `weight` is its name in them without a family's prefix; files are named alike."""

    @property
    def name(self) -> str:
        """What a message calls it."""

    def holds(self, weight: str, files: Collection[str]) -> bool:
        """Return whether the files have this weight in this type, as far as the names show."""

    def tensors(self, weight: str, shape: Shape, files: Mapping[str, StoredTensor]) -> dict[str, Expected]:
        """Return the tensors that hold a weight of this shape, [out, in] or [entries, out, in], by name.

        Where the type leaves a choice, such as the number of bits, what the files have decides. Raises UnfitError.
        """

    def unpack(self, shape: Shape, tensors: Sequence[Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        """Return these rows [rows, in] of a weight [out, in], in fp32 or in the dtype, which fp32 is then rounded to.

        The tensors are those of `tensors`, of one entry; rows start at a multiple of UNPACKED_ROWS.
        """


@runtime_checkable
class PackedType(StoredType, Protocol):
    """A stored type with which some backend can multiply as it is."""

    def held_shapes(self, shape: Shape) -> dict[str, Shape] | None:
        """Return the shapes of the tensors, uint8, that a device holds of a weight [out, in]; None: it is unpacked.

        They are named by the last part of a canonical name, "weight" first. Some of the inputs may be a rank's.
        """

    def cut(self, tensors: Sequence[Tensor], start: int, end: int) -> tuple[Tensor, ...]:
        """Return the inputs [start, end) of all outputs, still packed, in the shapes of `held_shapes`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Floats of 16 or 32 bits, in a tensor of the weight's name and shape."""

    name: str = "plain floats"

    def holds(self, weight: str, files: Collection[str]) -> bool:
        return weight in files

    def tensors(self, weight: str, shape: Shape, files: Mapping[str, StoredTensor]) -> dict[str, Expected]:
        return {weight: Expected(shape, FLOATS)}

    def unpack(self, shape: Shape, tensors: Sequence[Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        return tensors[0][rows]


PLAIN = Plain()
