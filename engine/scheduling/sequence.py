"""A request while it is being computed: its tokens, and which of them have keys and values in which blocks.

Knows neither the pool nor the tensors. Scheduler makes and mutates it; batch and sampler read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from gptserve.engine.request import FinishReason, Request
from gptserve.engine.scheduling.blame import NO_BLAME, Blame


class SequenceStatus(Enum):
    """Where a sequence stands. Preempted means WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request's tokens known (prompt, then generated) and computed.

    Invariants while it lives: token_ids only grows; num_computed < len(token_ids), as the newest token is sampled but
    not computed; position p lies in block_ids[p // block_size]. A waiting sequence has no blocks and nothing computed.
    num_cached_tokens is how many prompt tokens the prefix cache held when the sequence was first admitted. queued_at is
    when it arrived, by the scheduler's clock.
    """

    request: Request
    arrival: int
    token_ids: list[int]
    queued_at: float = 0.0
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    blame: Blame = NO_BLAME
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """How many of token_ids came with the request."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """How many of token_ids were sampled."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """How many known tokens have no keys and values yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of service: the smaller is admitted and computed first, and preempted last."""
        return self.request.priority, self.arrival
