"""Penalties, bias and masks on raw logits: steps 1 to 3 of sampler.py, for all rows of a batch at once.

What requests ask of single tokens is gathered on the host, sent to the device in one copy, and applied by a few
operations, however many rows ask. Masks of grammars come later, in grammar_masks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.staging import Array, to_device

if TYPE_CHECKING:
    from gptserve.engine.sampling.sampler import SamplingPosition


_NOTHING: tuple[Array, Array] = np.zeros(0, np.int64), np.zeros(0, np.float32)


class _Entries:
    """Tokens of rows, as indices of flat scores, and a number for each."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.places: list[Array] = []
        self._numbers: list[Array] = []

    def add(self, row: int, token_ids: Sequence[int] | Array, numbers: float | Sequence[float] | Array = 0.0) -> None:
        """Add distinct tokens of a row, with a number each or one for all."""
        places = np.asarray(token_ids, np.int64) + row * self._vocab_size
        self.places.append(places)
        self._numbers.append(np.broadcast_to(np.asarray(numbers, np.float32), places.shape))

    def arrays(self) -> tuple[Array, Array]:
        """Return all indices and all numbers."""
        return (np.concatenate(self.places), np.concatenate(self._numbers)) if self.places else _NOTHING


def adjusted(raw: Tensor, positions: Sequence[SamplingPosition], eos_token_ids: Sequence[int]) -> Tensor:
    """Return the logits [rows, vocab] after penalties, bias and masks; `raw` itself if no row needs any."""
    entries = [_Entries(raw.shape[1]) for _ in range(5)]
    seen, counted, biased, allowed, banned = entries
    limited: list[int] = []
    for row, position in enumerate(positions):
        params = position.request.params
        if params.repetition_penalty != 1.0:
            seen.add(row, np.unique(position.tokens_from(0)), params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            generated = np.array(position.tokens_from(position.sequence.num_prompt_tokens), np.int64)
            unique, counts = np.unique(generated, return_counts=True)
            counted.add(row, unique, params.frequency_penalty * counts + params.presence_penalty)
        if params.logit_bias:
            biased.add(row, list(params.logit_bias), list(params.logit_bias.values()))
        if params.allowed_token_ids:
            limited.append(row)
            allowed.add(row, params.allowed_token_ids)
        if banned_ids := _banned_ids(position, eos_token_ids):
            banned.add(row, banned_ids)
    if not any(its_entries.places for its_entries in entries):
        return raw
    arrays = [array for its_entries in entries for array in its_entries.arrays()]
    return _apply(raw.clone(), *to_device(raw.device, np.array(limited, np.int64), *arrays))


def _apply(scores: Tensor, limited: Tensor, *entries: Tensor) -> Tensor:
    """Change the scores in place and return them. `limited` are the rows with allowed tokens."""
    seen, penalty, counted, penalties, biased, bias, allowed, _, banned, _ = entries
    flat = scores.view(-1)
    if len(seen):
        values = flat[seen]
        flat[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(counted):
        flat[counted] -= penalties
    if len(biased):
        flat[biased] += bias
    # To subtract infinity leaves a NaN what it is, so that it shows.
    if len(limited):
        kept = flat[allowed]
        scores[limited] -= torch.inf
        flat[allowed] = kept
    if len(banned):
        flat[banned] -= torch.inf
    return scores


def _banned_ids(position: SamplingPosition, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the ids that min_tokens and bad_words rule out at this position."""
    params, num_prompt = position.request.params, position.sequence.num_prompt_tokens
    banned: list[int] = []
    if params.min_tokens and position.num_before - num_prompt < params.min_tokens:
        # Where a grammar allows nothing but the end of text, that comes; else its mask has no end so early.
        banned += (*(() if params.grammar is not None else eos_token_ids), *params.stop_token_ids)
    if params.bad_words:
        longest = max(map(len, params.bad_words)) - 1
        tail = tuple(position.tokens_from(max(num_prompt, position.num_before - longest)))
        banned += [word[-1] for word in params.bad_words if tail[len(tail) - len(word) + 1 :] == word[:-1]]
    return banned
