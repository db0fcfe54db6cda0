"""The codes in the blocks of GGUF's types that a CPU multiplies with as they are; quantized/coded.py says more.

`gguf.quants` and ggml's ggml-quants.c are the source of each layout. A function takes uint8 [blocks, bytes of one].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gptserve.weights.gguf.bits import bits, nibbles, planes


class Codes(NamedTuple):
    """Codes, uint8 [blocks, elements of one], and the numbers of their groups, as CodedWeight has them."""

    codes: Tensor
    scales: Tensor
    others: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_leasts: Tensor | None = None


def _halves(data: Tensor) -> Tensor:
    """Return the bytes of each block as fp16."""
    return data.contiguous().view(torch.float16)


def _signed(data: Tensor) -> Tensor:
    """Return bytes as int8."""
    return data.contiguous().view(torch.int8)


def _q4_0(data: Tensor) -> Codes:
    return Codes(nibbles(data[:, 2:]), _halves(data[:, :2]))


def _q4_1(data: Tensor) -> Codes:
    return Codes(nibbles(data[:, 4:]), _halves(data[:, :2]), _halves(data[:, 2:4]))


def _q5_0(data: Tensor) -> Codes:
    return Codes(nibbles(data[:, 6:]) | bits(data[:, 2:6]) << 4, _halves(data[:, :2]))


def _q5_1(data: Tensor) -> Codes:
    codes = nibbles(data[:, 8:]) | bits(data[:, 4:8]) << 4
    return Codes(codes, _halves(data[:, :2]), _halves(data[:, 2:4]))


def _q8_0(data: Tensor) -> Codes:
    return Codes(data[:, 2:] ^ 128, _halves(data[:, :2]))


def _q4_or_q5_k(data: Tensor, *, has_high_bits: bool) -> Codes:
    codes = (planes(data[:, 48 if has_high_bits else 16 :], (0, 4), 32) & 15).reshape(len(data), 256)
    if has_high_bits:
        high = planes(data[:, 16:48], tuple(range(8)), 32) & 1
        codes = codes | high.reshape(len(data), 256) << 4
    d, m, both = data[:, 4:8], data[:, 8:12], data[:, 12:16]  # eight scales and eight least values of six bits
    scales = torch.cat((d & 63, both & 15 | d >> 2 & 48), 1)
    leasts = torch.cat((m & 63, both >> 4 | m >> 2 & 48), 1)
    return Codes(codes, _halves(data[:, :2]), -_halves(data[:, 2:4]), _signed(scales), _signed(leasts))


def _q6_k(data: Tensor) -> Codes:
    low = (planes(data[:, :128], (0, 4), 64) & 15).reshape(len(data), 256)
    high = (planes(data[:, 128:192], (0, 2, 4, 6), 32) & 3).reshape(len(data), 256)
    return Codes(low | high << 4, _halves(data[:, 208:210]), None, _signed(data[:, 192:208]))


def _iq4_nl(data: Tensor) -> Codes:
    return Codes(nibbles(data[:, 2:]), _halves(data[:, :2]))


def _iq4_xs(data: Tensor) -> Codes:
    low = (planes(data[:, 4:8], (0, 4), 1) & 15).reshape(len(data), 8)
    high = (planes(data[:, 2:4], (0, 2, 4, 6), 1) & 3).reshape(len(data), 8)
    codes = (planes(data[:, 8:], (0, 4), 16) & 15).reshape(len(data), 256)
    return Codes(codes, _halves(data[:, :2]), None, _signed(low | high << 4) - 32)


CODES: Mapping[str, Callable[[Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": partial(_q4_or_q5_k, has_high_bits=False),
    "Q5_K": partial(_q4_or_q5_k, has_high_bits=True),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
