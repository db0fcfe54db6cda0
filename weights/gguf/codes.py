"""The codes in the blocks of GGUF's types that a CPU multiplies with as they are; quantized/coded.py says more.

A function takes uint8 [blocks, bytes of one] and returns codes, uint8 [blocks, elements of one], and the numbers of
their groups, fp16 [blocks, groups of one]: scales and, if the type has any, least values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def _halves(data: Tensor) -> Tensor:
    """Return the bytes of each block as fp16."""
    return data.contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """Return the low half of all bytes, then the high half."""
    return torch.cat((data & 15, data >> 4), 1)


def _q4_0(data: Tensor) -> tuple[Tensor, ...]:
    return _nibbles(data[:, 2:]), _halves(data[:, :2])


def _q4_1(data: Tensor) -> tuple[Tensor, ...]:
    return _nibbles(data[:, 4:]), _halves(data[:, :2]), _halves(data[:, 2:4])


def _q8_0(data: Tensor) -> tuple[Tensor, ...]:
    return data[:, 2:] ^ 128, _halves(data[:, :2])


CODES: Mapping[str, Callable[[Tensor], tuple[Tensor, ...]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
