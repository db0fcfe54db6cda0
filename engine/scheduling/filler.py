"""How many tokens of fillers a step computes beside other sequences, so that their streams hardly notice.

A filler is a request that waits behind all others, such as a line of a batch (Request.is_filler). Where only fillers
run they have whole steps. Beside others they add a small share to a step's time, by what is measured on this machine.
Results do not depend on it. Torch-free; Scheduler asks.
"""

from __future__ import annotations

from gptserve.engine.scheduling.sequence import ScheduledBatch

_SHARE = 0.15  # of a step's time; 0.3 is what a stream's slowest hundredth may lose, and steps vary
_WEIGHT = 1 / 8  # of the newest step in an average
_HELD_UP = 4  # a step counts as at most so many times as long as the average, as another process may have held it up
_STEPS_BETWEEN = 16  # a step without fillers comes at least so often, so that its time is known
_LEAST_EVERY = 128
"""Where no token fits, one comes in so many steps: fewer than a hundredth of all, and fillers go on."""
_UNLIMITED = 1 << 30


class FillerRoom:
    """Measures steps with and without fillers."""

    def __init__(self) -> None:
        self._plain_seconds: float | None = None
        self._num_plain_items = 0
        self._token_seconds: float | None = None
        self._num_filled = 0  # steps in a row
        self._num_unfilled = 0

    def max_tokens(self, num_others: int) -> int:
        """Return how many tokens of fillers a step may have beside so many other sequences."""
        if num_others == 0:
            return _UNLIMITED
        if self._plain_seconds is None or num_others != self._num_plain_items or self._num_filled >= _STEPS_BETWEEN:
            return int(self._num_unfilled >= _LEAST_EVERY)
        if self._token_seconds is None:
            return 1
        fitting = int(min(_SHARE * self._plain_seconds / max(self._token_seconds, 1e-9), _UNLIMITED))
        return max(fitting, int(self._num_unfilled >= _LEAST_EVERY))

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        others = [item for item in batch.items if not item.sequence.request.is_filler]
        num_tokens = sum(item.num_tokens for item in batch.items) - sum(item.num_tokens for item in others)
        if not others:
            return
        if num_tokens == 0:
            self._num_filled, self._num_unfilled = 0, self._num_unfilled + 1
            if all(item.num_tokens - len(item.draft) == 1 for item in others):
                known = self._plain_seconds if len(others) == self._num_plain_items else None
                self._plain_seconds = _average(known, seconds)
                self._num_plain_items = len(others)
            return
        self._num_filled, self._num_unfilled = self._num_filled + 1, 0
        if self._plain_seconds is not None and len(others) == self._num_plain_items:
            added = max(seconds - self._plain_seconds, 0.0) / num_tokens
            self._token_seconds = _average(self._token_seconds, added)


def _average(average: float | None, newest: float) -> float:
    if average is None:
        return newest
    return average + _WEIGHT * (min(newest, _HELD_UP * average + 1e-6) - average)
