"""Positions as functions of their number: the rotation of queries and keys, and sinusoidal tables.

Angles are computed once, in fp64, for every position there can be: looked up, a row's numbers cannot depend on which
rows it is computed with. Called by the decoder; frequencies come with ModelConfig.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gptserve.weights.config import Rotary


class RotaryTable:
    """The cosines and sines of positions [0, num_positions)."""

    def __init__(self, rotary: Rotary, num_positions: int, device: torch.device) -> None:
        positions_P1 = torch.arange(num_positions, dtype=torch.float64)[:, None]
        angles_PN = positions_P1 * torch.tensor(rotary.inv_freqs, dtype=torch.float64)
        waves_P2N = torch.stack((angles_PN.cos(), angles_PN.sin()), dim=1) * rotary.scale
        self._waves_P2N = waves_P2N.to(device, torch.float32)

    def at(self, positions_T: Tensor) -> Rotation:
        """Return the rotation of rows at these positions."""
        cos_T1N, sin_T1N = self._waves_P2N[positions_T].unsqueeze(2).unbind(1)
        return Rotation(cos_T1N, sin_T1N)


class Rotation:
    """Rotates the heads of a step's rows by their positions (Rotary says how)."""

    def __init__(self, cos_T1N: Tensor, sin_T1N: Tensor) -> None:
        self._cos_T1N, self._sin_T1N = cos_T1N, sin_T1N

    def rotate_(self, heads_TXD: Tensor) -> None:
        """Rotate heads [T, any number, D] in place; computed in fp32."""
        num_pairs = self._cos_T1N.shape[-1]
        first, second = heads_TXD[..., :num_pairs], heads_TXD[..., num_pairs : 2 * num_pairs]
        a, b = first.float(), second.float()
        cos, sin = self._cos_T1N, self._sin_T1N
        rotated = a * cos - b * sin, b * cos + a * sin  # both before either is written: in fp32, a and b are views
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def sinusoids(num_positions: int, first: int, size: int) -> Tensor:
    """Return fp32 [num_positions, size]: row i for position first + i.

    The sines of all frequencies, then the cosines, as in tensor2tensor; Vaswani et al. 2017, section 3.5, has them in
    turns. An odd last column is 0.
    """
    half = size // 2
    freqs = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10_000) / max(1, half - 1)))
    angles = torch.arange(first, first + num_positions, dtype=torch.float64)[:, None] * freqs
    table = torch.cat((angles.sin(), angles.cos()), dim=1).float()
    return torch.nn.functional.pad(table, (0, size % 2))
