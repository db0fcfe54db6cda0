"""The logprobs that requests ask for: of chosen tokens and of the likeliest, from the raw logits.

On a CPU native/logprobs.cpp computes them in one call, without copies of the logits; torch is its slow twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from functools import partial
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


def logprobs_to_report(
    raw: Tensor, chosen: Tensor, positions: Sequence[SamplingPosition]
) -> Callable[[], list[TokenLogprobs | None]]:
    """Return what gives one entry per row: the logprobs of the chosen token, None if its request asks for none.

    It keeps the logits if a request asks for some, and waits for the device.
    """
    num_top = {row: k for row, p in enumerate(positions) if (k := p.request.params.logprobs) is not None}
    return partial(_reported, raw, chosen, len(positions), num_top) if num_top else lambda: [None] * len(positions)


@torch.inference_mode()
def _reported(raw: Tensor, chosen: Tensor, num_rows: int, num_top: dict[int, int]) -> list[TokenLogprobs | None]:
    if len(num_top) < num_rows:
        (rows,) = to_device(raw.device, np.array(list(num_top)))
        raw, chosen = raw[rows], chosen[rows]
    reported = dict(zip(num_top, top_logprobs(raw, chosen, list(num_top.values())), strict=True))
    return [reported.get(row) for row in range(num_rows)]
