"""Logprobs on a CPU in one call of the compiled library, csrc/logprobs.cpp, without copies of the logits.

reference/logprobs.py is its slow twin.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from struct import Struct

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.draw import LogitsAt
from gptserve.engine.request import TokenLogprobs

_SCORES = Struct("P4q7P")
"""Scores of logprobs.cpp."""


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
