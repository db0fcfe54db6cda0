"""Penalties, bias and bans: the parts of steps 1 to 3 of choice.py that change single tokens of raw logits.

`SequenceAdjustments` says what they are at a position, the draw.py of a backend applies them. Step 3 also has masks
over the whole vocabulary, which come later. Torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.request import SamplingParams
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore

_NONE_BEFORE = TokensBefore(TokenCounts(0), [])


class Adjustment(NamedTuple):
    """What changes the logits of single tokens of a row. Token ids are 64-bit integers, biases are fp32.

    Only the tokens `before` the position are penalized. A penalty of repetition of 1 is off, as is 0 of the others.
    """

    repetition: float
    frequency: float
    presence: float
    before: TokensBefore
    biased: array[int]
    bias: array[float]
    banned: array[int]


class SequenceAdjustments:
    """What the parameters of a request do to the logits of its sequence; a sequence keeps its own.

    allowed is the mask of allowed_token_ids, None if all are. Unless it may_change logits, `at` gives None everywhere.
    filters are top_p, temperature, min_p and top_k of Choice, None where the token is argmax.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
        self.allowed = None if params.allowed_token_ids is None else _packed(params.allowed_token_ids, vocab_size)
        filters = params.top_p, params.temperature, params.min_p, params.top_k
        self.filters = None if params.is_greedy else filters
        self._params, self._num_prompt_tokens = params, num_prompt_tokens
        self._penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._has_penalties = params.has_penalties
        self.may_change = self._has_penalties or bool(params.logit_bias or params.min_tokens or params.bad_words)
        self._counts = TokenCounts(num_prompt_tokens)
        self._biased, self._bias = array("q", params.logit_bias), array("f", params.logit_bias.values())

    def at(self, known: list[int], draft: tuple[int, ...], eos_token_ids: Sequence[int]) -> Adjustment | None:
        """Return the changes at the position after these tokens of the sequence, None if there are none."""
        banned = self._banned_ids(known, draft, eos_token_ids)
        if not (banned or self._bias or self._has_penalties):
            return None
        before = _NONE_BEFORE
        if self._has_penalties:
            before = TokensBefore(self._counts, known, draft)
        return Adjustment(*self._penalties, before, self._biased, self._bias, array("q", banned))

    def _banned_ids(self, known: list[int], draft: tuple[int, ...], eos_token_ids: Sequence[int]) -> list[int]:
        """Return the ids that min_tokens and bad_words rule out at this position."""
        params, num_prompt, num_before = self._params, self._num_prompt_tokens, len(known) + len(draft)
        banned: list[int] = []
        if params.min_tokens and num_before - num_prompt < params.min_tokens:
            # Where a grammar allows nothing but the end of text, that comes; else its mask has no end so early.
            banned += (*(() if params.grammar is not None else eos_token_ids), *params.stop_token_ids)
        if params.bad_words:
            longest = max(map(len, params.bad_words)) - 1
            tail = (*known[max(num_prompt, num_before - longest) :], *draft)
            banned += [word[-1] for word in params.bad_words if tail[len(tail) - len(word) + 1 :] == word[:-1]]
        return banned


def _packed(token_ids: Sequence[int], vocab_size: int) -> Mask:
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view(np.uint32)
