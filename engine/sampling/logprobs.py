"""The logprobs that requests ask for: of chosen tokens and of the likeliest, from the raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptserve.engine.request import TokenLogprobs

if TYPE_CHECKING:
    from gptserve.engine.sampling.sampler import SamplingPosition


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the logprob of the token (int64 [rows]) and the num_top best of each row of fp32 logits [rows, vocab]."""
    logprobs = logits.log_softmax(-1)
    own_R1 = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own_R1).sum(-1, dtype=torch.int32) + 1  # int64 takes twice as long
    rows = zip(logprobs, token_ids.tolist(), own_R1[:, 0].tolist(), ranks.tolist(), num_top, strict=True)
    return [TokenLogprobs(token_id, own, rank, _best_of_row(row, k)) for row, token_id, own, rank, k in rows]


def _best_of_row(logprobs_V: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """Return the k best (id, logprob), best first, lowest id first among equals (topk promises no order of equals)."""
    if k == 0:
        return ()
    ids = (logprobs_V >= logprobs_V.topk(min(k, len(logprobs_V))).values[-1]).nonzero()[:, 0]
    values, order = logprobs_V[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:k]].tolist(), values[:k].tolist(), strict=True))


def reported_logprobs(raw: Tensor, chosen: Tensor, positions: Sequence[SamplingPosition]) -> list[TokenLogprobs | None]:
    """Return one entry per row: the logprobs of the chosen token, None if its request asks for none."""
    num_top = {row: k for row, p in enumerate(positions) if (k := p.request.params.logprobs) is not None}
    if not num_top:
        return [None] * len(positions)
    rows = list(num_top)
    reported = dict(zip(rows, top_logprobs(raw[rows], chosen[rows], list(num_top.values())), strict=True))
    return [reported.get(row) for row in range(len(positions))]
