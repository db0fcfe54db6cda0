"""From the engine's outputs to the choices of a completion: text, usage, timings and the time limit.

`CompletionOutput` depends on the plan and the outputs alone; `CompletionRun` adds what is measured while the engine
computes. `answer.py` and the background recorder call them. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.server.completions.continuation import check_end, given_output
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.service import Service
from gptserve.server.completions.times import CompletionTimes
from gptserve.server.core.errors import ServiceError
from gptserve.server.text.output import TIMEOUT, ChoiceOutput, Delta, TokenScore

Output = TypeVar("Output")


class CompletionOutput:
    """The choices of one completion as text. It depends on the plan and the outputs alone."""

    def __init__(self, plan: CompletionPlan) -> None:
        reading, completion_id = plan.reading, plan.identity.completion_id
        self._readers = [
            None if reading is None else reading.reader(completion_id, i) for i in range(len(plan.requests))
        ]
        special_ids = plan.model.tokenizer.special_ids if reading is None else reading.special_ids
        self.choices = [
            ChoiceOutput(
                plan.model.tokenizer,
                stop=plan.stop,
                stop_token_ids=request.params.stop_token_ids,
                logprobs=request.params.logprobs,
                prompt_logprobs=plan.body.prompt_logprobs,
                echo=request.prompt_token_ids if plan.echoes else (),
                generates=plan.body.max_tokens != 0,
                skip=() if plan.body.skip_special_tokens is False else special_ids,
                channel_of=None if reader is None else reader.channel_of,
                min_tokens=request.params.min_tokens,
                includes_stop=bool(plan.body.include_stop_str_in_output),
                returned_prompt=request.prompt_token_ids if plan.body.return_token_ids else None,
                names_ids=bool(plan.body.return_tokens_as_token_ids),
            )
            for request, reader in zip(plan.requests, self._readers, strict=True)
        ]
        self._plan = plan
        self._index = {request.request_id: i for i, request in enumerate(plan.requests)}
        self._num_cached = [0] * len(plan.requests)
        self._begun: list[list[Delta]] = [[] for _ in plan.requests]
        for index, request in enumerate(plan.requests):
            if request.generated_token_ids:
                self._add_given(index, request)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated."""
        return sum(choice.num_tokens for choice in self.choices)

    def begun(self) -> list[list[Delta]]:
        """Return new lists of the deltas of each choice, to extend: only the ends of those of which all was given."""
        return [list(deltas) for deltas in self._begun]

    def unfinished(self) -> tuple[Request, ...]:
        """Return the plan's requests for the choices that have not ended."""
        pairs = zip(self._plan.requests, self.choices, strict=True)
        return tuple(request for request, choice in pairs if choice.finish_reason is None)

    def add(self, output: TokenOutput) -> tuple[int, Delta] | None:
        """Add an output to its choice; return the choice's index and the delta, or None if the choice has ended.

        Raises ServiceError when the engine failed on the choice.
        """
        index = self._index[output.request_id]
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return None  # the engine computed it before it heard of the stop string
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            message = output.error or "the engine gave this request up"
            raise ServiceError("generation_failed", f"choice {index}: {message}")
        if output.finish_reason is FinishReason.QUEUE_TIMEOUT:
            raise ServiceError("queue_timeout", f"choice {index}: {output.error}")
        if choice.num_tokens == 0:
            # Only the first output counts: after a restart another engine reports its own cache.
            self._num_cached[index] = output.num_cached_tokens
        delta, reader = choice.add(output), self._readers[index]
        return index, delta if reader is None else reader.read(delta)

    def usage(self) -> dict[str, object]:
        """Return the token counts so far, in the shape of schemas.Usage."""
        prompt, completion = self._plan.num_prompt_tokens, self.num_tokens
        cached = sum(self._num_cached[:: self._plan.body.n or 1])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _add_given(self, index: int, request: Request) -> None:
        """Add the tokens that the client has of a choice. Raises InvalidRequestError if they go on after its end."""
        info, choice, reader = self._plan.model.engine.info, self.choices[index], self._readers[index]
        delta = choice.add(given_output(request, info))
        check_end(request, index, choice.num_tokens, info)
        if reader is not None:
            delta = reader.read(delta)
        if delta.finish_reason is not None:
            scores: list[TokenScore] | None = None if delta.logprobs is None else []
            token_ids = None if delta.token_ids is None else ()
            end = Delta("", scores, delta.finish_reason, delta.stop_reason, token_ids=token_ids)
            self._begun[index].append(end)


def render_outputs(plan: CompletionPlan, batches: Iterable[Iterable[TokenOutput]]) -> dict[str, object]:
    """Return the answer that these outputs make, in one piece."""
    output = CompletionOutput(plan)
    collected = output.begun()
    for index, delta in filter(None, map(output.add, chain.from_iterable(batches))):
        collected[index].append(delta)
    return plan.whole(collected, output.usage())


GIVEN_AT_ONCE = 4096  # tokens that a choice takes in a few milliseconds


async def begin_output(
    service: Service, plan: CompletionPlan, begin: Callable[..., Output], *arguments: object
) -> Output:
    """Return what `begin` makes of the arguments, in a thread if it adds many tokens that a client has.

    Raises InvalidRequestError if they go on after the end of a choice.
    """
    if plan.num_given_tokens > GIVEN_AT_ONCE:
        return await service.in_thread(begin, *arguments)
    return begin(*arguments)


class CompletionRun:
    """The output of one completion while the engine computes it, with its metrics. Call `add`, at last `close`.

    The caller sets is_failed when an error ends the completion.
    """

    def __init__(self, plan: CompletionPlan, service: Service, started_at: float) -> None:
        self.is_failed = False
        self.output = CompletionOutput(plan)
        self._plan = plan
        self._service = service
        self._times = CompletionTimes(service.metrics, started_at, len(plan.requests))

    def add(self, output: TokenOutput, stream: TokenStream) -> tuple[int, Delta] | None:
        """Add an output as `CompletionOutput.add` does, and abort the choice if a stop string ended it."""
        added = self.output.add(output)
        if added is not None:
            index, delta = added
            self._times.add(index, output)
            if delta.finish_reason is not None and output.finish_reason is None:
                stream.abort([output.request_id])
        return added

    def close(self) -> dict[str, Any]:
        """Count the choices by finish reason, the unfinished as aborted or failed; return the fields for the log."""
        unfinished = FinishReason.ERROR if self.is_failed else FinishReason.ABORT
        reasons = [
            TIMEOUT if choice.is_timed_out else choice.finish_reason or unfinished.value
            for choice in self.output.choices
        ]
        for reason, request, choice in zip(reasons, self._plan.requests, self.output.choices, strict=True):
            num_computed = choice.num_tokens - len(request.generated_token_ids)
            self._service.metrics.count_ended(reason, len(request.prompt_token_ids), num_computed)
        if (tracing := self._service.options.tracing) is not None:
            tracing.add_completion(self._plan, self.output.usage(), self._times, reasons)
        return {
            "completion_id": self._plan.answer_id,
            "prompt_tokens": self._plan.num_prompt_tokens,
            "completion_tokens": self.output.num_tokens,
            **self._times.close(),
            "finish_reasons": dict(Counter(reasons)),
            "user": self._plan.body.user,
        }


@contextmanager
def expiring(stream: TokenStream, remaining_s: float | None) -> Iterator[None]:
    """Expire the stream after `remaining_s`, unless the block is left before; None is no limit."""
    if remaining_s is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(max(0.0, remaining_s), stream.expire)
    try:
        yield
    finally:
        timer.cancel()
