"""One completion from its parsed request to its answer: engine requests, their outputs applied, usage, timings.

What a chat does before is in chat.py; from `make_plan` on both are one. Knows no HTTP; `routes/completions.py` sends
what it gives.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from engine.client import TokenStream
from engine.errors import InvalidRequestError
from engine.request import FinishReason, Request, SamplingParams, TokenOutput
from server.errors import ApiError
from server.harmony import HarmonyChannels
from server.metrics import Metrics
from server.output import ChoiceOutput, Delta, StopPattern, compile_stop
from server.schemas import CompletionRequest, GenerationRequest
from server.service import Service, Tokenizer
from server.shapes import TEXT_SHAPE, Shape

THREAD_CHARACTERS = 2000  # about half a millisecond of tokenizing; less is not worth a thread's round trip
DRAWN_SEED_LIMIT = 2**53  # a drawn seed stays exact in JavaScript


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A request that has been understood: what to submit and how to answer.

    `requests` are in the order of the choices: all n of the first prompt, then of the second. `channels` is where the
    prompt leaves off, for a model that sets its reasoning apart.
    """

    shape: Shape
    completion_id: str
    created: int
    seed: int
    requests: tuple[Request, ...]
    num_prompt_tokens: int
    stop: tuple[StopPattern, ...]
    body: GenerationRequest
    echo: bool
    channels: HarmonyChannels | None

    def head(self, service: Service) -> dict[str, object]:
        """Return the fields that the answer and all its chunks share."""
        return {
            "id": self.completion_id,
            "object": self.shape.chunk_object if self.body.stream else self.shape.object,
            "created": self.created,
            "model": service.options.model_name,
            "system_fingerprint": service.engine.info.fingerprint,
            "batch_invariant": service.engine.info.batch_invariant,
            "seed": self.seed,
        }


async def plan_completion(body: CompletionRequest, service: Service) -> CompletionPlan:
    """Check what types cannot say and tokenize. Raises ApiError or InvalidRequestError."""
    prompts = _split_prompt(body.prompt)
    check_request(body, service, len(prompts))
    if body.best_of not in (None, body.n or 1):
        message = f"best_of must be null or equal to n, which is {body.n or 1}, got {body.best_of}"
        raise InvalidRequestError(message, param="best_of")
    params = body.sampling_params()
    token_ids = [tuple(await _encode(prompt, service)) for prompt in prompts]
    return make_plan(body, TEXT_SHAPE, token_ids, params, echo=bool(body.echo))


def check_request(body: GenerationRequest, service: Service, num_prompts: int) -> None:
    """Raise ApiError or InvalidRequestError unless the model and the number of choices can be had."""
    if body.model is not None:
        service.check_model(body.model)
    n, info = body.n or 1, service.engine.info
    # More than the queue can ever hold would be told to try again for ever.
    most = min(service.options.max_choices, info.max_num_seqs + info.max_num_queued_reqs)
    if n * num_prompts > most:
        message = f"n times the number of prompts may be at most {most}, got {n} times {num_prompts}"
        raise InvalidRequestError(message, param="n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may be given only with stream true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs may be given only with stream false", param="prompt_logprobs")


def check_length(text: str, service: Service) -> None:
    """Raise InvalidRequestError for a text that cannot fit the context, before it costs anything."""
    limit = service.engine.info.max_model_len
    num_bytes, most = len(text.encode()), limit * service.tokenizer.max_token_bytes
    if num_bytes > most:
        raise InvalidRequestError(
            f"prompt has {num_bytes} bytes; no more than {most} can fit this model's context of {limit} tokens",
            param="prompt",
            code="context_length_exceeded",
        )


