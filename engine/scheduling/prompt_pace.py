"""How many prompt tokens a step may compute while other sequences decode, so that prompts do not hold up their streams.

A step takes about as long as one that only decodes, plus a time for each token of its chunks: parts of prompts, and of
sequences that are recomputed. Both are known from running averages of measured steps. Results do not depend on it, as a
sequence's tokens do not depend on how its prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence

MIN_CHUNK_TOKENS = 16  # so that prompts go on, however slow their tokens are
GPU_MIN_CHUNK_TOKENS = 256
"""An H100 computes so many tokens in bf16 in about the time in which it reads the weights. Besides, a step with chunks
is no CUDA graph, so it takes longer whatever their size. In small chunks a prompt, and all streams beside it, would
take many such steps."""
_CHUNK_SHARE = 0.75
"""Chunks may add this share of the time of decoding. It is below 1, as steps vary: of a hundred at most one is to take
more than twice as long as a step that only decodes."""
_WAITING_COUNTS = 4
"""A sequence that waits for its first token counts as so many that wait for their next one. At 1, 32 prompts of 128
tokens at once took a sixth longer than in whole steps, at 4 a fourteenth, with a third longer pauses (p99)."""
_DECODE_WEIGHT = 1 / 4  # of the newest step in an average
_HELD_UP = 2
"""A step counts as at most so many times as long as was expected, as another process may have held it up; one that
follows another such step counts in full."""
_CHUNK_WEIGHT = 1 / 16  # less, as the time of chunks is a difference of two times that vary
_STEPS_BETWEEN = 16  # a step without chunks comes at least so often, so that the time of decoding is known
_STEPS_BETWEEN_IF_CHANGED = 4  # while more or fewer sequences decode than in the last such step, as in a burst
_SAME = 9 / 8  # so many times as many sequences take about as long: a few per cent more
_UNLIMITED = 1 << 30


@dataclass(slots=True)
class Budget:
    """How many tokens a step may still compute, and how many of them in chunks: of sequences that lack several."""

    tokens: int
    chunk_tokens: int = _UNLIMITED

    def has_room_for(self, num_uncomputed: int) -> bool:
        """Whether the step may compute any token of a sequence with so many uncomputed ones.

        One with none is never computed: its last token is on its way.
        """
        return self.tokens > 0 and (num_uncomputed == 1 or (num_uncomputed > 1 and self.chunk_tokens > 0))

    def take(self, num_uncomputed: int) -> int:
        """Return how many of a sequence's uncomputed tokens the step computes; there is room for it."""
        if num_uncomputed == 1:
            self.tokens -= 1
            return 1
        num_tokens = min(num_uncomputed, self.tokens, self.chunk_tokens)
        self.tokens -= num_tokens
        self.chunk_tokens -= num_tokens
        return num_tokens


class Pace:
    """Lets prompts take whole steps."""

    def budget(self, num_tokens: int, num_decoding: int, num_others: int) -> Budget:
        """Return what a step of at most num_tokens tokens may compute.

        num_decoding sequences lack one token, and num_others that may run lack more.
        """
        return Budget(num_tokens)

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from a step that took `seconds`."""


class PromptPace(Pace):
    """Keeps a step with chunks from taking twice as long as one without: chunks get 3/4 of the time of decoding.

    Where more than a few sequences wait for their first token, chunks get 4 x waiting / decoding times that time. So a
    burst of prompts is not computed in small pieces, which take longer, for the sake of a few streams. A step with
    chunks may have min_chunk_tokens of them, even if it then takes longer than twice the time.
    """

    def __init__(self, min_chunk_tokens: int = MIN_CHUNK_TOKENS) -> None:
        self._min_chunk_tokens = min_chunk_tokens
        self._decode_seconds: float | None = None
        self._last_decode_seconds = 0.0  # of the last step without chunks
        self._num_decoding = 0  # in that step
        # Two averages, whose ratio is the time of a token: one of ratios would count a prompt's last few tokens, which
        # take longer each, like a whole chunk.
        self._chunk_seconds: float | None = None
        self._chunk_tokens: float | None = None
        self._num_steps_with_chunks = 0  # since the last one without

    def budget(self, num_tokens: int, num_decoding: int, num_others: int) -> Budget:
        if num_decoding == 0:
            return Budget(num_tokens)
        return Budget(num_tokens, min(self.max_chunk_tokens(num_decoding, num_others), num_tokens - num_decoding))

    def max_chunk_tokens(self, num_decoding: int, num_others: int) -> int:
        """Return how many tokens of chunks take about as long as they may."""
        is_known = self._takes_the_same(num_decoding)
        if self._num_steps_with_chunks >= (_STEPS_BETWEEN if is_known else _STEPS_BETWEEN_IF_CHANGED):
            return 0
        if self._decode_seconds is None or not self._chunk_seconds or self._chunk_tokens is None:
            return _UNLIMITED
        seconds = self._decode_seconds * max(_CHUNK_SHARE, _WAITING_COUNTS * num_others / num_decoding)
        return max(self._min_chunk_tokens, int(seconds * self._chunk_tokens / self._chunk_seconds))

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        num_chunk_tokens = sum([item.num_tokens for item in batch.items if _is_chunk(item)])
        if num_chunk_tokens == 0:
            self._observe_decoding(len(batch.items), seconds)
            self._num_steps_with_chunks = 0
            return
        self._num_steps_with_chunks += 1
        if self._decode_seconds is not None:
            chunk_seconds = max(seconds - self._decode_seconds, 0.0)
            self._chunk_seconds = _average(self._chunk_seconds, chunk_seconds, _CHUNK_WEIGHT)
            self._chunk_tokens = _average(self._chunk_tokens, num_chunk_tokens, _CHUNK_WEIGHT)

    def _observe_decoding(self, num_decoding: int, seconds: float) -> None:
        average, newest = self._decode_seconds, seconds
        if average is not None:
            expected = max(average, self._last_decode_seconds) * max(1.0, num_decoding / self._num_decoding)
            newest = min(seconds, _HELD_UP * expected)
        if not self._takes_the_same(num_decoding):
            average = None
        self._decode_seconds = _average(average, newest, _DECODE_WEIGHT)
        self._last_decode_seconds = seconds
        self._num_decoding = num_decoding

    def _takes_the_same(self, num_decoding: int) -> bool:
        """Whether a step that only decodes so many sequences takes about as long as the last one that only decoded."""
        return num_decoding <= _SAME * self._num_decoding and self._num_decoding <= _SAME * num_decoding


def _is_chunk(item: ScheduledSequence) -> bool:
    return item.num_tokens - len(item.draft) > 1 or not item.needs_sampling


def _average(average: float | None, newest: float, weight: float) -> float:
    return newest if average is None else average + weight * (newest - average)
