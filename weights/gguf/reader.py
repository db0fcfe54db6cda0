"""Reads the header of a GGUF file: its key-values, and where its tensors are. Reads no tensor.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little end first. Everything is checked against the size of
the file and against limits before it is built, as the file may be hostile; the package `gguf` does not, and makes an
object of every element. Torch-free. folder.py calls it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gptserve.weights.errors import InvalidCheckpointError, UnsupportedModelError, shown
from gptserve.weights.gguf.block_sizes import BLOCKS, FILE_TYPES
from gptserve.weights.stored_tensor import Shape, StoredTensor

MAX_KEYS = 2**12  # published files have some 50
MAX_TENSORS = 2**16  # experts of a layer are one tensor
MAX_NAME_BYTES = 2**8
MAX_TEXT_BYTES = 2**22
MAX_VALUES = 2**22  # of all arrays together: the largest vocabularies have 262,144 tokens, with scores and types
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**16

Value = bool | int | float | str | list["Value"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _TEXT, _ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. A tensor's shape is [out, in], as torch has it, whatever its type."""

    path: Path
    keys: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    vectors: dict[str, StoredTensor] = field(default_factory=dict)
    """Where the values of keys are that are arrays of numbers in F32."""


def read_header(path: Path) -> Header:
    """Return the header. Raises InvalidCheckpointError, or UnsupportedModelError for a type of tensor that is not read.

    The values of a key are as Python's; whole arrays are lists.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as fault:  # ValueError: an empty file cannot be mapped
        reason = fault.strerror if isinstance(fault, OSError) else "it is empty"
        raise InvalidCheckpointError(f"{path} could not be read: {reason}") from fault


class _Reader:
    """Goes through a mapped file once."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._num_values = path, data, 0, 0

    def header(self) -> Header:
        header = Header(self._path)
        if self._take(4) != b"GGUF":
            raise self._fault("does not begin as a GGUF file does")
        version = self._number("I")
        if version not in (2, 3):
            raise self._fault(f"must be of version 2 or 3, little end first, got {version}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > MAX_TENSORS:
            raise self._fault(f"must have at most {MAX_TENSORS} tensors, got {num_tensors}")
        if num_keys > MAX_KEYS:
            raise self._fault(f"must have at most {MAX_KEYS} keys, got {num_keys}")
        for _ in range(num_keys):
            name = self._text(MAX_NAME_BYTES)
            if name in header.keys:
                raise self._fault(f"has the key {shown(name)} twice")
            kind, start = self._number("I"), self._at
            header.keys[name] = self._value(kind)
            if kind == _ARRAY and self._data[start : start + 4] == struct.pack("<I", _FLOAT):
                begin = start + struct.calcsize("<IQ")
                num = (self._at - begin) // struct.calcsize("<f")
                header.vectors[name] = StoredTensor(self._path, name, "F32", (num,), begin, self._at)
        found = [self._tensor() for _ in range(num_tensors)]
        start = _aligned(self._at, self._alignment(header.keys))
        for name, type_name, shape, offset in found:
            if name in header.tensors:
                raise self._fault(f"has the tensor {shown(name)} twice")
            begin = start + offset
            end = begin + _num_bytes(shape, type_name)
            if offset % self._alignment(header.keys) or end > len(self._data):
                rule = f"must lie at a multiple of {self._alignment(header.keys)} within the file"
                raise self._fault(f"tensor {shown(name)} {rule}, got bytes {begin} to {end} of {len(self._data)}")
            header.tensors[name] = StoredTensor(self._path, name, type_name, shape, begin, end)
        in_order = sorted(header.tensors.values(), key=lambda its: its.start)
        for one, other in pairwise(in_order):
            if other.start < one.end:
                raise self._fault(f"has the tensors {shown(one.name)} and {shown(other.name)} in one place")
        return header

    def _alignment(self, keys: dict[str, Value]) -> int:
        value = keys.get("general.alignment", 32)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._fault(f"general.alignment must be a power of two in [8, {MAX_ALIGNMENT}], got {shown(value)}")
        return value

    def _tensor(self) -> tuple[str, str, Shape, int]:
        name = self._text(MAX_NAME_BYTES)
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            rule = f"must have 1 to {MAX_DIMENSIONS} dimensions, got {num_dimensions}"
            raise self._fault(f"tensor {shown(name)} {rule}")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number = self._number("I")
        type_name = FILE_TYPES.get(number, "")
        if type_name not in BLOCKS:
            what = type_name or f"of type {number}"
            raise UnsupportedModelError(
                f"{self._path}: tensor {shown(name)} is {what}, which gptserve cannot read; use a file of "
                f"{', '.join(BLOCKS)}"
            )
        if not all(shape) or shape[-1] % BLOCKS[type_name].num_elements or math.prod(shape) > 8 * len(self._data):
            rule = f"rows of a multiple of {BLOCKS[type_name].num_elements}, within the file"
            raise self._fault(f"tensor {shown(name)} in {type_name} must have {rule}, got {shown(list(shape))}")
        return name, type_name, shape, self._number("Q")

    def _value(self, kind: int) -> Value:
        if kind in _NUMBERS:
            value = self._number(_NUMBERS[kind])
            return shortest(value) if kind == _FLOAT else value
        if kind == _TEXT:
            return self._text(MAX_TEXT_BYTES)
        if kind != _ARRAY:
            raise self._fault(f"has a value of the unknown type {kind}")
        kind, length = self._number("I"), self._number("Q")
        self._num_values += length
        if self._num_values > MAX_VALUES:
            raise self._fault(f"must have at most {MAX_VALUES} values in its arrays, got more")
        if kind in _NUMBERS:
            layout = struct.Struct(f"<{length}{_NUMBERS[kind]}")
            return list(layout.unpack(self._take(layout.size)))
        if kind != _TEXT:
            raise self._fault(f"has an array of the type {kind}, which is neither of numbers nor of texts")
        return [self._text(MAX_TEXT_BYTES) for _ in range(length)]

    def _text(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._fault(f"must have texts of at most {limit} bytes here, got {length}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as fault:
            raise self._fault(f"has a text that is not UTF-8: {fault}") from fault

    def _number(self, layout: str) -> int:
        (value,) = struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))
        return value  # type: ignore[no-any-return]

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self._data) - self._at:
            raise self._fault(f"ends at byte {len(self._data)}, in the middle of its header")
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def _fault(self, what: str) -> InvalidCheckpointError:
        return InvalidCheckpointError(f"{self._path} {what}")


def shortest(value: float) -> float:
    """Return the number of fewest digits that is this one in fp32: 1e-5 was written as 9.99999974e-06."""
    if math.isfinite(value):
        for digits in range(1, 9):
            if struct.pack("<f", shorter := float(f"{value:.{digits}g}")) == struct.pack("<f", value):
                return shorter
    return value


def _num_bytes(shape: Shape, type_name: str) -> int:
    block = BLOCKS[type_name]
    return math.prod(shape) // block.num_elements * block.num_bytes


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
