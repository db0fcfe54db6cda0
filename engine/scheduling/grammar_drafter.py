"""Drafts from grammars: where a grammar allows only one text, its tokens are guessed and verified in one step."""

from __future__ import annotations

from gptserve.engine.scheduling.drafter import Drafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState


class GrammarDrafter(Drafter):
    """Guesses the text that a sequence's grammar forces; where it forces none, it asks `other`.

    The model may cut the text into other tokens than the longest, so this is a guess like any other draft.
    """

    def __init__(self, other: Drafter) -> None:
        self.max_step_tokens = other.max_step_tokens
        self._other = other

    def begin_step(self, num_seqs: int) -> None:
        self._other.begin_step(num_seqs)

    def may_draft(self, sequence: SequenceState) -> bool:
        return sequence.matcher is not None or self._other.may_draft(sequence)

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        if sequence.matcher is not None:
            forced = sequence.matcher.forced(sequence.token_ids[sequence.num_prompt_tokens :], max_tokens)
            if forced:
                return tuple(forced)
        return self._other.draft(sequence, max_tokens)

    def note(self, sequence: SequenceState, num_drafted: int, num_held: int) -> None:
        self._other.note(sequence, num_drafted, num_held)

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        self._other.observe(batch, seconds)

    def forget(self, sequence: SequenceState) -> None:
        self._other.forget(sequence)
