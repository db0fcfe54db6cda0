"""PoolingRequest: a prompt whose hidden states are wanted, not a completion of it.

The engine computes the prompt and answers with one vector, from the states after the final norm. Nothing is sampled.
Torch-free, and frozen like a Request, beside which it is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gptserve.engine.blame import NO_BLAME, Blame
from gptserve.engine.checks import check_number, check_range
from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.info import EngineInfo
from gptserve.engine.request import Request, SamplingParams, too_long
from gptserve.weights.pooling import Pooling

NOTHING_SAMPLED = SamplingParams(max_tokens=1)
"""Stands where a sequence has the parameters of a completion."""


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """One vector to compute: a function of the weights, the prompt and `pooling`.

    - last, cls: the state of the last token, or of the first one.
    - mean: the mean of the states of all tokens, added up in their order in fp64.

    The other fields are those of a Request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    pooling: Pooling
    priority: int = 0
    cache_salt: str = ""
    blame: Blame = NO_BLAME
    is_filler: bool = False

    def __post_init__(self) -> None:
        check_number("priority", self.priority, whole=True, optional=False)
        check_range("priority", self.priority, -(2**31), 2**31 - 1)

    @property
    def may_have_run(self) -> bool:
        """Whether an engine that died may have begun it."""
        return self.blame.num_failures > 0

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether tokens before the last one are read, too, so that a cached prefix is of no use."""
        return self.pooling != "last"

    def check(self, info: EngineInfo) -> None:
        """Raise InvalidRequestError unless an engine with this `info` can compute this request."""
        num_prompt, limit = len(self.prompt_token_ids), info.max_model_len
        if info.task == "generate":
            raise InvalidRequestError("an engine with the task generate gives no vectors", param="input")
        if num_prompt == 0:
            raise InvalidRequestError("input must hold at least one token, got an empty one", param="input")
        if num_prompt > limit:
            message = f"{too_long(limit, 'The input')}; the input has {num_prompt}"
            raise InvalidRequestError(message, param="input", code="context_length_exceeded")
        worst = min(self.prompt_token_ids)
        worst = worst if worst < 0 else max(self.prompt_token_ids)
        if not 0 <= worst < info.vocab_size:
            message = f"input: token ids must be in [0, {info.vocab_size}), got {worst}"
            raise InvalidRequestError(message, param="input")

    def resumed(self, token_ids: Sequence[int], num_scored_tokens: int, blame: Blame) -> PoolingRequest:
        """Return the request for the next engine: it begins again, as nothing of it was sent."""
        return replace(self, blame=blame)


AnyRequest = Request | PoolingRequest
