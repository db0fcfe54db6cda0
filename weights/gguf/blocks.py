"""What the blocks of GGUF's other types mean, those that are not in codes.py: bytes in, fp32 out.

`gguf.quants` and ggml's ggml-quants.c are the source of each formula, with the former's order of operations. A function
takes uint8 [blocks, bytes of one] and returns fp32 [blocks, elements of one]. d and m are a block's scale and its least
value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gptserve.weights.gguf.bits import nibbles, planes

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of MXFP4, whose scales are halved for it."""


def _half(data: Tensor) -> Tensor:
    """Return two bytes of each block as fp32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def _q2_k(data: Tensor) -> Tensor:
    scales, d, m = data[:, :16], _half(data[:, 80:82]), _half(data[:, 82:84])
    codes = (planes(data[:, 16:80], (0, 2, 4, 6), 32) & 3).reshape(len(data), 16, 16)
    scale, least = d * (scales & 15).float(), m * (scales >> 4).float()
    return (scale[:, :, None] * codes.float() - least[:, :, None]).view(len(data), 256)


def _q3_k(data: Tensor) -> Tensor:
    low, high = nibbles(data[:, 96:104]), planes(data[:, 104:108], (0, 2, 4, 6), 4) & 3
    scales = (low | high.reshape(len(data), 16) << 4).to(torch.int8) - 32
    codes = (planes(data[:, 32:96], (0, 2, 4, 6), 32) & 3).reshape(len(data), 256)
    lacks = (planes(data[:, :32], tuple(range(8)), 32) & 1 ^ 1).reshape(len(data), 256)
    signed = (codes.to(torch.int8) - (lacks << 2).to(torch.int8)).view(len(data), 16, 16)
    scale = _half(data[:, 108:110]) * scales.float()
    return (scale[:, :, None] * signed.float()).view(len(data), 256)


def _mxfp4(data: Tensor) -> Tensor:
    exponent = data[:, :1].to(torch.int32)
    bits = torch.where(
        exponent < 2, 0x00200000 << exponent, exponent - 1 << 23
    )  # 2 ** (exponent - 128), also tiny ones
    values = torch.tensor(E2M1_DOUBLED, dtype=torch.float32)
    return bits.view(torch.float32) * values[nibbles(data[:, 1:]).long()]


UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "MXFP4": _mxfp4}
