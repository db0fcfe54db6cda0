"""A stored type: how the files hold the numbers of a weight. Its interface, and the type of plain floats.

A product computes with something else, in the dtype of computation or packed anew: the backends know nothing of this.
Importing these files does not import torch, as the server reads configurations, too. `__init__.py` lists the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gptserve.weights.stored_tensor import Shape, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOATS = ("BF16", "F16", "F32")

OF_CACHE = r"layers\.\d+\.self_attn\.[kv]_scale"
"""Scales of a KV cache in FP8, that quantized files may have; ours is in --kv-cache-dtype, and needs none."""

UNPACKED_ROWS = 64
"""`unpack` is asked for rows from a multiple of this on: types that pack outputs into words need not cut a word."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor of the files must be, to be a part of a weight."""

    shape: Shape
    dtypes: tuple[str, ...]


class UnfitError(ValueError):
    """A weight cannot have this type. The message goes on after "X is stored as TYPE, which"."""


@dataclass(frozen=True, slots=True)
class Found:
    """The tensors of the files for one weight, by what their names have after `base`, as "qweight" and "scales".

    `own` is the ending of the weight itself: "weight", or nothing for gpt-oss's experts and for vectors.
    """

    base: str
    own: str
    files: Mapping[str, StoredTensor]

    @classmethod
    def of(cls, weight: str, files: Mapping[str, StoredTensor]) -> Found:
        """Return those of a weight; all names are without a family's prefix."""
        base = weight.removesuffix("weight")
        return cls(base, weight[len(base) :], files)

    def __contains__(self, ending: str) -> bool:
        return self.base + ending in self.files

    def __getitem__(self, ending: str) -> StoredTensor:
        return self.files[self.base + ending]

    def fits(self, expected: Mapping[str, Expected]) -> bool:
        """Return whether all of these tensors are there, in their shapes and dtypes."""
        return all(
            ending in self and self[ending].shape == its.shape and self[ending].dtype in its.dtypes
            for ending, its in expected.items()
        )


class StoredType(Protocol):
    """How the files hold a weight. Equal objects are one type."""

    @property
    def name(self) -> str:
        """What a message calls it."""

    def holds(self, found: Found) -> bool:
        """Return whether the files have this weight in this type, as far as the names show."""

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        """Return the tensors that hold a weight of this shape, by the endings of their names.

        The shape is [out, in], or [entries, out, in]. Raises UnfitError.
        """

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        """Return these rows [rows, in] of a weight [out, in], in fp32 or in the dtype, which fp32 is then rounded to.

        The tensors are those of `tensors`, of one entry; rows start at a multiple of UNPACKED_ROWS. Raises UnfitError
        for numbers that have no meaning.
        """


@runtime_checkable
class PackedType(StoredType, Protocol):
    """A stored type with which some backend can multiply as it is."""

    def held_shapes(self, shape: Shape) -> dict[str, Shape] | None:
        """Return the shapes of the tensors, uint8, that a device holds of a weight [out, in]; None: it is unpacked.

        They are named by the last part of a canonical name, "weight" first. Some of the inputs may be a rank's.
        """

    def cut(self, tensors: Mapping[str, Tensor], start: int, end: int) -> tuple[Tensor, ...]:
        """Return the inputs [start, end) of all outputs, still packed, in the shapes of `held_shapes`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Floats of 16 or 32 bits, in a tensor of the weight's name and shape; a single one may have the shape []."""

    name: str = "plain floats"

    def holds(self, found: Found) -> bool:
        return found.own in found

    def tensors(self, shape: Shape, found: Found) -> dict[str, Expected]:
        if shape == (1,) and found.own in found and found[found.own].shape == ():
            shape = ()
        return {found.own: Expected(shape, FLOATS)}

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
        (tensor,) = tensors.values()
        return tensor[rows]


PLAIN = Plain()
