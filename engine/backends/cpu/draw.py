"""Choosing tokens on a CPU in one call of the compiled library: csrc/draw.cpp.

sampling/choice.py defines the results. runner/sampler.py and runner/program_steps.py call this where the library is
there; reference/draw.py is its slow twin, and the tests compare the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import Structure, addressof, c_double, c_float, c_int64, c_void_p
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.sampling.token_counts import TokenCounts


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


_ROW = Struct("2d2fq2P")
"""Row of draw.cpp, whose first numbers are those of Choice, in their order."""
_DRAW = Struct("P3q2P")
"""Draw of draw.cpp."""


class LogitsAt(NamedTuple):
    """Where fp32 logits [rows, vocab_size] lie in memory; row i is i * stride elements from the address."""

    address: int
    stride: int
    vocab_size: int

    @classmethod
    def of(cls, logits: Tensor) -> LogitsAt:
        """Return where a tensor lies, which the caller keeps alive."""
        assert logits.dtype is torch.float32 and logits.stride(1) == 1 and logits.device.type == "cpu"
        return cls(logits.data_ptr(), logits.stride(0), logits.shape[1])


def choose(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return a token id (int64 [rows]) per row of fp32 logits [rows, vocab]; -1 for a row that is not finite."""
    assert len(logits) == len(choices)
    return torch.tensor(draw(LogitsAt.of(logits), choices), dtype=torch.int64)


def draw(logits: LogitsAt, choices: Sequence[Choice]) -> array[int]:
    """Return the ids of `choose`, a choice for each row. It calls nothing of torch, for program_steps.py."""
    adjustments = [_adjustment(choice.adjustment) for choice in choices]  # the rows hold their addresses
    rows = array("B", b"".join(map(_row, choices, adjustments)))
    token_ids = array("q", bytes(8 * len(choices)))
    call = array("B", _DRAW.pack(*logits, len(choices), rows.buffer_info()[0], token_ids.buffer_info()[0]))
    native.library().native_draw(call.buffer_info()[0])
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


def _row(choice: Choice, adjustment: _Adjustment | None) -> bytes:
    noise, top_p, temperature, min_p, top_k, allowed, _ = choice
    return _ROW.pack(
        *(noise, top_p, temperature, min_p, min(top_k, 2**63 - 1)),
        0 if allowed is None else allowed.ctypes.data,
        0 if adjustment is None else addressof(adjustment),
    )
