"""One tensor of a safetensors file: where its bytes are. Torch-free. checkpoint.py makes them of the files' headers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gptserve.weights.errors import InvalidCheckpointError

CHUNK_BYTES = 2**20  # compared at once
MAX_ZERO_BYTES = 2**22
"""More than any bias has."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file; `start` and `end` are byte offsets in it."""

    path: Path
    name: str
    dtype: str
    shape: Shape
    start: int
    end: int

    def entry(self, number: int) -> StoredTensor:
        """Return one entry of the first dimension."""
        num, *shape = self.shape
        num_bytes = (self.end - self.start) // num
        start = self.start + number * num_bytes
        return replace(self, shape=tuple(shape), start=start, end=start + num_bytes)

    def is_zero(self) -> bool:
        """Return whether all bytes are 0, of at most MAX_ZERO_BYTES. Raises InvalidCheckpointError."""
        return self.end - self.start <= MAX_ZERO_BYTES and self.holds_only(0)

    def holds_only(self, byte: int) -> bool:
        """Return whether all bytes are this one. Raises InvalidCheckpointError."""
        return all(chunk.count(byte) == len(chunk) for chunk in self._chunks())

    def has_halves(self) -> bool:
        """Return whether fp16 has all numbers, of fp16, bf16 or fp32, as they are. Raises InvalidCheckpointError."""
        return all(_are_halves(chunk, self.dtype) for chunk in self._chunks())

    def counts_up(self, size: int) -> bool:
        """Return whether numbers, int32, are `size` zeros, as many ones, and so on. Raises InvalidCheckpointError."""
        import numpy as np  # the server imports this file, and does without

        start = 0
        for chunk in self._chunks():
            numbers = np.frombuffer(chunk, "<i4")
            if not np.array_equal(numbers, np.arange(start, start + len(numbers)) // size):
                return False
            start += len(numbers)
        return True

    def _chunks(self) -> Iterator[bytes]:
        """Read the bytes, some at a time. Raises InvalidCheckpointError."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                for done in range(self.start, self.end, CHUNK_BYTES):
                    yield file.read(min(CHUNK_BYTES, self.end - done))
        except OSError as fault:
            raise InvalidCheckpointError(f"{self.path} could not be read: {fault.strerror}") from fault

    def equals(self, other: StoredTensor) -> bool:
        """Return whether both have the same type, shape and bytes. Raises InvalidCheckpointError."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        path = self.path
        try:
            with self.path.open("rb") as file:
                path = other.path
                with other.path.open("rb") as other_file:
                    file.seek(self.start)
                    other_file.seek(other.start)
                    for done in range(self.start, self.end, CHUNK_BYTES):
                        size = min(CHUNK_BYTES, self.end - done)
                        if file.read(size) != other_file.read(size):
                            return False
        except OSError as fault:
            raise InvalidCheckpointError(f"{path} could not be read: {fault.strerror}") from fault
        return True


def _are_halves(numbers: bytes, dtype: str) -> bool:
    """Return whether all numbers of this dtype are finite ones of fp16."""
    import numpy as np  # the server imports this file, and does without

    if dtype == "F16":
        return True
    if dtype == "BF16":
        values = (np.frombuffer(numbers, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(numbers, "<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.astype("<f2")
    return bool(np.isfinite(halves).all()) and np.array_equal(halves.astype("<f4"), values)
