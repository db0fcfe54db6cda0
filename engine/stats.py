"""Counters of a running engine, sent with every step; /metrics shows them."""

from __future__ import annotations

from dataclasses import dataclass


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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
