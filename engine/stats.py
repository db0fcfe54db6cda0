"""Counters of a running engine. Every step sends them; /metrics reports them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_NUM_GAUGES = 4


@dataclass(slots=True)
class EngineStats:
    """First the current gauges, then totals since the engine started. Only Scheduler and Engine change their own."""

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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return these gauges, with the totals of this engine and the earlier one added."""
        totals = [f.name for f in fields(self)][_NUM_GAUGES:]
        return replace(self, **{name: getattr(self, name) + getattr(earlier, name) for name in totals})
