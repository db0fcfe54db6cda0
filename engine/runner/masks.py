"""What the grammars of a step allow, asked of all its matchers in a thread beside the model. Torch-free.

batch.py asks, and what samples takes the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from gptserve.engine.grammar.matcher import Mask, Matcher

Masks = dict[int, Mask]
"""By sampled row, from 0, of the rows with a grammar."""


class MaskQuery(NamedTuple):
    """Asks for the masks of a sampled row and of one more row for each token of a draft."""

    row: int
    matcher: Matcher
    generated: list[int]
    draft: tuple[int, ...]
    num_before_end: int
    """the fewest tokens before the end of text"""


class MaskThread:
    """Computes the masks of a step in a thread, beside the model: llguidance lets go of the interpreter's lock."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gptserve-masks")

    def begin(self, queries: Sequence[MaskQuery]) -> Future[Masks] | None:
        """Begin to compute the masks; None if there are no queries."""
        return self._thread.submit(_masks_of, queries) if queries else None


def _masks_of(queries: Sequence[MaskQuery]) -> Masks:
    masks: Masks = {}
    for row, matcher, generated, draft, num_before_end in queries:
        masks.update(enumerate(matcher.masks(generated, draft, num_before_end), row))
    return masks
