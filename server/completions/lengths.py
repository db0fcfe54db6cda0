"""How long a completion may be: max_tokens beside the prompt, and the tokens and logprobs that one request may hold.

`plan.py` and `chat.py` call it. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import SamplingParams
from gptserve.server.api.schemas import ChatRequest, GenerationRequest
from gptserve.server.completions.service import Service

NO_LIMIT = -1
"""A max_tokens that asks for what the context leaves, as clients of llama.cpp and LM Studio send it."""
_DEFAULT = SamplingParams().max_tokens


def asked_max_tokens(body: GenerationRequest) -> int | None:
    """Return the limit that a body sets; None for what the context leaves. Raises InvalidRequestError."""
    name, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            name, asked = "max_completion_tokens", body.max_completion_tokens
    elif asked is None:
        asked = _DEFAULT
    if asked is None or asked == NO_LIMIT:
        return None
    if asked < 1 and not (asked == 0 and getattr(body, "echo", False)):
        raise InvalidRequestError(f"{name} must be at least 1, got {asked}", param=name)
    return asked


def fit_max_tokens(
    params: SamplingParams, asked: int | None, num_prompt_tokens: int, service: Service, *, most: int | None = None
) -> SamplingParams:
    """Return the parameters with what the context leaves, `most` at most, where no limit was asked for."""
    if asked is not None:
        return params
    limit = service.engine.info.max_model_len
    return replace(params, max_tokens=max(1, min(limit - num_prompt_tokens, most or limit)))


def check_size(
    body: GenerationRequest, params: SamplingParams, prompts: Sequence[Sequence[int]], service: Service
) -> None:
    """Raise InvalidRequestError if the server would hold too many tokens or logprobs until the answer is sent."""
    n, options, limit = body.n or 1, service.options, service.engine.info.max_model_len
    if max(map(len, prompts)) + params.max_tokens > limit:
        return  # Request.check refuses it with a better message
    max_tokens_held = max(options.max_tokens_held, limit)
    num_tokens = n * len(prompts) * params.max_tokens
    if num_tokens > max_tokens_held:
        times = f"{n} times {len(prompts)} times {params.max_tokens}"
        message = f"n times the number of prompts times max_tokens may be at most {max_tokens_held}, got {times}"
        raise InvalidRequestError(message, param="max_tokens")
    num_prompt_tokens = n * sum(map(len, prompts))
    if body.return_token_ids and num_prompt_tokens > max_tokens_held:
        rule = f"n times the prompts' tokens may be at most {max_tokens_held} with return_token_ids"
        raise InvalidRequestError(f"{rule}, got {num_prompt_tokens}", param="return_token_ids")
    of_answer = 0 if params.logprobs is None else num_tokens * (params.logprobs + 1)
    of_prompts = 0 if params.prompt_logprobs is None else num_prompt_tokens * (params.prompt_logprobs + 1)
    if of_answer + of_prompts > options.max_logprobs_held:
        is_prompts_fault = of_prompts > of_answer and body.prompt_logprobs is not None
        raise InvalidRequestError(
            "n times the number of prompts times max_tokens times (logprobs + 1), plus n times the prompts' tokens "
            f"times (prompt_logprobs + 1), may be at most {options.max_logprobs_held}, got {of_answer} + {of_prompts}",
            param="prompt_logprobs" if is_prompts_fault else "logprobs",
        )