def make_plan(
    body: GenerationRequest,
    shape: Shape,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    echo: bool = False,
    channels: HarmonyChannels | None = None,
) -> CompletionPlan:
    """Return the plan of a request whose prompts are token ids. Raises InvalidRequestError."""
    completion_id = f"{shape.id_prefix}-{uuid.uuid4().hex}"
    seed = secrets.randbelow(DRAWN_SEED_LIMIT) if body.seed is None else body.seed
    num_choices = body.n or 1
    requests = tuple(
        Request(
            request_id=f"{completion_id}-{prompt_index * num_choices + choice_index}",
            prompt_token_ids=prompt_ids,
            params=params,
            seed=seed,
            choice_index=choice_index,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        for prompt_index, prompt_ids in enumerate(prompts)
        for choice_index in range(num_choices)
    )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return CompletionPlan(
        shape=shape,
        completion_id=completion_id,
        created=int(time.time()),
        seed=seed,
        requests=requests,
        num_prompt_tokens=sum(map(len, prompts)),
        stop=tuple(map(compile_stop, stop)),
        body=body,
        echo=echo,
        channels=channels,
    )


class CompletionRun:
    """The choices of one completion while they are computed. `apply` what the stream gives, then `close`.

    is_failed is set by whoever ends it because of an error.
    """

    def __init__(self, plan: CompletionPlan, tokenizer: Tokenizer, metrics: Metrics, started_at: float) -> None:
        self.is_failed = False
        self._plan = plan
        self._metrics = metrics
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._choices = [
            ChoiceOutput(
                tokenizer,
                stop=plan.stop,
                stop_token_ids=request.params.stop_token_ids,
                logprobs=request.params.logprobs,
                prompt_logprobs=plan.body.prompt_logprobs,
                echo=request.prompt_token_ids if plan.echo else (),
                generates=plan.body.max_tokens != 0,
                skip=() if plan.body.skip_special_tokens is False else tokenizer.special_ids,
                channel_of=None if plan.channels is None else copy(plan.channels).channel_of,
            )
            for request in plan.requests
        ]
        self._index = {request.request_id: i for i, request in enumerate(plan.requests)}
        self._num_cached = [0] * len(plan.requests)
        self._latest_at: list[float | None] = [None] * len(plan.requests)

    def apply(self, outputs: Iterable[TokenOutput], stream: TokenStream) -> list[tuple[int, Delta]]:
        """Return what each output added to its choice; abort a choice in the engine when a stop string ends it.

        Raises ApiError when the engine failed on a choice.
        """
        now = time.perf_counter()
        deltas = []
        for output in outputs:
            index = self._index[output.request_id]
            choice = self._choices[index]
            if choice.finish_reason is not None:
                continue  # what was under way when a stop string ended it
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                message = output.error or "the engine gave this request up"
                raise ApiError(500, f"choice {index}: {message}", code="generation_failed")
            num_before = choice.num_tokens
            delta = choice.add(output)
            self._num_cached[index] = max(self._num_cached[index], output.num_cached_tokens)
            for _ in range(num_before, choice.num_tokens):
                self._measure(index, now)
            if choice.finish_reason is not None and output.finish_reason is None:
                stream.abort([output.request_id])
            deltas.append((index, delta))
        return deltas

    def usage(self) -> dict[str, object]:
        """Return the tokens so far, as schemas.Usage has them."""
        prompt, completion = self._plan.num_prompt_tokens, sum(choice.num_tokens for choice in self._choices)
        cached = sum(self._num_cached[:: self._plan.body.n or 1])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def close(self) -> dict[str, Any]:
        """Count how the choices ended, those that have not as aborted or failed, and return the fields for the log."""
        unfinished = FinishReason.ERROR if self.is_failed else FinishReason.ABORT
        reasons = Counter(choice.finish_reason or unfinished.value for choice in self._choices)
        for reason, count in reasons.items():
            self._metrics.count_finished(reason, count)
        self._metrics.request_latency.observe(time.perf_counter() - self._started_at)
        first = self._first_token_at
        return {
            "completion_id": self._plan.completion_id,
            "prompt_tokens": self._plan.num_prompt_tokens,
            "completion_tokens": sum(choice.num_tokens for choice in self._choices),
            "ttft_s": None if first is None else round(first - self._started_at, 6),
            "finish_reasons": dict(reasons),
            "user": self._plan.body.user,
        }

    def _measure(self, index: int, now: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._started_at)
        latest, self._latest_at[index] = self._latest_at[index], now
        if latest is not None:
            self._metrics.inter_token_latency.observe(now - latest)


def _split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Return the prompts of a request, of which an empty list is one empty prompt."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt


async def _encode(prompt: str | list[int], service: Service) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    check_length(prompt, service)
    if len(prompt) > THREAD_CHARACTERS:
        return await asyncio.to_thread(service.tokenizer.encode_prompt, prompt)
    return service.tokenizer.encode_prompt(prompt)
