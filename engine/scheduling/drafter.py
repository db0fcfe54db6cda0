"""Drafts: guesses at the next tokens of a sequence, all of which one step verifies.

A wrong guess costs time and never a token: Scheduler has the step sample behind every token of a draft, as it would
have without it, and keeps what agrees. `PromptLookup` guesses from the sequence itself; a drafter with a model would
stand beside it. Torch-free; Scheduler calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gptserve.engine.scheduling.sequence import SequenceState

MIN_NGRAM = 2
"""A single token recurs all the time and says little about what follows."""
MAX_NGRAM = 8
"""Longer ones single out no better place, and each length costs an index entry a token."""

INDEXED_AT_ONCE = 4096
"""Tokens; some milliseconds, for which everybody's step waits."""


class Drafter(Protocol):
    """Guesses what follows the known tokens of a sequence."""

    def draft(self, sequence: SequenceState, most: int) -> tuple[int, ...]:
        """Return at most `most` (at least 1) token ids of the model's vocabulary, none where there is no guess."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is kept for a sequence that has ended; it may never have been drafted for."""


@dataclass(slots=True)
class _Index:
    """Where each n-gram last ended: token_ids[end - n : end] -> end, for every end < num_known."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_known: int = 0


class PromptLookup:
    """Guesses that what followed the last n tokens before follows again (prompt lookup decoding, Saxena 2023).

    n is `longest`, or the nearest below, down to MIN_NGRAM, with which the last n tokens of prompt and completion
    stand earlier among them; the latest such place counts. A draft that reaches the end of the known tokens goes on
    with itself, as a copy in LZ77 does, so that a loop is guessed as a loop.

    A draft costs O(longest) for each token that is new since the last one, of which it enters INDEXED_AT_ONCE at most:
    there are no guesses until a longer prompt is known by so many a step. The index takes some
    hundred bytes a token and length, small against the token's keys and values, and goes with its sequence.
    """

    def __init__(self, longest: int) -> None:
        assert MIN_NGRAM <= longest <= MAX_NGRAM
        self._lengths = range(longest, MIN_NGRAM - 1, -1)
        self._indices: dict[SequenceState, _Index] = {}

    def draft(self, sequence: SequenceState, most: int) -> tuple[int, ...]:
        token_ids = sequence.token_ids
        index = self._indices.setdefault(sequence, _Index())
        self._extend(index, token_ids)
        if index.num_known < len(token_ids):
            return ()
        for n in self._lengths:
            end = index.ends.get(tuple(token_ids[-n:]))
            if end is not None:
                period = len(token_ids) - end
                return tuple(token_ids[end + i % period] for i in range(most))
        return ()

    def forget(self, sequence: SequenceState) -> None:
        self._indices.pop(sequence, None)

    def _extend(self, index: _Index, token_ids: list[int]) -> None:
        """Enter the n-grams that end before the last token; the last ones themselves are what is looked for."""
        num_known = min(len(token_ids), index.num_known + INDEXED_AT_ONCE)
        for end in range(index.num_known, num_known):
            for n in self._lengths:
                if n <= end:
                    index.ends[tuple(token_ids[end - n : end])] = end
        index.num_known = num_known
