"""Counters of a running engine. Every step sends them; /metrics reports them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from operator import add, sub
from typing import Any

_NUM_GAUGES = 4

STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""The upper bounds of num_steps_by_tokens; its last entry has the steps over all of them."""


@dataclass(slots=True)
class EngineStats:
    """First the current gauges, then totals since the engine started. Only Scheduler and Engine change their own."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS_BUCKETS) + 1)
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count_step(self, num_tokens: int) -> None:
        """Count a step that computed num_tokens tokens."""
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        counts = list(self.num_steps_by_tokens)  # not in place: the numbers of earlier moments hold it, too
        counts[bisect_left(STEP_TOKENS_BUCKETS, num_tokens)] += 1
        self.num_steps_by_tokens = tuple(counts)

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return these gauges, with the totals of this engine and the earlier one added."""
        totals = [f.name for f in fields(self)][_NUM_GAUGES:]
        return replace(self, **{name: _sum(getattr(self, name), getattr(earlier, name)) for name in totals})

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return these gauges, and what the engine counted after an earlier moment of its own."""
        totals = [f.name for f in fields(self)][_NUM_GAUGES:]
        return replace(self, **{name: _difference(getattr(self, name), getattr(earlier, name)) for name in totals})


def _difference(total: Any, earlier: Any) -> Any:
    return tuple(map(sub, total, earlier)) if isinstance(total, tuple) else total - earlier


def _sum(total: Any, earlier: Any) -> Any:
    return tuple(map(add, total, earlier)) if isinstance(total, tuple) else total + earlier
