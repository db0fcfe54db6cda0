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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import FinishReason, Request, SamplingParams, TokenOutput
from gptserve.server.api.schemas import CompletionRequest, GenerationRequest
from gptserve.server.completions.harmony import HarmonyChannels
from gptserve.server.completions.output import ChoiceOutput, Delta, StopPattern, compile_stop, join_deltas
from gptserve.server.completions.service import Service, Tokenizer
from gptserve.server.completions.shapes import TEXT_SHAPE, Shape
from gptserve.server.errors import ApiError, unavailable
from gptserve.server.operations.metrics import Metrics

THREAD_CHARACTERS = 2000  # about half a millisecond of tokenizing; less is not worth a thread's round trip
DRAWN_SEED_LIMIT = 2**53  # a drawn seed stays exact in JavaScript


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a completion from others: the same in its answer and in every chunk, whoever asks and when."""

    completion_id: str
    created: int
    seed: int
    model: str
    fingerprint: str
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A request that has been understood: what to submit and how to answer.

    `requests` are in the order of the choices: all n of the first prompt, then of the second. `channels` is where the
    prompt leaves off, for a model that sets its reasoning apart.
    """

    shape: Shape
    identity: Identity
    requests: tuple[Request, ...]
    num_prompt_tokens: int
    stop: tuple[StopPattern, ...]
    body: GenerationRequest
    echo: bool
    channels: HarmonyChannels | None

    def head(self, *, of_chunk: bool = False) -> dict[str, object]:
        """Return the fields that the answer, or each of its chunks, begins with."""
        return {
            "id": self.identity.completion_id,
            "object": self.shape.chunk_object if of_chunk else self.shape.object,
            "created": self.identity.created,
            "model": self.identity.model,
            "system_fingerprint": self.identity.fingerprint,
            "batch_invariant": self.identity.batch_invariant,
            "seed": self.identity.seed,
        }

    def remaining_s(self, elapsed_s: float) -> float | None:
        """Return how much is left of its time after so much; None if it has no limit."""
        return None if self.body.timeout_ms is None else self.body.timeout_ms / 1000 - elapsed_s

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Mapping[str, object]) -> dict[str, object]:
        """Return the answer in one piece, given all that was added to each choice, which may be nothing yet."""
        joined = [join_deltas(deltas or [Delta("")]) for deltas in choices]
        rendered = [self.shape.choice(index, delta) for index, delta in enumerate(joined)]
        beside = self.shape.beside(joined[0]) if joined else {}
        return {**self.head(), "choices": rendered, **beside, "usage": usage}


async def plan_completion(body: CompletionRequest, service: Service) -> CompletionPlan:
    """Check what types cannot say and tokenize. Raises ApiError or InvalidRequestError."""
    prompts = _split_prompt(body.prompt)
    check_request(body, service, len(prompts))
    if body.best_of not in (None, body.n or 1):
        message = f"best_of must be null or equal to n, which is {body.n or 1}, got {body.best_of}"
        raise InvalidRequestError(message, param="best_of")
    params = body.sampling_params()
    token_ids = [tuple(await _encode(prompt, service)) for prompt in prompts]
    check_size(body, params, token_ids, service)
    return make_plan(body, TEXT_SHAPE, token_ids, params, new_identity(TEXT_SHAPE, body, service), echo=bool(body.echo))


def restore_completion(
    fields: dict[str, object], prompts: Sequence[tuple[int, ...]], max_tokens: int, identity: Identity
) -> CompletionPlan:
    """Return the plan of a completion that began before, from the fields of its body."""
    body = CompletionRequest.parse(fields)
    params = replace(body.sampling_params(), max_tokens=max_tokens)
    return make_plan(body, TEXT_SHAPE, prompts, params, identity, echo=bool(body.echo))


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
    if body.priority and not service.options.priority_scheduling:
        message = f"priority must be 0 unless the server was started with --priority-scheduling, got {body.priority}"
        raise InvalidRequestError(message, param="priority")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may be given only with stream true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs may be given only with stream false", param="prompt_logprobs")


def check_size(
    body: GenerationRequest, params: SamplingParams, prompts: Sequence[Sequence[int]], service: Service
) -> None:
    """Raise InvalidRequestError for a request of which the server would hold too much until its answer is sent."""
    n, options, limit = body.n or 1, service.options, service.engine.info.max_model_len
    if max(map(len, prompts)) + params.max_tokens > limit:
        return  # Request.check refuses it, and says why
    most = max(options.max_tokens_held, limit)
    num_tokens = n * len(prompts) * params.max_tokens
    if num_tokens > most:
        times = f"{n} times {len(prompts)} times {params.max_tokens}"
        message = f"n times the number of prompts times max_tokens may be at most {most}, got {times}"
        raise InvalidRequestError(message, param="max_tokens")
    num_prompt_tokens = n * sum(map(len, prompts))
    of_answer = 0 if params.logprobs is None else num_tokens * (params.logprobs + 1)
    of_prompts = 0 if params.prompt_logprobs is None else num_prompt_tokens * (params.prompt_logprobs + 1)
    if of_answer + of_prompts > options.max_logprobs_held:
        is_prompts_fault = of_prompts > of_answer and body.prompt_logprobs is not None
        raise InvalidRequestError(
            "n times the number of prompts times max_tokens times (logprobs + 1), plus n times the prompts' tokens "
            f"times (prompt_logprobs + 1), may be at most {options.max_logprobs_held}, got {of_answer} + {of_prompts}",
            param="prompt_logprobs" if is_prompts_fault else "logprobs",
        )


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


