"""Drafts: guesses at the next tokens of a sequence. One step verifies a whole draft.

A wrong guess costs time and never changes a token: verifying a draft gives exactly the tokens that plain decoding
gives. `PromptLookup` guesses from the sequence itself; a drafter with a model would stand beside it. Torch-free;
Scheduler calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gptserve.engine.scheduling.ngram import MAX_NGRAM, MIN_NGRAM
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState

MAX_DRAFTING_STEP_TOKENS = 12
"""Up to this many tokens a step takes only as long as reading its weights, so verifying a draft is nearly free
(bench/speculation.py). With more, drafts would delay the step for all sequences."""
INDEXED_A_STEP = 1024
"""Tokens. Indexing them takes 1 to 4 milliseconds, by which the step of all sequences is delayed."""


class Drafter:
    """Guesses what follows the known tokens of a sequence. This one never does; others override what they need."""

    max_step_tokens = MAX_DRAFTING_STEP_TOKENS
    """A step with drafts computes at most this many tokens, drafts included."""

    def begin_step(self, num_seqs: int) -> None:
        """Be told that the drafts of another step, of so many sequences, are asked for."""

    def may_draft(self, sequence: SequenceState) -> bool:
        """Whether `draft` may ever guess a token of a sequence, and reads its tokens for that."""
        return False

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        """Return 0 to max_tokens token ids of the model's vocabulary; max_tokens is at least 1."""
        return ()

    def note(self, sequence: SequenceState, num_drafted: int, num_held: int) -> None:
        """Learn how many tokens of a draft of the newest step held."""

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from a step that took `seconds`."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop the state of a sequence that has ended, if there is any."""


@dataclass(slots=True)
class _Index:
    """Where each n-gram last ended: token_ids[end - n : end] -> end, for every end < num_known."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_known: int = 0


class PromptLookup(Drafter):
    """Guesses that what followed the last n tokens before follows again (prompt lookup decoding, Saxena 2023).

    n is the largest in [MIN_NGRAM, max_ngram] for which the last n tokens of prompt and completion occur earlier among
    them. The latest such place counts. A draft that reaches the end of the known tokens continues with its own first
    tokens, as a copy in LZ77 does: a loop is guessed as a loop.

    A draft costs O(max_ngram) for each token that is not indexed yet. A step indexes at most INDEXED_A_STEP tokens;
    until all of a sequence are indexed there are no guesses for it. The index takes some hundred bytes for each token
    and n, little beside the token's keys and values. `forget` drops it.
    """

    def __init__(self, max_ngram: int) -> None:
        assert MIN_NGRAM <= max_ngram <= MAX_NGRAM
        self._lengths = range(max_ngram, MIN_NGRAM - 1, -1)
        self._indices: dict[SequenceState, _Index] = {}
        self._num_left = INDEXED_A_STEP

    def begin_step(self, num_seqs: int) -> None:
        self._num_left = INDEXED_A_STEP

    def may_draft(self, sequence: SequenceState) -> bool:
        return True

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        token_ids = sequence.token_ids
        index = self._indices.setdefault(sequence, _Index())
        self._extend(index, token_ids)
        if index.num_known < len(token_ids):
            return ()
        for n in self._lengths:
            end = index.ends.get(tuple(token_ids[-n:]))
            if end is not None:
                period = len(token_ids) - end
                return tuple(token_ids[end + i % period] for i in range(max_tokens))
        return ()

    def forget(self, sequence: SequenceState) -> None:
        self._indices.pop(sequence, None)

    def _extend(self, index: _Index, token_ids: list[int]) -> None:
        """Index the n-grams that end before the last token; those that end with it are looked up."""
        num_known = min(len(token_ids), index.num_known + self._num_left)
        self._num_left -= num_known - index.num_known
        for end in range(index.num_known, num_known):
            for n in self._lengths:
                if n <= end:
                    index.ends[tuple(token_ids[end - n : end])] = end
        index.num_known = num_known
