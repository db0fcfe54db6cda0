"""Masks of grammars and of allowed_token_ids on scores, in torch. On a CPU csrc/draw.cpp does the same to its copy of
a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.staging import to_device


def with_masks(scores: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """Return scores [rows, vocab] with minus infinity for what the rows' masks lack; `scores` itself without any."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return scores
    packed = np.stack([mask for mask in masks if mask is not None]).view(np.uint8)
    rows_M, packed_MB = to_device(scores.device, np.array(rows), packed)
    bits_8 = (1 << torch.arange(8, device=scores.device)).byte()
    allowed = (packed_MB.unsqueeze(2) & bits_8).flatten(1)[:, : scores.shape[1]] != 0
    masked = scores[rows_M]
    scores = scores.clone()
    scores[rows_M] = torch.where(allowed, masked, masked - torch.inf)  # a NaN stays one, so that it shows
    return scores
