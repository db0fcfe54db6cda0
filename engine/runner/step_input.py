"""The input of one step as plain values: what ModelRunner computes, and nothing of why.

batch.py makes it of what was scheduled; the checks at start make their own. Torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from gptserve.engine.model.layout import StepArrays
from gptserve.engine.runner.masks import Masks
from gptserve.engine.sampling.choice import SamplingPosition
from gptserve.weights.pooling import Pooling


class ScoredPrompt(NamedTuple):
    """Rows of a step whose next tokens, of a prompt, are to have their logprobs."""

    sequence: int
    """the index of the sequence among those of the step"""
    first_row: int
    first_position: int
    """of the first of the next tokens"""
    token_ids: list[int]
    """the next tokens: that of the first row, and so on; there may be none"""
    num_top: int
    """how many of the likeliest tokens to report for each"""


class PooledPrompt(NamedTuple):
    """Rows of a step that are tokens of a prompt whose vector is wanted."""

    sequence: int
    """the index of the sequence among those of the step"""
    pooling: Pooling
    first_row: int
    num_rows: int
    first_position: int
    is_last: bool
    """whether the last row is the prompt's last token"""
    before: array[float] | None
    """what the step before gave (pooling.py)"""


class StepInput(NamedTuple):
    """What a step computes, of which rows it samples the next token and how, which prompts it scores and pools."""

    arrays: StepArrays
    positions: Sequence[SamplingPosition] = ()
    """Of each sampled row, without the masks of grammars."""
    prompts: Sequence[ScoredPrompt] = ()
    pooled: Sequence[PooledPrompt] = ()
    masks: Future[Masks] | None = None

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one row, which is sampled and computes a token of the completion."""
        arrays = self.arrays
        return len(arrays.token_ids) == len(arrays.kv_lens) == len(arrays.sampled) and all(
            len(position.known) > position.state.num_prompt_tokens for position in self.positions
        )

    def masked_positions(self) -> Sequence[SamplingPosition]:
        """Wait for the masks; return where the step samples, with them."""
        if self.masks is None:
            return self.positions
        masks = self.masks.result()
        return [position._replace(allowed=masks.get(row)) for row, position in enumerate(self.positions)]
