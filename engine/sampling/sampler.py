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
Logprobs are of the raw logits. The result of a row depends only on that row. ModelRunner calls it with fp32 logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptserve.engine import native
from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.request import Request, SamplingParams, TokenLogprobs
from gptserve.engine.sampling import native_draw
from gptserve.engine.sampling.adjustments import SequenceAdjustments, adjusted
from gptserve.engine.sampling.grammar_masks import with_masks
from gptserve.engine.sampling.logprobs import read_tokens_with_logprobs, reported_logprobs, tokens_with_logprobs
from gptserve.engine.sampling.native_draw import Choice
from gptserve.engine.sampling.noise import uniform
from gptserve.engine.scheduling.sequence import SequenceState
from gptserve.engine.staging import to_device, to_host

_MIN_TEMPERATURE = 1e-6
_NUM_CANDIDATES = 1024
"""This many of the likeliest tokens are sorted first. They nearly always hold top_p of the mass, and sorting a whole
vocabulary of 50,000 takes milliseconds for each row."""


class SamplingPosition(NamedTuple):
    """Where a token is sampled: after the known tokens of a sequence, treating the tokens of `draft` as accepted."""

    sequence: SequenceState
    draft: tuple[int, ...] = ()
    allowed: Mask | None = None
    """What the grammar allows here, if there is one."""

    @property
    def request(self) -> Request:
        """The request, for its parameters and seed."""
        return self.sequence.request

    @property
    def num_before(self) -> int:
        """How many tokens precede this position in prompt and completion."""
        return len(self.sequence.token_ids) + len(self.draft)

    def tokens_from(self, start: int) -> list[int]:
        """Return the token ids before this position, from index `start` of prompt and completion on."""
        return [*self.sequence.token_ids[start:], *self.draft]


class SampledTokens(NamedTuple):
    """One entry per row: the token id (None if the logits were not finite) and its logprobs if requested."""

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]

    def split(self, sizes: Iterable[int]) -> Iterator[SampledTokens]:
        """Yield the first sizes[0] rows, then the next sizes[1], and so on."""
        start = 0
        for size in sizes:
            rows, start = slice(start, start + size), start + size
            yield SampledTokens(self.token_ids[rows], self.logprobs[rows])


Choose = Callable[[Tensor, Sequence[Choice]], Tensor]
"""From fp32 logits [rows, vocab] to a token id (int64 [rows]) per row; -1 for a row that is not finite."""


def sample(
    logits: Tensor,
    positions: Sequence[SamplingPosition],
    eos_token_ids: Sequence[int] = (),
    choose: Choose | None = None,
) -> SampledTokens:
    """Choose the token at each position from fp32 logits [rows, vocab]; later rows are padding.

    A row of which the masks leave nothing counts as one that is not finite. The logits stay what they are. It waits
    for the device once.
    """
    return begin_sampling(logits, positions, eos_token_ids, choose)[1]()


def begin_sampling(
    logits: Tensor, positions: Sequence[SamplingPosition], eos_token_ids: Sequence[int], choose: Choose | None
) -> tuple[Tensor, Callable[[], SampledTokens]]:
    """Have the device choose; return the ids (int64 [rows], -1 for None) and what waits for the result of `sample`."""
    raw = logits if len(logits) == len(positions) else logits[: len(positions)]
    if choose is None:
        choose = native_draw.choose if raw.device.type == "cpu" and native.is_available() else choose_by_torch
    chosen = choose(raw, [choice_at(position, raw.shape[1], eos_token_ids) for position in positions])
    if raw.device.type == "cpu":
        sampled = _sampled(chosen.tolist(), reported_logprobs(raw, chosen, positions))
        return chosen, lambda: sampled
    read = to_host(tokens_with_logprobs(raw, chosen, positions))
    return chosen, lambda: _sampled(*read_tokens_with_logprobs(read(), positions))  # a step waits for the device here


def _sampled(ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> SampledTokens:
    return SampledTokens(
        token_ids=tuple(token if token >= 0 else None for token in ids),
        logprobs=tuple(entry if token >= 0 else None for entry, token in zip(logprobs, ids, strict=True)),
    )


def choice_at(position: SamplingPosition, vocab_size: int, eos_token_ids: Sequence[int]) -> Choice:
    """Return how to choose the token at a position, and keep in its sequence what the next position asks for again."""
    sequence, _, allowed = position
    request, adjustments = sequence.request, sequence.adjustments
    params = request.params
    if adjustments is None:
        sequence.adjustments = adjustments = SequenceAdjustments(params, sequence.num_prompt_tokens, vocab_size)
    if adjustments.allowed is not None:
        allowed = adjustments.allowed if allowed is None else allowed & adjustments.allowed
    adjustment = adjustments.at(position, eos_token_ids) if adjustments.may_change else None
    if is_greedy(params):
        return Choice(allowed=allowed, adjustment=adjustment)
    noise = uniform(request.seed, request.choice_index, position.num_before)
    return Choice(noise, params.top_p, params.temperature, params.min_p, params.top_k, allowed, adjustment)


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


def is_greedy(params: SamplingParams) -> bool:
    """Whether the token is argmax of the adjusted logits, without a draw."""
    return params.temperature < _MIN_TEMPERATURE or params.top_k == 1


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
