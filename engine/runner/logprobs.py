"""The logprobs that requests ask for: of chosen tokens and of the likeliest, from the raw logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.draw import LogitsAt
from gptserve.engine.backends.cpu.logprobs import score
from gptserve.engine.backends.reference.logprobs import rows_of, top_logprobs_by_torch
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.sampling.choice import SamplingPosition, num_top_logprobs


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the logprob of the token (int64 [rows]) and the num_top best of each row of fp32 logits [rows, vocab].

    The best come with the lowest id first among equals. A row that is not finite has a NaN and none of the best.
    """
    if logits.device.type != "cpu" or not native.is_available():
        return top_logprobs_by_torch(logits, token_ids, num_top)
    return score(LogitsAt.of(logits), range(len(logits)), token_ids.tolist(), num_top)


def reported_logprobs(raw: Tensor, chosen: Tensor, positions: Sequence[SamplingPosition]) -> list[TokenLogprobs | None]:
    """Return one entry per row: the logprobs of the chosen token, None if its request asks for none.

    Of a row that chose none, -1, they are those of the token 0.
    """
    num_top = num_top_logprobs(positions)
    if not num_top:
        return [None] * len(positions)
    entries = top_logprobs(*rows_of(raw, chosen.clamp(min=0), num_top), list(num_top.values()))
    return _of_all_rows(len(positions), num_top, entries)


def reported_logprobs_at(
    logits: LogitsAt, chosen: Sequence[int], positions: Sequence[SamplingPosition]
) -> list[TokenLogprobs | None]:
    """Return what reported_logprobs does. It calls nothing of torch, for program_steps.py."""
    num_top = num_top_logprobs(positions)
    if not num_top:
        return [None] * len(positions)
    token_ids = [max(0, chosen[row]) for row in num_top]
    return _of_all_rows(len(positions), num_top, score(logits, list(num_top), token_ids, list(num_top.values())))


def _of_all_rows(num_rows: int, rows: Iterable[int], entries: Iterable[TokenLogprobs]) -> list[TokenLogprobs | None]:
    of_row = dict(zip(rows, entries, strict=True))
    return [of_row.get(row) for row in range(num_rows)]
