"""Logprobs of chosen tokens and of the likeliest by torch, on any device. cpu/logprobs.py is its twin on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.request import TokenLogprobs
from gptserve.engine.sampling.choice import SamplingPosition, num_top_logprobs
from gptserve.engine.staging import to_device


def top_logprobs_by_torch(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return what top_logprobs does, but for rounding."""
    if logits.device.type == "cpu":
        logprobs, own_R1, ranks = _own(logits, token_ids)
        best = [_best_of_row(row, k) for row, k in zip(logprobs, num_top, strict=True)]
        rows = zip(token_ids.tolist(), own_R1[:, 0].tolist(), ranks.tolist(), best, strict=True)
        return [TokenLogprobs(*row) for row in rows]
    table = _table(logits, token_ids, max(num_top)).tolist()  # a step waits for the device here
    return [_entry(row, k) for row, k in zip(table, num_top, strict=True)]


def _own(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all logprobs, those of the tokens [rows, 1], and their ranks [rows]."""
    logprobs = logits.log_softmax(-1)
    own_R1 = logprobs.gather(1, token_ids[:, None])
    return logprobs, own_R1, (logprobs > own_R1).sum(-1, dtype=torch.int32) + 1  # int64 takes twice as long


def _table(logits: Tensor, token_ids: Tensor, max_top: int) -> Tensor:
    """Return an fp64 row of numbers for each row: its token, rank and logprob, the ids of the best, their logprobs."""
    logprobs, own_R1, ranks = _own(logits, token_ids)
    columns = (token_ids[:, None], ranks[:, None], own_R1, *best_of_rows(logprobs, max_top))
    return torch.cat([column.double() for column in columns], 1)


def _entry(row: Sequence[float], num_top: int) -> TokenLogprobs:
    (token_id, rank, own), best = row[:3], row[3:]
    num_best = len(best) // 2
    pairs = zip(map(int, best[:num_best][:num_top]), best[num_best:][:num_top], strict=True)
    return TokenLogprobs(int(token_id), own, int(rank), tuple(pairs))


def best_of_rows(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ids and values of the k best of each row, in the order of _best_of_row but without waiting."""
    bits = (logprobs + 0.0).view(torch.int32)  # no -0.0, which has other bits than 0.0
    # The lower half of a key tells equals apart, as topk promises no order of theirs: the lowest id has the largest.
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys += torch.arange(logprobs.shape[1], 0, -1, device=logprobs.device)
    best = keys.topk(min(k, logprobs.shape[1])).values
    ids = logprobs.shape[1] - (best & 0xFFFFFFFF)
    return ids, logprobs.gather(1, ids)


def _best_of_row(logprobs_V: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """Return the k best (id, logprob), best first, lowest id first among equals (topk promises no order of equals)."""
    if k == 0:
        return ()
    ids = (logprobs_V >= logprobs_V.topk(min(k, len(logprobs_V))).values[-1]).nonzero()[:, 0]
    values, order = logprobs_V[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:k]].tolist(), values[:k].tolist(), strict=True))


def tokens_with_logprobs(raw: Tensor, chosen: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Return the chosen ids, and what reported_logprobs needs of the device, as one flat tensor, without waiting."""
    num_top = num_top_logprobs(positions)
    if not num_top:
        return chosen
    table = _table(*rows_of(raw, chosen.clamp(min=0), num_top), max(num_top.values()))
    return torch.cat([chosen.double(), table.flatten()])


def read_tokens_with_logprobs(
    numbers: Sequence[float], positions: Sequence[SamplingPosition]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return the ids, and what reported_logprobs gives, from the numbers of tokens_with_logprobs."""
    num_top, num_rows = num_top_logprobs(positions), len(positions)
    token_ids, table = [int(number) for number in numbers[:num_rows]], numbers[num_rows:]
    width = len(table) // max(1, len(num_top))
    entries = {row: _entry(table[i * width : (i + 1) * width], k) for i, (row, k) in enumerate(num_top.items())}
    return token_ids, [entries.get(row) for row in range(num_rows)]


def rows_of(raw: Tensor, chosen: Tensor, num_top: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    if len(num_top) == len(raw):
        return raw, chosen
    (rows,) = to_device(raw.device, np.array(list(num_top)))
    return raw[rows], chosen[rows]