def new_identity(shape: Shape, body: GenerationRequest, service: Service) -> Identity:
    """Return the identity of a completion that begins now; a seed that is not given is drawn."""
    return Identity(
        completion_id=f"{shape.id_prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        seed=secrets.randbelow(DRAWN_SEED_LIMIT) if body.seed is None else body.seed,
        model=service.options.model_name,
        fingerprint=service.engine.info.fingerprint,
        batch_invariant=service.engine.info.batch_invariant,
    )


def make_plan(
    body: GenerationRequest,
    shape: Shape,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    identity: Identity,
    *,
    echo: bool = False,
    channels: HarmonyChannels | None = None,
) -> CompletionPlan:
    """Return the plan of a request whose prompts are token ids. Raises InvalidRequestError."""
    num_choices = body.n or 1
    requests = tuple(
        Request(
            request_id=f"{identity.completion_id}-{prompt_index * num_choices + choice_index}",
            prompt_token_ids=prompt_ids,
            params=params,
            seed=identity.seed,
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
        identity=identity,
        requests=requests,
        num_prompt_tokens=sum(map(len, prompts)),
        stop=tuple(map(compile_stop, stop)),
        body=body,
        echo=echo,
        channels=channels,
    )


class CompletionOutput:
    """The choices of one completion as text: made of the plan and the outputs alone, whoever reads them and when."""

    def __init__(self, plan: CompletionPlan, tokenizer: Tokenizer) -> None:
        self.choices = [
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
        self._plan = plan
        self._index = {request.request_id: i for i, request in enumerate(plan.requests)}
        self._num_cached = [0] * len(plan.requests)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated."""
        return sum(choice.num_tokens for choice in self.choices)

    def add(self, output: TokenOutput) -> tuple[int, Delta] | None:
        """Return which choice an output belongs to and what it added; None if that choice had ended.

        Raises ApiError when the engine failed on the choice.
        """
        index = self._index[output.request_id]
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return None  # what was under way when a stop string ended it
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            message = output.error or "the engine gave this request up"
            raise ApiError(500, f"choice {index}: {message}", code="generation_failed")
        if output.finish_reason is FinishReason.QUEUE_TIMEOUT:
            raise unavailable(f"choice {index}: {output.error}", code="queue_timeout")
        if choice.num_tokens == 0:
            self._num_cached[index] = output.num_cached_tokens  # what another engine found on going on is not told
        return index, choice.add(output)

    def apply(self, outputs: Iterable[TokenOutput]) -> Iterator[tuple[int, Delta]]:
        """Yield what each of the outputs added, `usage` being that of this moment. Raises ApiError."""
        return filter(None, map(self.add, outputs))

    def usage(self) -> dict[str, object]:
        """Return the tokens so far, as schemas.Usage has them."""
        prompt, completion = self._plan.num_prompt_tokens, self.num_tokens
        cached = sum(self._num_cached[:: self._plan.body.n or 1])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def render_outputs(
    plan: CompletionPlan, batches: Iterable[Iterable[TokenOutput]], tokenizer: Tokenizer
) -> dict[str, object]:
    """Return the answer that these outputs are, in one piece."""
    output = CompletionOutput(plan, tokenizer)
    collected: list[list[Delta]] = [[] for _ in plan.requests]
    for outputs in batches:
        for index, delta in output.apply(outputs):
            collected[index].append(delta)
    return plan.whole(collected, output.usage())


class CompletionRun:
    """One completion while it is computed: its output, measured. `apply` what the stream gives, then `close`.

    is_failed is set by whoever ends it because of an error.
    """

    def __init__(self, plan: CompletionPlan, tokenizer: Tokenizer, metrics: Metrics, started_at: float) -> None:
        self.is_failed = False
        self.output = CompletionOutput(plan, tokenizer)
        self._plan = plan
        self._metrics = metrics
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._latest_at: list[float | None] = [None] * len(plan.requests)

    def apply(self, outputs: Iterable[TokenOutput], stream: TokenStream) -> Iterator[tuple[int, Delta]]:
        """Yield what each output added to its choice; abort a choice in the engine when a stop string ends it.

        Raises ApiError when the engine failed on a choice.
        """
        now = time.perf_counter()
        for output in outputs:
            added = self.output.add(output)
            if added is None:
                continue
            index, delta = added
            for _ in output.token_ids:
                self._measure(index, now)
            if delta.finish_reason is not None and output.finish_reason is None:
                stream.abort([output.request_id])
            yield added

    def close(self) -> dict[str, Any]:
        """Count how the choices ended, those that have not as aborted or failed, and return the fields for the log."""
        unfinished = FinishReason.ERROR if self.is_failed else FinishReason.ABORT
        reasons = Counter(choice.finish_reason or unfinished.value for choice in self.output.choices)
        for reason, count in reasons.items():
            self._metrics.count_finished(reason, count)
        self._metrics.request_latency.observe(time.perf_counter() - self._started_at)
        first = self._first_token_at
        return {
            "completion_id": self._plan.identity.completion_id,
            "prompt_tokens": self._plan.num_prompt_tokens,
            "completion_tokens": self.output.num_tokens,
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


@contextmanager
def expiring(stream: TokenStream, remaining_s: float | None) -> Iterator[None]:
    """Let what has not ended in `stream` by then expire after `remaining_s`, unless the block is left before."""
    if remaining_s is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(max(0.0, remaining_s), stream.expire)
    try:
        yield
    finally:
        timer.cancel()


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
