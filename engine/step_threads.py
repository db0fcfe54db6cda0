"""How many threads each step uses: few for little work, and fewer while other processes keep the CPUs busy.

The threads of a step meet at some 75 barriers. Where one of them has to wait for a CPU, all of them wait, and a step
on all threads takes longer than on one. Other processes cannot be seen everywhere, so steps are timed: the number of
threads is halved when half of them are known to be faster, and doubled again after a trial that pays. It knows no
torch and sets nothing. ModelRunner calls it around every step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.memory import parameter_counts
from engine.schedule import ScheduledBatch
from weights.config import ModelConfig

WORK_PER_THREAD = 150_000_000
"""Units of `StepWork` that pay for each thread, some 1.2 ms on one. So storyteller decodes up to 32 sequences on one
thread: a second one gains 3 to 9 % in its fastest steps, and makes a step several times slower where a core is busy. A
step of GPT-2 124M that decodes one token, 3.2 billion units, may use 21."""

_ROWS_OF_A_READ = 24
"""Reading a weight from memory takes as long as multiplying it with so many rows: 14 to 35 were measured."""
_ATTENTION_COST = 8
"""A multiplication of attention takes as long as some 8 of the packed linears."""
_DRAW_COST = 2000
"""Drawing a token takes as long as so many multiplications for each entry of the vocabulary: 0.6 to 1 ms of 50,257."""

_NUM_SAMPLES = 4
"""The best of so many timings counts: what delays a step now and then is no measure of its threads."""
_MAX_AGE = 128
"""Steps after which the smaller number of threads is timed again; on two idle cores this costs 0.5 % of the speed."""
_NUM_PROOFS = 2
"""Steps in a row that must be slow, or fast, before the number of threads changes: one alone may be chance."""
_GAIN = 0.9
"""More threads must take less than this share of the time: they take CPUs from others."""
_BUSY = 2.0
"""Steps that take more than so many times their best show that the CPUs are busy, which concerns steps of all sizes."""
_MIN_PAUSE, _MAX_PAUSE = 2.0, 32.0
"""The next trial comes after so many times the duration of the step that failed: trials of a size cost at most 3 %."""


class StepWork:
    """The size of a step in multiplications of the linears, roughly: only sizes within a factor of two are compared."""

    def __init__(self, model: ModelConfig) -> None:
        counts = parameter_counts(model)
        self._head = counts["head"]
        if model.tied_head:
            self._head += model.vocab_size * (model.embed_size or model.hidden_size)
        self._blocks = counts["attention"] + counts["feed-forward"]
        if model.experts is not None:
            num_idle = model.experts.num - model.experts.num_active
            self._blocks -= counts["feed-forward"] * num_idle // model.experts.num
        self._attention = _ATTENTION_COST * 2 * model.num_layers * model.num_heads * model.head_size
        self._draw = _DRAW_COST * model.vocab_size

    def of(self, batch: ScheduledBatch) -> int:
        """Return the size of this step."""
        num_logits = num_draws = num_pairs = 0
        for item in batch.items:
            params, num_sampled = item.sequence.request.params, item.samples * (1 + len(item.draft))
            has_scores = params.prompt_logprobs is not None and not item.sequence.num_generated
            num_logits += item.num_tokens if has_scores else num_sampled
            num_draws += num_sampled if params.temperature > 0 else 0
            num_pairs += item.num_tokens * (item.sequence.num_computed + item.num_tokens)
        head = self._head * (_ROWS_OF_A_READ + num_logits) if num_logits else 0
        blocks = self._blocks * (_ROWS_OF_A_READ + batch.num_tokens)
        return blocks + head + self._attention * num_pairs + self._draw * num_draws


class StepThreads:
    """Chooses from 1, ..., max_threads / 2, max_threads; call `begin` before a step and `end` after one that succeeded.

    Its choices depend on nothing but the sizes of the steps and `clock`, which counts seconds. Steps are judged among
    those of their size: more threads may pay for a prompt and not for a token. But when steps in a row take several
    times their best, all sizes give way at once, and when a trial pays for one, all try again.
    """

    def __init__(self, max_threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._widths = [max_threads]
        while self._widths[0] > 1:
            self._widths.insert(0, self._widths[0] // 2)
        self._sizes: dict[int, _Size] = {}
        self._level = len(self._widths) - 1
        self._size: _Size | None = None
        self._work, self._start = 1, 0.0
        self._num_busy = 0

    def begin(self, work: int) -> int:
        """Return the number of threads for a step of this size."""
        useful = max(1, work // WORK_PER_THREAD)
        top = max(level for level, width in enumerate(self._widths) if width <= useful)
        self._size = None
        if top == 0:
            return 1
        self._work, self._start = work, self._clock()
        # What is busy for the last step's size is likely busy for one not seen before.
        self._size = self._sizes.setdefault(work.bit_length(), _Size(self._level))
        return self._widths[self._size.choose(top, self._start)]

    def end(self) -> None:
        """Take the time of the step that has just been computed."""
        size, now = self._size, self._clock()
        if size is None:
            return
        rate, before = (now - self._start) / self._work, size.level
        slowdown = rate / size.timings[size.used].best
        size.judge(rate, now - self._start, now)
        if size.level > before:
            for other in self._sizes.values():
                other.retry_at = now
        elif size.used == size.base > 0:
            self._num_busy = self._num_busy + 1 if slowdown > _BUSY else 0
            if self._num_busy == _NUM_PROOFS:
                self._num_busy = 0
                for other in self._sizes.values():
                    other.give_way(size.used - 1, slowdown, now)
        self._level = size.level


@dataclass(slots=True)
class _Size:
    """The steps of one size, within a factor of two. `level` is the index of their number of threads.

    The step under way uses `used`: `base` is what it would use, one less times fewer threads, one more is a trial.
    """

    level: int
    timings: defaultdict[int, _Timings] = field(default_factory=lambda: defaultdict(_Timings))
    base: int = 0
    used: int = 0
    num_slow: int = 0
    num_fast: int = 0
    pause: float = _MIN_PAUSE
    pause_s: float = 0.0
    retry_at: float = -math.inf
    seconds: float = 0.0

    def choose(self, top: int, now: float) -> int:
        """Return the level of the next step; its work pays for no more than `top`."""
        self.used = self.base = min(self.level, top)
        if self.base < top and now >= self.retry_at and self.timings[self.base].rates:
            self.used += 1
        elif self.base > 0 and self.timings[self.base - 1].is_due:
            self.used -= 1
        return self.used

    def judge(self, rate: float, seconds: float, now: float) -> None:
        """Take what the step took, in seconds and in seconds for a unit of work, and change the level by it."""
        self.timings[self.used].add(rate)
        self.seconds = seconds
        if self.used > self.base:
            is_fast = rate < _GAIN * self.timings[self.base].best
            self.num_fast = self.num_fast + 1 if is_fast else 0
            if not is_fast:
                self._wait(seconds, now)
            elif self.num_fast == _NUM_PROOFS:
                self.level, self.num_fast = self.used, 0
        elif self.used == self.base > 0:
            fewer = self.timings[self.base - 1]
            fewer.age += 1
            self.num_slow = self.num_slow + 1 if rate > fewer.best else 0
            if self.num_slow == _NUM_PROOFS:
                self.level, self.num_slow = self.base - 1, 0
                if now - self.retry_at > self.pause_s:  # it was fast for longer than it was avoided: this is news
                    self.pause = _MIN_PAUSE
                self._wait(seconds, now)

    def give_way(self, level: int, slowdown: float, now: float) -> None:
        """Go down to the level, as steps of another size took so many times their best above it."""
        if self.level > level:
            self.level, self.num_slow = level, 0
            self.pause = _MAX_PAUSE
            self._wait(slowdown * self.seconds, now)

    def _wait(self, seconds: float, now: float) -> None:
        """Put the next trial off; `seconds` is what the step took that has shown it to be too early."""
        self.pause_s = self.pause * seconds
        self.retry_at = now + self.pause_s
        self.pause = min(2 * self.pause, _MAX_PAUSE)


@dataclass(slots=True)
class _Timings:
    """The latest seconds a unit of work took in steps of one size, and how many steps ago that was."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    age: int = 0

    @property
    def best(self) -> float:
        """The least of the latest; infinity before there is one."""
        return min(self.rates, default=math.inf)

    @property
    def is_due(self) -> bool:
        """Whether to take another: soon after the first ones, which may be off, and seldom later."""
        return self.age >= min(1 << 2 * len(self.rates), _MAX_AGE)

    def add(self, rate: float) -> None:
        """Take one more."""
        self.rates.append(rate)
        self.age = 0
