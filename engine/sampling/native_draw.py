"""Choosing tokens on a CPU in one call of the compiled library: native/draw.cpp.

`sampler.py` defines the results, in torch, and calls this where the library is there. The tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_double, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from gptserve.engine import native
from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.sampling.token_counts import TokenCounts


class Choice(NamedTuple):
    """How to choose the token of a row: by noise in [0, 1), or greedily where temperature is 0.

    top_k 0, top_p 1 and min_p 0 are off. Only `allowed` tokens are chosen, if there is such a mask. The adjustment
    comes before all else.
    """

    noise: float = 0.0
    top_p: float = 1.0
    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    allowed: Mask | None = None
    adjustment: Adjustment | None = None


class _Adjustment(Structure):
    """Adjustment of draw.cpp."""

    _fields_ = native.members(
        (c_double, "frequency presence"),
        (c_float, "repetition"),
        (c_int64, "num_tokens num_biased num_banned"),
        (c_void_p, "token_ids counts biased bias banned"),
    )
    counted: TokenCounts
    """Behind a draft: holds the memory of token_ids and counts, as nobody else does."""


class _Row(Structure):
    """Row of draw.cpp."""

    _fields_ = native.members(
        (c_double, "noise top_p"), (c_float, "temperature min_p"), (c_int64, "top_k"), (c_void_p, "allowed adjustment")
    )


class _Draw(Structure):
    """Draw of draw.cpp."""

    _fields_ = native.members(
        (c_void_p, "logits"),
        (c_int64, "stride vocab_size num_rows"),
        (c_void_p, "rows token_ids"),
    )


def choose(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return a token id (int64 [rows]) per row of fp32 logits [rows, vocab]; -1 for a row that is not finite."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    adjustments = [_adjustment(choice.adjustment) for choice in choices]  # the rows hold their addresses
    rows = (_Row * num_rows)(*map(_row, choices, adjustments))
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    sizes = logits.stride(0), vocab_size, num_rows
    draw = _Draw(logits.data_ptr(), *sizes, addressof(rows), token_ids.data_ptr())
    native.library().native_draw(byref(draw))
    return token_ids


def _adjustment(of: Adjustment | None) -> _Adjustment | None:
    if of is None:
        return None
    counts = of.before.counts()
    arrays = counts.token_ids, counts.counts, of.biased, of.bias, of.banned
    addresses = (values.buffer_info()[0] for values in arrays)
    sizes = len(counts.token_ids), len(of.biased), len(of.banned)
    adjustment = _Adjustment(of.frequency, of.presence, of.repetition, *sizes, *addresses)
    if of.before.draft:
        adjustment.counted = counts
    return adjustment


def _row(choice: Choice, adjustment: _Adjustment | None) -> _Row:
    allowed = choice.allowed
    return _Row(
        *choice[:5],
        None if allowed is None else allowed.ctypes.data,
        None if adjustment is None else addressof(adjustment),
    )
