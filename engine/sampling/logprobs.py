"""The logprobs that requests ask for: of chosen tokens and of the likeliest, from the raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.request import TokenLogprobs
from gptserve.engine.staging import to_device

if TYPE_CHECKING:
    from gptserve.engine.sampling.sampler import SamplingPosition


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the logprob of the token (int64 [rows]) and the num_top best of each row of fp32 logits [rows, vocab]."""
    logprobs = logits.log_softmax(-1)
    own_R1 = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own_R1).sum(-1, dtype=torch.int32) + 1  # int64 takes twice as long
    if logits.device.type == "cpu":
        best = [_best_of_row(row, k) for row, k in zip(logprobs, num_top, strict=True)]
        rows = zip(token_ids.tolist(), own_R1[:, 0].tolist(), ranks.tolist(), best, strict=True)
        return [TokenLogprobs(*row) for row in rows]
    best_ids, best_values = best_of_rows(logprobs, max(num_top))
    columns = (token_ids[:, None], ranks[:, None], own_R1, best_ids, best_values)
    table = torch.cat([column.double() for column in columns], 1).tolist()  # a step waits for the device here
    entries = []
    for (token_id, rank, own, *its_best), k in zip(table, num_top, strict=True):
        ids, values = its_best[: best_ids.shape[1]], its_best[best_ids.shape[1] :]
        pairs = tuple(zip(map(int, ids[:k]), values[:k], strict=True))
        entries.append(TokenLogprobs(int(token_id), own, int(rank), pairs))
    return entries


def best_of_rows(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ids and values of the k best of each row, in the order of _best_of_row but without waiting."""
    values, ids = logprobs.sort(descending=True, stable=True)
    return ids[:, :k], values[:, :k]


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
    (rows,) = to_device(raw.device, np.array(list(num_top)))
    reported = dict(zip(num_top, top_logprobs(raw[rows], chosen[rows], list(num_top.values())), strict=True))
    return [reported.get(row) for row in range(len(positions))]
