"""The logprobs that requests ask for: of chosen tokens and of the likeliest, from the raw logits.

On a CPU native/logprobs.cpp computes them in one call, without copies of the logits; torch is its slow twin.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gptserve.engine import native
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.sampling.native_draw import LogitsAt
from gptserve.engine.staging import to_device

if TYPE_CHECKING:
    from gptserve.engine.sampling.sampler import SamplingPosition


_SCORES = Struct("P4q7P")
"""Scores of logprobs.cpp."""


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the logprob of the token (int64 [rows]) and the num_top best of each row of fp32 logits [rows, vocab].

    The best come with the lowest id first among equals. A row that is not finite has a NaN and none of the best.
    """
    if logits.device.type != "cpu" or not native.is_available():
        return top_logprobs_by_torch(logits, token_ids, num_top)
    return score(LogitsAt.of(logits), range(len(logits)), token_ids.tolist(), num_top)


def score(
    logits: LogitsAt, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return what top_logprobs does, of these rows. It calls nothing of torch, for program_steps.py."""
    assert len(rows) == len(token_ids) == len(num_top)
    num_rows, max_top = len(rows), max(num_top)
    inputs = array("q", rows), array("q", token_ids), array("q", num_top)
    ranks, ids = array("q", bytes(8 * num_rows)), array("q", bytes(8 * num_rows * max_top))
    own, best = array("f", bytes(4 * num_rows)), array("f", bytes(4 * num_rows * max_top))
    addresses = [numbers.buffer_info()[0] for numbers in (*inputs, ranks, ids, own, best)]
    call = array("B", _SCORES.pack(*logits, num_rows, max_top, *addresses))
    native.library().native_score(call.buffer_info()[0])
    entries = []
    for i, (token_id, value, rank, k) in enumerate(zip(token_ids, own, ranks, num_top, strict=True)):
        its = slice(i * max_top, i * max_top + (0 if math.isnan(value) else min(k, logits.vocab_size)))
        entries.append(TokenLogprobs(token_id, value, rank, tuple(zip(ids[its], best[its], strict=True))))
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
    return _of_all_rows(len(positions), num_top, entries)


def reported_logprobs_at(
    logits: LogitsAt, chosen: Sequence[int], positions: Sequence[SamplingPosition]
) -> list[TokenLogprobs | None]:
    """Return what reported_logprobs does. It calls nothing of torch, for program_steps.py."""
    num_top = _num_top(positions)
    if not num_top:
        return [None] * len(positions)
    token_ids = [max(0, chosen[row]) for row in num_top]
    return _of_all_rows(len(positions), num_top, score(logits, list(num_top), token_ids, list(num_top.values())))


def _of_all_rows(num_rows: int, rows: Iterable[int], entries: Iterable[TokenLogprobs]) -> list[TokenLogprobs | None]:
    of_row = dict(zip(rows, entries, strict=True))
    return [of_row.get(row) for row in range(num_rows)]


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
