"""What the first rank and the others tell each other, over one pipe each."""

from __future__ import annotations

from dataclasses import dataclass

from gptserve.engine.staging import Array


@dataclass(frozen=True, slots=True)
class Loaded:
    """From a rank: its weights are loaded, and it waits for the others."""

    warnings: tuple[str, ...]
    """What it has warned of until now."""


@dataclass(frozen=True, slots=True)
class Memory:
    """From a rank that has met the others: so many bytes are free, and cache and steps may take so many of them."""

    free_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Cache:
    """To a rank: the sizes to allocate; and back, when it has them."""

    num_blocks: int
    max_model_len: int
    has_graphs: bool
    """Whether the ranks are to record decoding steps next (recorded_steps.py)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """From a rank: what keeps it from graphs, None if nothing does; and back: what keeps one of the ranks."""

    obstacle: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """To a rank: compute the layers for these arrays of batch.py."""

    arrays: tuple[Array, ...]
    graph_size: int | None
    """The size of the graph to replay; None: start the kernels one by one."""
    num_torch_threads: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank, its last message: why it ends."""

    cause: str
