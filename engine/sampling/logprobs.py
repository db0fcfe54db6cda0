"""The logprobs that requests ask for: of chosen tokens and of the likeliest, from the raw logits.

On a CPU native/logprobs.cpp computes them in one call, without copies of the logits; torch is its slow twin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gptserve.engine import native
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.staging import to_device

if TYPE_CHECKING:
    from gptserve.engine.sampling.sampler import SamplingPosition


class _Scores(Structure):
    """Scores of logprobs.cpp."""

    _fields_ = native.members(
        (c_void_p, "logits"),
        (c_int64, "stride vocab_size num_rows max_top"),
        (c_void_p, "token_ids num_top ranks best_ids own best"),
    )


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the logprob of the token (int64 [rows]) and the num_top best of each row of fp32 logits [rows, vocab].

    The best come with the lowest id first among equals. A row that is not finite has a NaN and none of the best.
    """
    is_native = logits.device.type == "cpu" and native.is_available()
    return (_by_library if is_native else top_logprobs_by_torch)(logits, token_ids, num_top)


def _by_library(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    num_rows, vocab_size = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1 and token_ids.is_contiguous()
    wanted, ranks, own = torch.tensor(num_top), torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    ids = torch.empty(num_rows, max(num_top), dtype=torch.int64)
    best = torch.empty(ids.shape)
    outputs = (tensor.data_ptr() for tensor in (token_ids, wanted, ranks, ids, own, best))
    scores = _Scores(logits.data_ptr(), logits.stride(0), vocab_size, num_rows, ids.shape[1], *outputs)
    native.library().native_score(byref(scores))
    entries = []
    columns = (column.tolist() for column in (token_ids, own, ranks, ids, best))
    for token_id, value, rank, its_ids, its_best, k in zip(*columns, num_top, strict=True):
        num = 0 if math.isnan(value) else min(k, vocab_size)
        entries.append(TokenLogprobs(token_id, value, rank, tuple(zip(its_ids[:num], its_best[:num], strict=True))))
    return entries


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


def reported_logprobs(raw: Tensor, chosen: Tensor, positions: Sequence[SamplingPosition]) -> list[TokenLogprobs | None]:
    """Return one entry per row: the logprobs of the chosen token, None if its request asks for none.

    Of a row that chose none, -1, they are those of the token 0.
    """
    num_top = _num_top(positions)
    if not num_top:
        return [None] * len(positions)
    entries = top_logprobs(*_rows_of(raw, chosen.clamp(min=0), num_top), list(num_top.values()))
    reported = dict(zip(num_top, entries, strict=True))
    return [reported.get(row) for row in range(len(positions))]


def tokens_with_logprobs(raw: Tensor, chosen: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Return the chosen ids, and what reported_logprobs needs of the device, as one flat tensor, without waiting."""
    num_top = _num_top(positions)
    if not num_top:
        return chosen
    table = _table(*_rows_of(raw, chosen.clamp(min=0), num_top), max(num_top.values()))
    return torch.cat([chosen.double(), table.flatten()])


def read_tokens_with_logprobs(
    numbers: Sequence[float], positions: Sequence[SamplingPosition]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return the ids, and what reported_logprobs gives, from the numbers of tokens_with_logprobs."""
    num_top, num_rows = _num_top(positions), len(positions)
    token_ids, table = [int(number) for number in numbers[:num_rows]], numbers[num_rows:]
    width = len(table) // max(1, len(num_top))
    entries = {row: _entry(table[i * width : (i + 1) * width], k) for i, (row, k) in enumerate(num_top.items())}
    return token_ids, [entries.get(row) for row in range(num_rows)]


def _num_top(positions: Sequence[SamplingPosition]) -> dict[int, int]:
    """Return how many of the likeliest tokens are asked for, of the rows that ask for logprobs."""
    return {row: k for row, p in enumerate(positions) if (k := p.sequence.request.params.logprobs) is not None}


def _rows_of(raw: Tensor, chosen: Tensor, num_top: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    if len(num_top) == len(raw):
        return raw, chosen
    (rows,) = to_device(raw.device, np.array(list(num_top)))
    return raw[rows], chosen[rows]
