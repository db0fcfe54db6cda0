"""What the blocks of GGUF's types mean: bytes in, fp32 out, in the order of operations of the package `gguf`.

`gguf.quants` and ggml's ggml-quants.c are the source of each formula. A function takes uint8 [blocks, bytes of one] and
returns fp32 [blocks, elements of one]. d and m are a block's scale and its least value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of MXFP4, whose scales are halved for it."""


def _half(data: Tensor) -> Tensor:
    """Return two bytes of each block as fp32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return the low half of all bytes, then the high half, uint8 [blocks, 2 * bytes]."""
    return torch.cat((data & 15, data >> 4), 1)


def _planes(data: Tensor, shifts: tuple[int, ...], group: int) -> Tensor:
    """Return the bytes of each group shifted by each of `shifts` in turn: uint8 [blocks, groups, shifts, group]."""
    groups = data.view(len(data), -1, 1, group)
    return groups >> torch.tensor(shifts, dtype=torch.uint8).view(1, 1, -1, 1)


def _bits(data: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, the lowest first: uint8 [blocks, 32]."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(len(data), 32)


def _q4_0(data: Tensor) -> Tensor:
    return _half(data[:, :2]) * (_nibbles(data[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(data: Tensor) -> Tensor:
    return _half(data[:, :2]) * _nibbles(data[:, 4:]).float() + _half(data[:, 2:4])


def _q5_0(data: Tensor) -> Tensor:
    codes = _nibbles(data[:, 6:]) | _bits(data[:, 2:6]) << 4
    return _half(data[:, :2]) * (codes.to(torch.int8) - 16).float()


def _q5_1(data: Tensor) -> Tensor:
    codes = _nibbles(data[:, 8:]) | _bits(data[:, 4:8]) << 4
    return _half(data[:, :2]) * codes.float() + _half(data[:, 2:4])


def _q8_0(data: Tensor) -> Tensor:
    return _half(data[:, :2]) * data[:, 2:].view(torch.int8).float()


def _q2_k(data: Tensor) -> Tensor:
    scales, d, m = data[:, :16], _half(data[:, 80:82]), _half(data[:, 82:84])
    codes = (_planes(data[:, 16:80], (0, 2, 4, 6), 32) & 3).reshape(len(data), 16, 16)
    scale, least = d * (scales & 15).float(), m * (scales >> 4).float()
    return (scale[:, :, None] * codes.float() - least[:, :, None]).view(len(data), 256)


def _q3_k(data: Tensor) -> Tensor:
    low, high = _nibbles(data[:, 96:104]), _planes(data[:, 104:108], (0, 2, 4, 6), 4) & 3
    scales = (low | high.reshape(len(data), 16) << 4).to(torch.int8) - 32
    codes = (_planes(data[:, 32:96], (0, 2, 4, 6), 32) & 3).reshape(len(data), 256)
    lacks = (_planes(data[:, :32], tuple(range(8)), 32) & 1 ^ 1).reshape(len(data), 256)
    signed = (codes.to(torch.int8) - (lacks << 2).to(torch.int8)).view(len(data), 16, 16)
    scale = _half(data[:, 108:110]) * scales.float()
    return (scale[:, :, None] * signed.float()).view(len(data), 256)


def _scales_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and the eight least values of six bits that twelve bytes hold, uint8 [blocks, 8]."""
    d, m, both = data[:, :4], data[:, 4:8], data[:, 8:12]
    scales = torch.cat((d & 63, both & 15 | d >> 2 & 48), 1)
    return scales, torch.cat((m & 63, both >> 4 | m >> 2 & 48), 1)


def _q4_or_q5_k(data: Tensor, *, has_high_bits: bool) -> Tensor:
    scales, leasts = _scales_k(data[:, 4:16])
    scale, least = _half(data[:, :2]) * scales.float(), _half(data[:, 2:4]) * leasts.float()
    codes = (_planes(data[:, 48 if has_high_bits else 16 :], (0, 4), 32) & 15).reshape(len(data), 8, 32)
    if has_high_bits:
        high = _planes(data[:, 16:48], tuple(range(8)), 32) & 1
        codes = codes | high.reshape(len(data), 8, 32) << 4
    return (scale[:, :, None] * codes.float() - least[:, :, None]).view(len(data), 256)


def _q6_k(data: Tensor) -> Tensor:
    low = (_planes(data[:, :128], (0, 4), 64) & 15).reshape(len(data), 256)
    high = (_planes(data[:, 128:192], (0, 2, 4, 6), 32) & 3).reshape(len(data), 256)
    codes = ((low | high << 4).to(torch.int8) - 32).view(len(data), 16, 16)
    scale = _half(data[:, 208:210]) * data[:, 192:208].view(torch.int8).float()
    return (scale[:, :, None] * codes.float()).view(len(data), 256)


def _iq4_nl(data: Tensor) -> Tensor:
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    return _half(data[:, :2]) * values[_nibbles(data[:, 2:]).long()]


def _iq4_xs(data: Tensor) -> Tensor:
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    low = (_planes(data[:, 4:8], (0, 4), 1) & 15).reshape(len(data), 8)
    high = (_planes(data[:, 2:4], (0, 2, 4, 6), 1) & 3).reshape(len(data), 8)
    scale = _half(data[:, :2]) * ((low | high << 4).to(torch.int8) - 32).float()
    codes = (_planes(data[:, 8:], (0, 4), 16) & 15).reshape(len(data), 8, 32)
    return (scale[:, :, None] * values[codes.long()]).view(len(data), 256)


def _mxfp4(data: Tensor) -> Tensor:
    exponent = data[:, :1].to(torch.int32)
    bits = torch.where(
        exponent < 2, 0x00200000 << exponent, exponent - 1 << 23
    )  # 2 ** (exponent - 128), also tiny ones
    values = torch.tensor(E2M1_DOUBLED, dtype=torch.float32)
    return bits.view(torch.float32) * values[_nibbles(data[:, 1:]).long()]


UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_q4_or_q5_k, has_high_bits=False),
    "Q5_K": partial(_q4_or_q5_k, has_high_bits=True),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
