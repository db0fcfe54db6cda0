"""From the host to the device: all arrays of a call in one pinned buffer and one copy, for which nobody waits.

A list as an index, or a tensor made of a list on the device, would each be a copy of its own that the host waits for.
The way back is one copy, too, and whoever wants it waits for that copy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: what the widest loads of a GPU's kernels want."""

Array = np.ndarray[Any, Any]


def to_device(device: torch.device, *arrays: Array) -> list[Tensor]:
    """Return the arrays as tensors on the device; on a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return copy_into(torch.empty(bytes_of(*arrays), dtype=torch.uint8, device=device), *arrays)


def bytes_of(*arrays: Array) -> int:
    """Return how many bytes of its target copy_into fills."""
    return sum(map(_aligned_bytes, arrays))


def copy_into(target: Tensor, *arrays: Array) -> list[Tensor]:
    """Copy the arrays to where a tensor of bytes begins, in one copy; return them as tensors there."""
    size = bytes_of(*arrays)
    # torch takes pinned memory from a pool and gives it to nobody else before the copy is done.
    buffer = torch.empty(size, dtype=torch.uint8) if target.device.type == "cpu" else pinned(size)
    memory, copies, start = buffer.numpy(), list[Tensor](), 0
    for array in arrays:
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        dtype = torch.from_numpy(array).dtype
        copies.append(target[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _aligned_bytes(array)
    target[:size].copy_(buffer, non_blocking=True)
    return copies


def _aligned_bytes(array: Array) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def pinned(num_bytes: int) -> Tensor:
    """Return memory of the host that the device copies by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def to_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor from the device; what this returns waits for the copy and returns it as a list.

    It does not wait for what the device is given later.
    """
    return _begin_copy(tensor) if tensor.device.type == "cuda" else tensor.tolist


def _begin_copy(tensor: Tensor) -> Callable[[], list[Any]]:
    buffer = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    buffer.copy_(tensor, non_blocking=True)
    copied: torch.cuda.Event = torch.cuda.current_stream().record_event()

    def read() -> list[Any]:
        copied.synchronize()
        values: list[Any] = buffer.tolist()
        return values

    return read


def begin_wait(device: torch.device) -> Callable[[], object]:
    """Return a function that waits for the work that a GPU has been given so far, and not for what comes later."""
    if device.type != "cuda":
        return lambda: None
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event.synchronize
