"""Checks of a request that types cannot make: fields against each other and against what the server can hold.

`plan.py` and `chat.py` call them. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import SamplingParams
from gptserve.server.completions.admission import take_places
from gptserve.server.completions.service import Service
from gptserve.server.schemas.completions import GenerationRequest


def check_request(body: GenerationRequest, service: Service, owner: str | None, num_prompts: int) -> None:
    """Check fields against each other and the number of choices, and take their places.

    Raises ServiceError, QueueFullError or InvalidRequestError.
    """
    if body.priority and not service.options.settings.priority_scheduling:
        message = f"priority must be 0 unless the server was started with --priority-scheduling, got {body.priority}"
        raise InvalidRequestError(message, param="priority")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may be given only with stream true", param="stream_options")
    limit, other = body.max_tokens, body.max_completion_tokens
    if None not in (limit, other) and limit != other:
        message = f"max_completion_tokens must be max_tokens, which is {limit}, got {other}"
        raise InvalidRequestError(message, param="max_completion_tokens")
    take_places(service, owner, body.n or 1, num_prompts)


def check_size(
    body: GenerationRequest, params: SamplingParams, prompts: Sequence[Sequence[int]], service: Service
) -> None:
    """Raise InvalidRequestError if the server would hold too many tokens or logprobs until the answer is sent."""
    n, options, limit = body.n or 1, service.options, service.model.engine.info.max_model_len
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
