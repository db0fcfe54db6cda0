"""A request while it is computed, what the next step computes of it, and what the step gave it.

Knows neither the pool nor the tensors. Scheduler makes and changes all of it; runner/batch.py reads it.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from gptserve.engine.blame import NO_BLAME, Blame
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.pooling import NOTHING_SAMPLED, AnyRequest, PoolingRequest
from gptserve.engine.request import FinishReason, Request
from gptserve.engine.sampling.choice import SamplingState
from gptserve.engine.scheduling.state_pool import HeldState
from gptserve.engine.state_place import StatePlace
from gptserve.weights.pooling import Pooling


@dataclass(slots=True, eq=False)
class Pooled:
    """The vector of a sequence of a PoolingRequest, as far as its tokens are computed.

    `vector` is fp32 once the state that it reads is computed. For a mean it is in fp64 the sum of the computed ones.
    """

    pooling: Pooling
    vector: array[float] | None = None


@dataclass(slots=True, eq=False)
class SequenceState:
    """A live request: its known tokens (prompt, then generated) and how many of them are computed.

    Invariants: token_ids only grows. num_computed < len(token_ids): the newest token is not computed yet. The keys and
    values of position p are in block_ids[p // block_size]. A waiting sequence has no blocks and num_computed is 0. One
    that has ended has a finish_reason and no blocks.
    Scheduler.foresee makes exceptions while a step runs: the newest of token_ids may be foreseen, and then counts as
    known, until the real one replaces it; or all are computed, as the token on its way is the last one.
    token_ids may become max_len long; Scheduler sets and reads it. num_prompt_tokens of them came with the request.
    num_scored counts the entries of prompt_logprobs that were sent.
    num_cached_tokens counts the prompt tokens that the prefix cache held when the sequence was first admitted.
    queued_at is its arrival on the scheduler's clock, in seconds, begun_at its first admission.
    matcher follows the request's grammar, if it has one. pooled is there for a PoolingRequest, which samples nothing:
    it ends when its tokens are computed. The sampler keeps what it has counted in `sampling`.
    is_always_foreseeable: the host never needs its newest token to plan a step (foresight.py); Scheduler sets it.
    held: a running sequence has it if layers of the model keep a state.
    """

    request: AnyRequest
    arrival: int
    token_ids: list[int]
    queued_at: float = 0.0
    begun_at: float | None = None
    num_computed: int = 0
    block_ids: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """numpy copies an array of many as fast as memory, a list one by one"""
    max_len: int = 0
    num_prompt_tokens: int = field(init=False)
    num_scored: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    blame: Blame = NO_BLAME
    is_always_foreseeable: bool = False
    finish_reason: FinishReason | None = None
    matcher: Matcher | None = None
    pooled: Pooled | None = None
    held: HeldState | None = None
    sampling: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        request, num_prompt = self.request, len(self.request.prompt_token_ids)
        self.num_prompt_tokens = num_prompt
        if isinstance(request, Request):
            self.sampling = SamplingState(request.params, request.seed, request.choice_index, num_prompt)
        else:
            self.sampling, self.pooled = SamplingState(NOTHING_SAMPLED, 0, 0, num_prompt), Pooled(request.pooling)

    @property
    def is_running(self) -> bool:
        """Whether it has a running slot: admission gives a sequence blocks; preemption and its end take them."""
        return bool(self.block_ids)

    @property
    def is_foreseen(self) -> bool:
        """Whether the newest token is foreseen: ~row, for the token that a running step samples in that row, from 0."""
        return self.token_ids[-1] < 0

    @property
    def num_generated(self) -> int:
        """How many of token_ids were sampled."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """How many known tokens have no keys and values yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether all logits or states of the prompt are wanted, so that none of it may come from the prefix cache."""
        wants_logits = self.sampling.params.prompt_logprobs is not None and self.num_generated == 0
        return wants_logits or (isinstance(self.request, PoolingRequest) and self.request.reads_whole_prompt)

    @property
    def may_have_run(self) -> bool:
        """Whether a waiting sequence may have run before, in this engine or in one that died."""
        return self.num_preemptions > 0 or self.request.may_have_run

    def end_reason(self, eos_token_ids: Set[int]) -> FinishReason | None:
        """Return why the newest token ends it, None if it does not; STOP precedes LENGTH."""
        if self.sampling.params.stops_at(self.token_ids[-1], eos_token_ids):
            return FinishReason.STOP
        return None if len(self.token_ids) < self.max_len else FinishReason.LENGTH

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key of service: the smaller is admitted and computed first, and preempted last."""
        return self.request.is_filler, self.request.priority, self.arrival


@dataclass(slots=True, init=False)
class ScheduledSequence:
    """Compute positions [num_computed, num_computed + num_tokens); the last len(draft) are draft tokens.

    A draft guesses the tokens after all known ones. All positions have blocks. Nobody changes it; it is not frozen, as
    each row of a step makes one, and a frozen one takes three times as long to make.
    """

    sequence: SequenceState
    num_tokens: int
    draft: tuple[int, ...]
    needs_sampling: bool
    """Whether the newest known token is computed, so that its logits give the next one, which is wanted."""
    state: StatePlace | None

    def __init__(
        self, sequence: SequenceState, num_tokens: int, draft: tuple[int, ...] = (), state: StatePlace | None = None
    ) -> None:
        self.sequence, self.num_tokens, self.draft, self.state = sequence, num_tokens, draft, state
        is_last = num_tokens == len(sequence.token_ids) - sequence.num_computed + len(draft)
        self.needs_sampling = is_last and sequence.pooled is None


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step computes, each sequence at most once.

    A sequence may read blocks that another one fills in the same step: each layer stores all keys and values of the
    step before it computes attention. scheduled_at is on the scheduler's clock, in seconds. The blocks in `unfilled`
    may be found already, and have yet to be filled by this step.
    """

    items: tuple[ScheduledSequence, ...]
    scheduled_at: float = field(default=0.0, compare=False)
    unfilled: list[int] = field(default_factory=list, compare=False)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum([item.num_tokens for item in self.items])


class Progress(NamedTuple):
    """The tokens that a step gave a sequence; none if it ended with ERROR.

    finish_reason is set if the sequence ended. stop_token_id is the last token if that one ended it.
    """

    sequence: SequenceState
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
