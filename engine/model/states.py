"""What layers of linear attention keep of each sequence, and those of their weights that are not multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptserve.weights.config import GatedDelta


class DeltaState(NamedTuple):
    """What sequences keep of one layer, each in a slot of its own."""

    latest_NSC: Tensor
    """fp32 [N, conv_size - 1, C], the inputs of the convolution of the latest tokens, the newest last"""
    memory_NHKV: Tensor
    """fp32 [N, H, K, V]"""


class DeltaNumbers(NamedTuple):
    """The weights of a layer's linear attention that are not multiplied, all fp32."""

    conv_SC: Tensor
    """[conv_size, C]"""
    decay_H: Tensor
    """[H], what a token's decay has as its factor"""
    step_H: Tensor
    """[H], added to what a token says of its decay"""


def make_state(delta: GatedDelta | None, num: int, device: torch.device) -> DeltaState | None:
    """Return room for the states of so many sequences, which takes memory when it is written to."""
    if delta is None:
        return None
    latest = num, delta.conv_size - 1, delta.conv_width
    memory = num, delta.num_value_heads, delta.key_size, delta.value_size
    latest_NSC, memory_NHKV = (torch.empty(shape, dtype=torch.float32, device=device) for shape in (latest, memory))
    return DeltaState(latest_NSC, memory_NHKV)
