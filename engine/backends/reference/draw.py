"""Choosing tokens by torch, on any device: the slow twin of cpu/draw.py and gpu/sampler.py.

sampling/choice.py says what is chosen. This chooses where neither of the two is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.backends.reference.adjustments import adjusted
from gptserve.engine.backends.reference.grammar_masks import with_masks
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.staging import to_device

Choose = Callable[[Tensor, Sequence[Choice]], Tensor]
"""From fp32 logits [rows, vocab] to a token id (int64 [rows]) per row; -1 for a row that is not finite."""

_NUM_CANDIDATES = 1024
"""This many of the likeliest tokens are sorted first. They nearly always hold top_p of the mass, and sorting a whole
vocabulary of 50,000 takes milliseconds for each row."""


def choose_by_torch(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return a token id (int64 [rows]) per row of fp32 logits [rows, vocab]; -1 for a row that is not finite."""
    scores = adjusted(logits, [choice.adjustment for choice in choices])
    scores = with_masks(scores, [choice.allowed for choice in choices])
    best_scores, chosen = scores.max(-1)  # the lowest id among equals; a NaN anywhere in the row is its maximum
    drawing = [row for row, choice in enumerate(choices) if choice.temperature]
    if drawing:
        drawn = [choices[row] for row in drawing]
        filtered = [row for row, choice in enumerate(drawn) if choice.top_k or choice.top_p < 1.0 or choice.min_p]
        table = np.array([choice[:5] for choice in drawn], np.float64)
        rows_D, *parameters = to_device(scores.device, np.array(drawing), np.array(filtered, np.int64), table)
        chosen[rows_D] = _draw(scores if len(drawing) == len(choices) else scores[rows_D], drawn, *parameters)
    return torch.where(torch.isfinite(best_scores), chosen, -1)


def _draw(scores: Tensor, choices: Sequence[Choice], filtered_F: Tensor, table_R5: Tensor) -> Tensor:
    """Return a token id [rows] per row of adjusted scores, drawn by inverse CDF with that row's noise.

    The table has the numbers of the choices, in fp64; int64 `filtered` names the rows with a filter.
    """
    noise, _, temperature, *_ = table_R5.unbind(1)
    # Shift the largest score to 0, so that a small temperature cannot overflow; softmax ignores the shift.
    probs = ((scores - scores.amax(-1, keepdim=True)) / temperature.float()[:, None]).softmax(-1)
    if len(filtered_F):
        floors = torch.zeros((len(choices), 1), device=scores.device)
        largest_k = max((choice.top_k for choice in choices), default=0)
        floors[filtered_F] = _floors(probs[filtered_F], table_R5[filtered_F], largest_k)
        probs = probs.masked_fill(probs < floors, 0.0)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    target = noise[:, None] * total
    # u * total may round up to total, which no entry exceeds. Limit it to the largest number below total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # A row that is not finite matches no entry. Its token is dropped, but the index must stay in range.
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=scores.shape[1] - 1)


def _floors(probs: Tensor, table_R5: Tensor, largest_k: int) -> Tensor:
    """Return the smallest probability that each row keeps, [rows, 1], after top-k, top-p and min-p."""
    vocab_size = probs.shape[1]
    _, top_p_R1, _, min_p_R1, top_k_R1 = table_R5.unsqueeze(2).unbind(1)
    top_k_R1 = torch.where(top_k_R1 > 0, top_k_R1, vocab_size).clamp(max=vocab_size).long()
    few = min(max(_NUM_CANDIDATES, largest_k), vocab_size)
    # To ask whether few are enough is to wait, for which sorting them all on a GPU is too fast.
    for num_sorted in (few, vocab_size) if probs.device.type == "cpu" else (vocab_size,):
        best = probs.topk(num_sorted).values
        mass = best.cumsum(-1, dtype=torch.float64)
        last_k = (top_k_R1 - 1).clamp(max=num_sorted - 1)
        total = torch.where(top_k_R1 < vocab_size, mass.gather(1, last_k), 1.0)
        last_p = torch.where(top_p_R1 < 1.0, (mass < top_p_R1 * total).sum(-1, keepdim=True), 0)
        if num_sorted == vocab_size or bool((last_p < num_sorted).all()):
            break
    floor_k = torch.where(top_k_R1 < vocab_size, best.gather(1, last_k), 0.0)
    floor_p = torch.where(top_p_R1 < 1.0, best.gather(1, last_p.clamp(max=num_sorted - 1)), 0.0)
    return torch.maximum(torch.maximum(floor_k, floor_p), min_p_R1.float() * best[:, :1])
