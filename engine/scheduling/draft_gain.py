"""How many tokens of a draft are worth their rows in a step: by what is measured on this machine and of this sequence.

A draft of k tokens adds k rows to a step. Its last token holds only if all before it do: with the probability q^k,
where q is the share of guesses of the sequence that held. It then spares a token's share of a step without drafts. So
the k-th token pays while q^k > row seconds / (step seconds / sequences). Results do not depend on it, as verifying a
draft changes no token. Torch-free; Scheduler asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptserve.engine.scheduling.drafter import Drafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState

_FIRST_ODDS = 0.9
"""Until guesses are known nearly all are taken to hold, so that the first draft is a long one."""
_NUM_GUESSED = 2.0
"""A new sequence is taken for one of which so many guesses are known, with the odds of all sequences together."""
_MOST_GUESSES, _MOST_OF_ALL = 32.0, 256.0
"""Older guesses count half as soon as there are more, as a text that recurs may follow one that does not."""
_FIRST_WAIT, _LAST_WAIT = 64, 1024
"""Once no token pays, so many steps of the sequence go without, and twice as many after each trial that fails."""
_TRIAL_TOKENS = 4
_LONGEST = 64  # longer than any step has room for
_UNKNOWN_COST = 1 / 16
"""Of a row, as a share of a token's, until it is measured."""
_WEIGHT = 1 / 16  # of the newest step in an average
_STEPS_TO_PLAIN = 8
"""As many steps with drafts come first where a step without has not been measured. One is measured anew after
_PLAIN_LASTS of them."""
_PLAIN_LASTS = 256
_HELD_UP = 4
"""A step that takes so many times as long as the average is not counted: another process held it up."""
_HELD_UP_IN_A_ROW = 4
"""After so many of them steps take that long."""


@dataclass(slots=True)
class _Guesses:
    """Of one sequence. `wait` is how many steps go without drafts, num_waited how many of them have."""

    held: float
    made: float
    most: float = _MOST_GUESSES
    wait: int = 0
    num_waited: int = 0
    is_new: bool = True

    def add(self, num_drafted: int, num_held: int) -> None:
        """Count the guesses of a draft up to the first that did not hold."""
        self.held += num_held
        self.made += min(num_drafted, num_held + 1)
        if self.made > self.most:
            self.held, self.made = self.held / 2, self.made / 2
        self.is_new = False


@dataclass(slots=True)
class _Steps:
    """Of about as many sequences. Seconds and rows are averages: of a step without drafts, and what drafts add."""

    plain_seconds: float | None = None
    extra_seconds: float = 0.0
    extra_rows: float = 0.0
    num_drafting: int = 0  # since the last step without drafts
    num_held_up: int = 0  # steps without drafts, in a row


