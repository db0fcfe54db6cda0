"""One tensor of a safetensors file: where its bytes are. Torch-free. checkpoint.py makes them of the files' headers."""

from __future__ import annotations

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
        size = self.end - self.start
        if size > MAX_ZERO_BYTES:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                return not any(file.read(size))
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
