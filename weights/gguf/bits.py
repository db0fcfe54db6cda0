"""Bits of the bytes of blocks, as codes.py and blocks.py put them together."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_HALVES = 0x0F0F0F0F0F0F0F0F
"""Of eight bytes."""


def nibbles(data: Tensor) -> Tensor:
    """Return the low half of all bytes, then the high half, uint8 [blocks, 2 * bytes]; bytes are a multiple of 8."""
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int64)  # at an address for such words
    return torch.cat((words & _LOW_HALVES, words >> 4 & _LOW_HALVES), 1).view(torch.uint8)


def planes(data: Tensor, shifts: tuple[int, ...], group: int) -> Tensor:
    """Return the bytes of each group shifted by each of `shifts` in turn: uint8 [blocks, groups, shifts, group]."""
    groups = data.view(len(data), -1, 1, group)
    return groups >> torch.tensor(shifts, dtype=torch.uint8).view(1, 1, -1, 1)


def bits(data: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, the lowest first: uint8 [blocks, 32]."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(len(data), 32)