class DraftGain:
    """Learns from steps and their drafts how long a draft should be."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._guesses: dict[SequenceState, _Guesses] = {}
        self._all = _Guesses(_FIRST_ODDS * _NUM_GUESSED, _NUM_GUESSED, _MOST_OF_ALL)

    def wants_plain(self, num_seqs: int) -> bool:
        """Whether the next step of so many sequences should have no drafts, to be measured."""
        steps = self._of(num_seqs)
        return steps.num_drafting >= (_STEPS_TO_PLAIN if steps.plain_seconds is None else _PLAIN_LASTS)

    def max_tokens(self, sequence: SequenceState, num_seqs: int) -> int:
        """Return the most tokens that a draft of a sequence in a step of so many should have; 0: none."""
        guesses = self._guesses_of(sequence)
        if guesses.num_waited < guesses.wait:
            guesses.num_waited += 1
            return 0
        pays = _worth(guesses.held / guesses.made, self._cost(num_seqs))
        if pays == 0 and guesses.wait == 0:
            guesses.wait, guesses.num_waited = _FIRST_WAIT, 1
            return _TRIAL_TOKENS if guesses.is_new else 0
        return pays or _TRIAL_TOKENS

    def note(self, sequence: SequenceState, num_drafted: int, num_held: int, num_seqs: int) -> None:
        """Learn how many tokens of a draft held, in a step of so many sequences."""
        guesses = self._guesses_of(sequence)
        guesses.add(num_drafted, num_held)
        self._all.add(num_drafted, num_held)
        if guesses.wait:
            pays = _worth(guesses.held / guesses.made, self._cost(num_seqs)) > 0
            guesses.wait, guesses.num_waited = 0 if pays else min(2 * guesses.wait, _LAST_WAIT), 0

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from a step that took `seconds`, unless it computed other than the newest tokens and drafts."""
        if any(item.num_tokens - len(item.draft) != 1 for item in batch.items):
            return
        steps, num_rows = self._of(len(batch.items)), sum([len(item.draft) for item in batch.items])
        plain = steps.plain_seconds
        if num_rows == 0:
            steps.num_drafting = 0
            steps.num_held_up = 0 if plain is None or seconds < _HELD_UP * plain else steps.num_held_up + 1
            if steps.num_held_up == 0:
                steps.plain_seconds = _average(plain, seconds)
            elif steps.num_held_up == _HELD_UP_IN_A_ROW:
                steps.plain_seconds, steps.num_held_up = seconds, 0
            return
        steps.num_drafting += 1
        if plain is not None and seconds < _HELD_UP * plain * (1 + num_rows):
            steps.extra_seconds = _average(steps.extra_seconds, seconds - plain)
            steps.extra_rows = _average(steps.extra_rows, num_rows)

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is known of a sequence that has ended."""
        self._guesses.pop(sequence, None)

    def _guesses_of(self, sequence: SequenceState) -> _Guesses:
        guesses = self._guesses.get(sequence)
        if guesses is None:
            held = _NUM_GUESSED * self._all.held / self._all.made
            guesses = self._guesses[sequence] = _Guesses(held, _NUM_GUESSED)
        return guesses

    def _cost(self, num_seqs: int) -> float:
        """Return how many tokens a step without drafts would give in the time that a row of a draft takes."""
        steps = self._of(num_seqs)
        if not steps.extra_rows or not steps.plain_seconds:
            return _UNKNOWN_COST
        return max(0.0, steps.extra_seconds / steps.extra_rows) * num_seqs / steps.plain_seconds

    def _of(self, num_seqs: int) -> _Steps:
        """Return what is known of steps of about so many sequences: up to the next power of two."""
        return self._steps.setdefault((num_seqs - 1).bit_length(), _Steps())


class MeasuredDrafter(Drafter):
    """Asks another drafter for as many tokens as pay. What did not come from it, such as forced texts, it passes by."""

    def __init__(self, other: Drafter) -> None:
        self.max_step_tokens = other.max_step_tokens
        self._other, self._gain = other, DraftGain()
        self._num_seqs, self._is_plain = 1, False
        self._drafted: set[SequenceState] = set()  # in the newest step

    def begin_step(self, num_seqs: int) -> None:
        self._num_seqs, self._is_plain = num_seqs, self._gain.wants_plain(num_seqs)
        self._drafted.clear()
        self._other.begin_step(num_seqs)

    def may_draft(self, sequence: SequenceState) -> bool:
        return self._other.may_draft(sequence)

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        max_tokens = 0 if self._is_plain else min(max_tokens, self._gain.max_tokens(sequence, self._num_seqs))
        draft = self._other.draft(sequence, max_tokens) if max_tokens else ()
        if draft:
            self._drafted.add(sequence)
        return draft

    def note(self, sequence: SequenceState, num_drafted: int, num_held: int) -> None:
        if sequence in self._drafted:
            self._gain.note(sequence, num_drafted, num_held, self._num_seqs)

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        self._gain.observe(batch, seconds)

    def forget(self, sequence: SequenceState) -> None:
        self._gain.forget(sequence)
        self._drafted.discard(sequence)
        self._other.forget(sequence)


def _worth(odds: float, cost: float) -> int:
    """Return how many tokens of a draft pay, 0 to _LONGEST: the largest k with odds^k > cost."""
    if odds <= cost:
        return 0
    if cost <= 0 or odds >= 1:
        return _LONGEST
    return min(_LONGEST, max(1, math.ceil(math.log(cost) / math.log(odds)) - 1))


def _average(average: float | None, newest: float) -> float:
    return newest if not average else average + _WEIGHT * (newest - average)
