"""How long a completion may be: max_tokens beside the prompt, in the context.

`plan.py` and `chat.py` call it. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import Request, SamplingParams
from gptserve.server.completions.service import Service
from gptserve.server.schemas.completions import ChatRequest, GenerationRequest

Overlong = Literal["refuse", "cap"]
NO_LIMIT = -1
"""A max_tokens that asks for what the context leaves, as clients of llama.cpp and LM Studio send it."""
_DEFAULT = SamplingParams().max_tokens


def max_tokens_of(body: GenerationRequest) -> int | None:
    """Return the limit that a body names."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def asked_max_tokens(body: GenerationRequest) -> int | None:
    """Return the limit that a body sets; None for what the context leaves. Raises InvalidRequestError."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = max_tokens_of(body)
    if asked is None and not isinstance(body, ChatRequest):
        asked = _DEFAULT
    if asked is None or asked == NO_LIMIT:
        return None
    if asked < 1 and not (asked == 0 and getattr(body, "echo", False)):
        raise InvalidRequestError(f"{name} must be at least 1, got {asked}", param=name)
    return asked


def fit_max_tokens(
    params: SamplingParams,
    asked: int | None,
    num_prompt_tokens: int,
    service: Service,
    *,
    most: int | None = None,
    overlong: Overlong | None = None,
) -> SamplingParams:
    """Return the parameters with what the context leaves, `most` at most, where no limit was asked for.

    A limit beyond that is one that Request.check refuses, unless `overlong`, or else the server's setting, caps it.
    """
    limit = service.model.engine.info.max_model_len
    left = max(1, limit - num_prompt_tokens)
    if asked is None:
        return replace(params, max_tokens=min(left, most or left))
    caps = (overlong or service.options.settings.overlong_max_tokens) == "cap"
    return replace(params, max_tokens=left) if caps and asked > left else params


def capped_max_tokens(body: GenerationRequest, requests: Sequence[Request]) -> int | None:
    """Return the max_tokens that stands in for a larger one, which the context has no room for; None if none does."""
    given = max_tokens_of(body)
    if given is None or not requests:  # there are none of a completion whose tokens cannot be read any more
        return None
    in_force = requests[0].params.max_tokens
    return in_force if in_force < given else None
