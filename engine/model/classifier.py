"""Classifier: from the state of a text to one logit of each label. Decoder has it in the place of its head.

It is small, and each row is computed alone on the host in fp64: what is in the batch cannot change a bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class Classifier:
    """A linear of fp32 weights [labels, width]; then logits l become softcap * tanh(l * scale / softcap)."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self._weight = weight.cpu().numpy().astype(np.float64)
        self._bias = 0.0 if bias is None else bias.cpu().numpy().astype(np.float64)
        self._scale, self._softcap = scale, softcap

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of rows of states [rows, width]: fp32 [rows, labels], on the CPU."""
        rows = states.cpu().numpy()
        logits = np.empty((len(rows), len(self._weight)), dtype=np.float32)
        for row, its in zip(rows, logits, strict=True):
            sums = (self._weight * row).sum(axis=1) * self._scale + self._bias
            its[:] = sums if self._softcap is None else [self._softcap * math.tanh(s / self._softcap) for s in sums]
        return torch.from_numpy(logits)
