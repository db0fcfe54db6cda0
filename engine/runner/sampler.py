"""From the logits of a step to its tokens and their logprobs, by the fastest that can choose them.

choice.py says what is asked for. ModelRunner calls this with fp32 logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from gptserve.engine.backends.cpu import draw as native_draw
from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.reference.draw import Choose, choose_by_torch
from gptserve.engine.backends.reference.logprobs import read_tokens_with_logprobs, tokens_with_logprobs
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.logprobs import reported_logprobs
from gptserve.engine.sampling.choice import SamplingPosition, choice_at
from gptserve.engine.staging import to_host


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
