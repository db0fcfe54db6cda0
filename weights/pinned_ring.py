"""Copies tensors from the host to a GPU while the host reads the next ones: through a small ring of pinned buffers.

A GPU fetches from pinned memory by itself, on a stream beside that of its kernels; from other memory the host would
have to hand over each piece and wait. checkpoint.py uses it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gptserve.weights.loading_threads import PIECE_ELEMENTS, map_pieces

BUFFER_BYTES = 1 << 24
"""A GPU on PCIe fetches 16 MiB in some 0.5 ms, which is far more than starting it takes."""
NUM_BUFFERS = 4
_TRANSPOSED_ROWS = 512  # so few that little is held twice


class Lane(Protocol):
    """What takes buffers to a device, in their order."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the host, uint8."""

    def send(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        """Start copying a part of a buffer to the device; return what waits until it is there."""

    def join(self) -> None:
        """Let whatever the device is told next wait until all is there. The host does not wait."""


class CudaLane:
    """The Lane of CUDA: a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        # Kernels that were started before may still use what had the target's memory then.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            done: torch.cuda.Event = self._stream.record_event()
        return done.synchronize

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class PinnedRing:
    """Buffers that are filled in turn, each as soon as the device has what it held before."""

    def __init__(self, lane: Lane, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self._lane, self._buffer_bytes = lane, buffer_bytes
        self._ring: deque[tuple[Tensor, Callable[[], None]]] = deque(
            (lane.buffer(buffer_bytes), lambda: None) for _ in range(num_buffers)
        )

    def copy(self, target: Tensor, values: Tensor) -> None:
        """Copy values of the host, of any type and strides, to the rows of a contiguous tensor on the device.

        They may be dropped at once, but the target has them only after `join`.
        """
        num_rows = self._buffer_bytes // target[0].nbytes
        assert num_rows, "a row must fit into a buffer"
        ends = tuple(range(num_rows, len(target), num_rows))
        for part, its_values in zip(target.tensor_split(ends), values.tensor_split(ends), strict=True):
            buffer, wait = self._ring.popleft()
            wait()
            staged = buffer[: part.nbytes].view(part.dtype).view(part.shape)
            _convert(its_values, staged)  # reads the file
            self._ring.append((buffer, self._lane.send(part, staged)))

    def join(self) -> None:
        """Let the device use the targets of all copies."""
        self._lane.join()


class DirectCopy:
    """The same for a CPU: copies without a ring."""

    def copy(self, target: Tensor, values: Tensor) -> None:
        """Copy values to the rows of a tensor."""
        _convert(values, target)

    def join(self) -> None:
        """Do nothing, as nothing is under way."""


def _convert(values: Tensor, target: Tensor) -> None:
    """Copy values to a contiguous tensor and convert them, in pieces of rows.

    What lies transposed is converted, and then transposed: torch does both at once an element at a time, which takes
    1.7 times as long.
    """
    is_transposed = values.dim() == 2 and values.stride(0) == 1 and values.dtype != target.dtype
    num_rows = max(1, PIECE_ELEMENTS // max(1, math.prod(target.shape[1:])))
    ends = tuple(range(step := min(num_rows, _TRANSPOSED_ROWS) if is_transposed else num_rows, len(target), step))

    def convert_rows(rows: Tensor, its_values: Tensor) -> None:
        rows.copy_(its_values.t().to(target.dtype).t() if is_transposed else its_values)

    for _ in map_pieces(convert_rows, target.tensor_split(ends), values.tensor_split(ends)):
        pass


def copier(device: torch.device) -> PinnedRing | DirectCopy:
    """Return what copies to this device."""
    return PinnedRing(CudaLane(device)) if device.type == "cuda" else DirectCopy()
