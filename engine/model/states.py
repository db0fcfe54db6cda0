"""What layers keep of each sequence in place of keys and values, and weights of theirs that are not multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptserve.weights.config import Recurrence


class State(NamedTuple):
    """What sequences keep of one layer, each in a slot of its own."""

    latest_NSC: Tensor
    """fp32 [N, conv_size - 1, C], the inputs of the convolution of the latest tokens, the newest last"""
    memory_NHKV: Tensor
    """fp32 [N, H, K, V], of linear attention; else of no numbers"""


class HeadNumbers(NamedTuple):
    """The weights of a layer's linear attention that are not multiplied, all fp32."""

    conv_SC: Tensor
    """[conv_size, C]"""
    decay_H: Tensor
    """[H], what a token's decay has as its factor"""
    step_H: Tensor
    """[H], added to what a token says of its decay"""
    bias_C: Tensor | None = None
    """[C], of the convolution"""
    skip_H: Tensor | None = None
    """[H], of a state space: by which values are added to what heads give"""


def make_state(recurrence: Recurrence | None, num: int, device: torch.device) -> State | None:
    """Return room for the states of so many sequences, which takes memory when it is written to."""
    if recurrence is None:
        return None
    latest = num, recurrence.conv_size - 1, recurrence.conv_width
    memory = num, *recurrence.memory_shape
    latest_NSC, memory_NHKV = (torch.empty(shape, dtype=torch.float32, device=device) for shape in (latest, memory))
    return State(latest_NSC, memory_NHKV)
