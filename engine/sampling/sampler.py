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
Logprobs are of the raw logits. The result of a row depends only on that row. engine/model calls it with fp32 logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from gptserve.engine import native
from gptserve.engine.grammar.matcher import Mask, Masks
from gptserve.engine.request import Request, TokenLogprobs
from gptserve.engine.sampling import native_draw
from gptserve.engine.sampling.adjustments import SequenceAdjustments
from gptserve.engine.sampling.logprobs import read_tokens_with_logprobs, reported_logprobs, tokens_with_logprobs
from gptserve.engine.sampling.native_draw import Choice
from gptserve.engine.sampling.noise import uniform
from gptserve.engine.sampling.torch_draw import choose_by_torch
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState
from gptserve.engine.staging import to_host


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


def sampling_positions(batch: ScheduledBatch, masks: Masks) -> tuple[list[SamplingPosition], list[int]]:
    """Return where a step samples, and how many rows each item has that needs sampling."""
    positions: list[SamplingPosition] = []
    sizes: list[int] = []
    for item in batch.items:
        if item.needs_sampling:
            sizes.append(size := 1 + len(item.draft))
            allowed: Sequence[Mask | None] = masks.get(item.sequence) or (None,) * size
            if size == 1:
                positions.append(SamplingPosition(item.sequence, (), allowed[0]))
            else:
                positions += [SamplingPosition(item.sequence, item.draft[:i], allowed[i]) for i in range(size)]
    return positions, sizes


class SampledTokens(NamedTuple):
    """One entry per row: the token id (None if the logits were not finite) and its logprobs if requested."""

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]

    def split(self, sizes: Iterable[int]) -> Iterator[SampledTokens]:
        """Yield the first sizes[0] rows, then the next sizes[1], and so on."""
        end = 0
        for size in sizes:
            start, end = end, end + size
            yield SampledTokens(self.token_ids[start:end], self.logprobs[start:end])


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
        sampled = sampled_tokens(chosen.tolist(), reported_logprobs(raw, chosen, positions))
        return chosen, lambda: sampled
    read = to_host(tokens_with_logprobs(raw, chosen, positions))
    # The step waits for the device where it reads.
    return chosen, lambda: sampled_tokens(*read_tokens_with_logprobs(read(), positions))


def sampled_tokens(ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> SampledTokens:
    """Return the result of rows with these ids and logprobs; where an id is -1, both are None."""
    entries = [entry if token >= 0 else None for entry, token in zip(logprobs, ids, strict=True)]
    return SampledTokens(tuple([token if token >= 0 else None for token in ids]), tuple(entries))


def choice_at(position: SamplingPosition, vocab_size: int, eos_token_ids: Sequence[int]) -> Choice:
    """Return how to choose the token at a position, and keep in its sequence what the next position asks for again."""
    sequence, draft, allowed = position
    request, adjustments = sequence.request, sequence.adjustments
    if adjustments is None:
        adjustments = sequence.adjustments = SequenceAdjustments(request.params, sequence.num_prompt_tokens, vocab_size)
    if adjustments.allowed is not None:
        allowed = adjustments.allowed if allowed is None else allowed & adjustments.allowed
    adjustment = adjustments.at(position, eos_token_ids) if adjustments.may_change else None
    if adjustments.filters is None:
        return Choice(allowed=allowed, adjustment=adjustment)
    noise = uniform(request.seed, request.choice_index, len(sequence.token_ids) + len(draft))
    return Choice(noise, *adjustments.filters, allowed, adjustment)
