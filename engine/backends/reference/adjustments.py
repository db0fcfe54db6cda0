"""Penalties, bias and bans in torch, for all rows at once: what requests ask for goes to the device in one copy.

backends/cpu/csrc/draw.cpp does the same to its own copy of a row. draw.py calls it, and gpu/sampler.py its parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.staging import Array, to_device

_NOTHING: tuple[Array, Array] = np.zeros(0, np.int64), np.zeros(0, np.float32)


class Entries:
    """Tokens of rows, as indices of flat scores, and a number for each."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: list[Array] = []
        self._numbers: list[Array] = []

    def add(self, row: int, token_ids: Array | array[int], numbers: float | Array | array[float] = 0.0) -> None:
        """Add distinct tokens of a row, with a number each or one for all."""
        places = np.asarray(token_ids, np.int64) + row * self._vocab_size
        self._places.append(places)
        self._numbers.append(np.broadcast_to(np.asarray(numbers, np.float32), places.shape))

    def arrays(self) -> tuple[Array, Array]:
        """Return all indices and all numbers."""
        return (np.concatenate(self._places), np.concatenate(self._numbers)) if self._places else _NOTHING


def adjusted(raw: Tensor, adjustments: Sequence[Adjustment | None]) -> Tensor:
    """Return the logits [rows, vocab] after the changes of each row; `raw` itself if no row has any."""
    if all(adjustment is None for adjustment in adjustments):
        return raw
    entries = [Entries(raw.shape[1]) for _ in range(4)]
    seen, counted, biased, banned = entries
    for row, adjustment in enumerate(adjustments):
        if adjustment is None:
            continue
        its_counts = adjustment.before.counts()
        token_ids, counts = np.array(its_counts.token_ids), np.array(its_counts.counts)
        if adjustment.repetition != 1.0:
            seen.add(row, token_ids, adjustment.repetition)
        generated, counts = token_ids[counts > 0], counts[counts > 0]
        counted.add(row, generated, adjustment.frequency * counts + adjustment.presence)
        biased.add(row, adjustment.biased, adjustment.bias)
        banned.add(row, adjustment.banned)
    arrays = [array for its_entries in entries for array in its_entries.arrays()]
    seen_E, penalty_E, counted_E, penalties_E, *others = to_device(raw.device, *arrays)
    scores = raw.clone()
    flat = scores.view(-1)
    if len(seen_E):
        values = flat[seen_E]
        flat[seen_E] = torch.where(values > 0, values / penalty_E, values * penalty_E)
    if len(counted_E):
        flat[counted_E] -= penalties_E
    bias_and_ban(scores, *others)
    return scores


def bias_and_ban(scores: Tensor, biased_E: Tensor, bias_E: Tensor, banned_E: Tensor, _: Tensor) -> None:
    """Change contiguous scores in place, by the arrays of Entries of biased tokens and of banned ones."""
    flat = scores.view(-1)
    if len(biased_E):
        flat[biased_E] += bias_E
    if len(banned_E):
        flat[banned_E] -= torch.inf  # leaves a NaN what it is, so that it shows
