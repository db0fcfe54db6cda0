"""A completion that goes on after tokens that its client has: `generated_token_ids`, one list for each choice.

`plan.py` checks the lists and gives them to the requests. `run.py` adds the tokens to the choices before those that the
engine computes, so text, stop strings, offsets, calls of tools and counts go on as if it had computed all of them.
Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.info import EngineInfo
from gptserve.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from gptserve.server.schemas.completions import GenerationRequest
from gptserve.server.schemas.seed import DRAW

FIELD = "generated_token_ids"
_UNKNOWN = TokenLogprobs(0, 0.0, 0)  # the client has its entry, and nobody reads this one


def continue_requests(
    body: GenerationRequest, requests: Sequence[Request], info: EngineInfo, *, batch_invariant: bool
) -> tuple[Request, ...]:
    """Return the requests, each to go on after its list of the body's tokens, if there are any.

    Raises InvalidRequestError.
    """
    given = body.generated_token_ids
    if given is None or not requests:  # there are none of a completion whose tokens cannot be read any more
        return tuple(requests)
    _check_exact(body, requests[0], batch_invariant=batch_invariant)
    if len(given) != len(requests):
        raise _fault(f"{FIELD} must hold {len(requests)} lists, one for each choice, got {len(given)}")
    for index, token_ids in enumerate(given):
        most = requests[index].params.max_tokens
        if len(token_ids) > most:
            raise _fault(f"{FIELD}[{index}] may hold at most max_tokens, which is {most}, got {len(token_ids)}")
        worst = next((token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size), None)
        if worst is not None:
            raise _fault(f"{FIELD}[{index}]: token ids must be in [0, {info.vocab_size}), got {worst}")
    return tuple(
        replace(request, generated_token_ids=tuple(token_ids), num_given_tokens=len(token_ids))
        for request, token_ids in zip(requests, given, strict=True)
    )


def given_output(request: Request, info: EngineInfo) -> TokenOutput:
    """Return the tokens that the client has of a choice as one output, with the end of the choice if they reach it."""
    token_ids, params = request.generated_token_ids, request.params
    stops = params.stops_at(token_ids[-1], info.eos_token_ids)
    reason = FinishReason.STOP if stops else FinishReason.LENGTH if len(token_ids) == params.max_tokens else None
    scores = () if params.logprobs is None else (_UNKNOWN,) * len(token_ids)
    return TokenOutput(request.request_id, token_ids, scores, None, reason, token_ids[-1] if stops else None)


def check_end(request: Request, index: int, num_tokens: int, info: EngineInfo) -> None:
    """Raise InvalidRequestError if tokens come after the one that ended a choice, whose text has num_tokens."""
    token_ids, params = request.generated_token_ids, request.params
    before = token_ids[: num_tokens - 1]
    if (end := next((i for i, t in enumerate(before, 1) if params.stops_at(t, info.eos_token_ids)), num_tokens)) < len(
        token_ids
    ):
        raise _fault(f"{FIELD}[{index}] must not go on after the choice ends, with token {end}, got {len(token_ids)}")


def _check_exact(body: GenerationRequest, request: Request, *, batch_invariant: bool) -> None:
    """Raise InvalidRequestError unless what follows is sure to be what came after these tokens before."""
    if body.seed in (None, DRAW):
        raise _fault(f"{FIELD} may be given only with the seed of the answer that had the tokens, got none")
    if request.params.prompt_logprobs is not None:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "echo and logprobs"
        raise _fault(f"{FIELD} may not be given with {name}, as the prompt is not scored again")
    if not batch_invariant:
        raise _fault(f"{FIELD} may not be given, as batch_invariant is false: other tokens could follow")


def _fault(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=FIELD)
