"""From logits to tokens: penalties, bias, masks, temperature, filters, and one draw per row.

The order, for a row whose raw logits are z over the vocabulary:
1. penalties: repetition (z/r where z > 0 else z*r, ids of prompt and completion; Keskar et al. 2019, section 4.1), then
   frequency and presence (z -= f*count + p*(count > 0), ids of the completion);
2. logit_bias is added;
3. masks: minus infinity for ids that allowed_token_ids lacks, that would complete one of bad_words, that would end the
   completion before min_tokens, or that the grammar does not allow;
4. temperature: z /= T; below 1e-6, or with top_k 1, the token is argmax and the lowest id wins a tie;
5. top-k, then top-p (Holtzman et al. 2020) of the mass of these k, then min-p (Nguyen et al. 2024) of the largest
   probability; each also keeps all tokens as probable as the last one it keeps, so equals stay together;
6. inverse CDF: the first id whose cumulative probability, ids ascending, exceeds u = noise.uniform(...).
Logprobs are of the raw logits. The result of a row depends only on that row. This file says what is asked for; the
draw.py of a backend chooses. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.request import SamplingParams
from gptserve.engine.sampling.adjustments import Adjustment, SequenceAdjustments
from gptserve.engine.sampling.noise import uniform


class Choice(NamedTuple):
    """How to choose the token of a row: by noise in [0, 1), or greedily where temperature is 0.

    top_k 0, top_p 1 and min_p 0 are off. Only `allowed` tokens are chosen, if there is such a mask. The adjustment
    comes before all else.
    """

    noise: float = 0.0
    top_p: float = 1.0
    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    allowed: Mask | None = None
    adjustment: Adjustment | None = None


@dataclass(slots=True, eq=False)
class SamplingState:
    """How the tokens of one sequence are chosen, and what has been counted of them; a sequence keeps its own.

    num_prompt_tokens of its tokens came with the request.
    """

    params: SamplingParams
    seed: int
    choice_index: int = 0
    num_prompt_tokens: int = 0
    adjustments: SequenceAdjustments | None = None
    """Made by the first `choice_at`."""


class SamplingPosition(NamedTuple):
    """Where a token is sampled: after the known tokens of a sequence, treating the tokens of `draft` as accepted."""

    state: SamplingState
    known: list[int]
    """of prompt and completion; the sequence's own list, which may grow once the step is launched"""
    draft: tuple[int, ...] = ()
    allowed: Mask | None = None
    """What the grammar allows here, if there is one."""


def choice_at(position: SamplingPosition, vocab_size: int, eos_token_ids: Sequence[int]) -> Choice:
    """Return how to choose the token at a position, and keep in its state what the next position asks for again."""
    state, known, draft, allowed = position
    adjustments = state.adjustments
    if adjustments is None:
        adjustments = state.adjustments = SequenceAdjustments(state.params, state.num_prompt_tokens, vocab_size)
    if adjustments.allowed is not None:
        allowed = adjustments.allowed if allowed is None else allowed & adjustments.allowed
    adjustment = adjustments.at(known, draft, eos_token_ids) if adjustments.may_change else None
    if adjustments.filters is None:
        return Choice(allowed=allowed, adjustment=adjustment)
    noise = uniform(state.seed, state.choice_index, len(known) + len(draft))
    return Choice(noise, *adjustments.filters, allowed, adjustment)


def num_top_logprobs(positions: Sequence[SamplingPosition]) -> dict[int, int]:
    """Return how many of the likeliest tokens are asked for, of the rows that ask for logprobs."""
    return {row: k for row, p in enumerate(positions) if (k := p.state.params.logprobs) is not None}
