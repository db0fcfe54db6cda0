"""Q4_K and Q6_K, which the package gguf reads and does not write: rounded to nearest; and their mix, Q4_K_M."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

Array = np.ndarray
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K


def q4_k_m(name: str, width: int) -> GGMLQuantizationType:
    """Return the type of a matrix in llama.cpp's mix; it has others for rows that no super group divides."""
    if name.startswith("output.") or any(part in name for part in ("attn_v", "ffn_down", "token_embd")):
        return GGMLQuantizationType.Q8_0 if width % 256 else Q6_K
    return GGMLQuantizationType.Q5_0 if width % 256 else Q4_K


def packed(values: Array, its_type: GGMLQuantizationType) -> Array:
    """Return the blocks of a matrix."""
    pack = {Q4_K: _q4_k, Q6_K: _q6_k}.get(its_type)
    if pack is None:
        blocks: Array = quantize(values, its_type)
        return blocks
    return pack(values.reshape(-1, 256).astype(np.float64)).reshape(*values.shape[:-1], -1)


def _half(values: Array) -> Array:
    return values.astype(np.float16)


def _scaled(values: Array, scales: Array, highest: int) -> Array:
    """Return values as multiples of scales, 0 to `highest`."""
    return np.clip(np.rint(values / np.maximum(scales, 1e-30)), 0, highest).astype(np.uint8)


def _q4_k(values: Array) -> Array:
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(2), 0)
    step = (np.maximum(groups.max(2), 0) - least) / 15
    d, m = _half(step.max(1, keepdims=True) / 63), _half(-least.min(1, keepdims=True) / 63)
    scales, leasts = _scaled(step, d.astype(float), 63), _scaled(-least, m.astype(float), 63)
    codes = _scaled(groups + (m * leasts.astype(float))[..., None], (d * scales.astype(float))[..., None], 15)
    twelve = np.concatenate(
        (
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            leasts[:, :4] | leasts[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | leasts[:, 4:] << 4,
        ),
        1,
    )
    pairs = codes.reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate((d.view(np.uint8), m.view(np.uint8), twelve, low), 1)


def _q6_k(values: Array) -> Array:
    groups = values.reshape(-1, 16, 16)
    step = np.abs(groups).max(2) / 31
    d = _half(step.max(1, keepdims=True) / 127)
    scales = _scaled(step, d.astype(float), 127)
    codes = _scaled(groups + 32 * (d * scales.astype(float))[..., None], (d * scales.astype(float))[..., None], 63)
    halves, quarters = codes.reshape(-1, 2, 2, 64), codes.reshape(-1, 2, 4, 32)
    low = (halves[:, :, 0] & 15 | halves[:, :, 1] << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce([quarters[:, :, i] >> 4 << 2 * i for i in range(4)]).reshape(-1, 64)
    return np.concatenate((low, high, scales, d.view(np.uint8)), 1)


TypeOf = Callable[[str, int], GGMLQuantizationType]
"""What type a matrix of this name and width has."""
