"""Counters of a running engine, sent with every step; /metrics shows them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_NUM_GAUGES = 4


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment, then totals since the engine started (tokens unless named otherwise)."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return these gauges, and the totals of this engine and the one before it."""
        totals = [f.name for f in fields(self)][_NUM_GAUGES:]
        return replace(self, **{name: getattr(self, name) + getattr(earlier, name) for name in totals})
