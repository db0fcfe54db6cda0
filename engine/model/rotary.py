"""Rotary and sinusoidal positions.

Angles are computed once, in fp64, for every position. Rows look them up, so they do not depend on the batch. Decoder
calls it; ModelConfig has the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gptserve.weights.config import Rotary

Rotation = tuple[Tensor, ...]
"""The cosines and the sines of the rows of a step, each [T, 1, N], and perhaps the factors of the queries, alike."""


def rotary_table(rotary: Rotary, num_positions: int, device: torch.device) -> Tensor:
    """Return fp32 [num_positions, 2, 1, N]: the cosines and the sines of each position.

    With a growth it is [num_positions, 3, 1, N]: then come N times the factor of the queries.
    """
    positions_P1 = torch.arange(num_positions, dtype=torch.float64)[:, None]
    angles_PN = positions_P1 * torch.tensor(rotary.inv_freqs, dtype=torch.float64)
    waves_PXN = torch.stack((angles_PN.cos(), angles_PN.sin()), dim=1) * rotary.scale
    if rotary.growth is not None:
        beta, length = rotary.growth
        factors_P1 = 1 + beta * torch.log1p((positions_P1 / length).floor())
        waves_PXN = torch.cat((waves_PXN, factors_P1.expand_as(angles_PN).unsqueeze(1)), dim=1)
    return waves_PXN.unsqueeze(2).to(device, torch.float32)


def rotate_(heads_TXD: Tensor, rotation: Rotation) -> None:
    """Rotate heads [T, any number, D] in place, as Rotary defines; computed in fp32."""
    cos_T1N, sin_T1N = rotation[:2]
    num_pairs = cos_T1N.shape[-1]
    first, second = heads_TXD[..., :num_pairs], heads_TXD[..., num_pairs : 2 * num_pairs]
    a, b = first.float(), second.float()
    # Compute both before writing: in fp32, a and b are views.
    rotated = a * cos_T1N - b * sin_T1N, b * cos_T1N + a * sin_T1N
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def rotations_of(tables: Sequence[Tensor | None]) -> list[tuple[Tensor, ...]]:
    """Return of each layer's table the waves that turn queries and keys and then, if any, those that multiply queries.

    Each is [num_positions, 2, 1, N]. A rotation by no angle multiplies by its cosine, which is a factor here.
    """
    found: dict[int, tuple[Tensor, ...]] = {}
    for table in tables:
        if table is not None and id(table) not in found:
            factors = table[:, 2:]
            multiplying = (torch.cat((factors, torch.zeros_like(factors)), dim=1),) if factors.shape[1] else ()
            found[id(table)] = table[:, :2].contiguous(), *multiplying
    return [() if table is None else found[id(table)] for table in tables]


def grow_(query_THD: Tensor, rotation: Rotation | None) -> None:
    """Multiply queries in place by the factors of their positions, if there are any."""
    if rotation is not None and len(rotation) > 2:
        query_THD.mul_(rotation[2][..., :1])


def sinusoids(num_positions: int, first: int, size: int) -> Tensor:
    """Return fp32 [num_positions, size]: row i for position first + i.

    The sines of all frequencies come first, then the cosines, as in tensor2tensor; in Vaswani et al. 2017, section 3.5,
    they alternate. If size is odd, the last column is 0.
    """
    half = size // 2
    freqs = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10_000) / max(1, half - 1)))
    angles = torch.arange(first, first + num_positions, dtype=torch.float64)[:, None] * freqs
    table = torch.cat((angles.sin(), angles.cos()), dim=1).float()
    return torch.nn.functional.pad(table, (0, size % 2))
