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


class Choice(NamedTuple):
    """How to choose the token of a row: by noise in [0, 1), or greedily where temperature is 0.

    top_k 0, top_p 1 and min_p 0 are off. Only `allowed` tokens are chosen, if there is such a mask.
    """

    noise: float = 0.0
    top_p: float = 1.0
    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    allowed: Mask | None = None


class _Row(Structure):
    """Row of draw.cpp."""

    _fields_ = native.members(
        (c_double, "noise top_p"), (c_float, "temperature min_p"), (c_int64, "top_k"), (c_void_p, "allowed")
    )


class _Draw(Structure):
    """Draw of draw.cpp."""

    _fields_ = native.members(
        (c_void_p, "logits"),
        (c_int64, "stride vocab_size num_rows"),
        (c_void_p, "rows token_ids scratch"),
        (c_int64, "scratch_stride num_threads"),
    )


def choose(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return a token id (int64 [rows]) per row of fp32 scores [rows, vocab]; -1 for a row that is not finite."""
    num_rows, vocab_size = scores.shape
    assert scores.dtype is torch.float32 and scores.stride(1) == 1
    library, num_threads = native.library(), native.num_threads()
    rows = (_Row * num_rows)(*map(_row, choices))
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    scratch = torch.empty(num_threads, library.native_draw_scratch(vocab_size))
    draw = _Draw(
        *(scores.data_ptr(), scores.stride(0), vocab_size, num_rows),
        *(addressof(rows), token_ids.data_ptr()),
        *(scratch.data_ptr(), scratch.stride(0), num_threads),
    )
    library.native_draw(byref(draw))
    return token_ids


def _row(choice: Choice) -> _Row:
    allowed = choice.allowed
    return _Row(*choice[:-1], None if allowed is None else allowed.ctypes.data)
