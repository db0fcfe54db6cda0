"""What all routes share that read the states of prompts: the plan, and the response that computes it.

Counts and stops prompts as completions are. Knows no shape of an answer: that is the plan's.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.pooling import PoolingRequest
from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.completions import sse
from gptserve.server.completions.encoding import json_response
from gptserve.server.completions.model import Model
from gptserve.server.completions.run import expiring
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError
from gptserve.server.http.envelope import log_fields
from gptserve.server.schemas.embeddings import PooledRequest

_LOOP_NUMBERS = 2**12
"""Rendering more than so many numbers takes some milliseconds, so it is done in a thread."""


@dataclass(frozen=True, slots=True)
class PooledPlan:
    """A checked request: what to submit for each input, in their order, num_at_once of them, and the way to answer.

    `answer` makes the JSON of the vectors of all inputs. `noun` is what errors call an input.
    """

    model: Model
    owner: str | None
    requests: tuple[PoolingRequest, ...]
    num_at_once: int
    body: PooledRequest
    answer: Callable[[Sequence[array[float]], PooledPlan], Mapping[str, object]]
    noun: str = "input"

    @property
    def num_tokens(self) -> int:
        """How many tokens the inputs have."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def usage(self) -> Mapping[str, int]:
        """The tokens of all inputs, as answers tell them."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


class PooledRun:
    """The vectors of one plan while the engine computes them. Call `submit` and `follow` for each part, then `answer`.

    At last call `close`; the caller sets is_failed when an error ends it.
    """

    def __init__(self, service: Service, plan: PooledPlan, started_at: float) -> None:
        self.is_failed = False
        self._service, self._plan, self._started_at = service.using(plan.model), plan, started_at
        self._index = {request.request_id: i for i, request in enumerate(plan.requests)}
        self._vectors: dict[int, array[float]] = {}
        self._stream: TokenStream | None = None

    def submit(self, start: int) -> None:
        """Submit the inputs from this one on that may wait at once. Raises what `Service.submit` raises."""
        part = self._plan.requests[start : start + self._plan.num_at_once]
        self._stream = self._service.submit(part, self._plan.owner, go_on=start > 0)

    async def follow(self) -> None:
        """Wait for the vectors of what was submitted. Raises ServiceError or EngineDiedError."""
        assert self._stream is not None, "submit comes first"
        with expiring(self._stream, self._remaining_s()):
            async for outputs in self._stream:
                for output in outputs:
                    self._add(output)

    def stop(self) -> None:
        """Compute no more."""
        if self._stream is not None:
            self._stream.abort()

    def answer(self) -> dict[str, object]:
        """Return the answer, once all vectors are there."""
        return dict(self._plan.answer([self._vectors[i] for i in range(len(self._plan.requests))], self._plan))

    def close(self) -> Mapping[str, object]:
        """Count the inputs by the reason of their end; return the fields for the log."""
        reasons, metrics = Counter[str](), self._service.metrics
        for i, request in enumerate(self._plan.requests):
            unfinished = FinishReason.ERROR if self.is_failed else FinishReason.ABORT
            reason = FinishReason.STOP if i in self._vectors else unfinished
            metrics.count_ended(reason.value, len(request.prompt_token_ids), 0)
            reasons[reason.value] += 1
        metrics.request_latency.observe(time.perf_counter() - self._started_at)
        return {"prompt_tokens": self._plan.num_tokens, "finish_reasons": dict(reasons), "user": self._plan.body.user}

    def _remaining_s(self) -> float | None:
        limit_ms = self._plan.body.timeout_ms
        return None if limit_ms is None else limit_ms / 1000 - (time.perf_counter() - self._started_at)

    def _add(self, output: TokenOutput) -> None:
        """Keep the vector of an input. Raises ServiceError if there is none."""
        index, metrics = self._index[output.request_id], self._service.metrics
        if output.finish_reason is FinishReason.QUEUE_TIMEOUT:
            raise ServiceError("queue_timeout", f"{self._plan.noun} {index}: {output.error}")
        if output.finish_reason is FinishReason.TIMEOUT:
            message = f"timeout_ms: the {self._plan.noun}s were not computed within {self._plan.body.timeout_ms} ms"
            raise ServiceError("queue_timeout", message, param="timeout_ms")
        if output.vector is None:
            message = output.error or "the engine gave this request up"
            raise ServiceError("generation_failed", f"{self._plan.noun} {index}: {message}")
        self._vectors[index] = output.vector
        if output.waits is not None:
            metrics.queue_time.observe(output.waits[0])
            metrics.prefill_time.observe(output.waits[1])


class PooledResponse(Response):
    """Submits a plan and answers with what comes of its inputs. Stops computing when the client hangs up."""

    def __init__(self, service: Service, plan: PooledPlan, started_at: float) -> None:
        super().__init__()
        self._service, self._plan, self._run = service, plan, PooledRun(service, plan, started_at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ServiceError or EngineError only before anything is sent."""
        run = self._run
        with self._service.lifecycle.active():
            run.submit(0)
            try:
                await self._compute(receive, send)
                response = await self._render()
            except Exception as error:
                run.is_failed = not isinstance(error, ClientDisconnect)
                raise
            finally:
                run.stop()
                log_fields(scope).update(run.close())
            await response(scope, receive, send)

    async def _compute(self, receive: Receive, send: Send) -> None:
        """Wait for all vectors, and submit the next inputs when the last ones are done.

        Raises ClientDisconnect if the client hangs up.
        """
        async with sse.Connection(receive, send, self._run.stop) as connection:
            for start in range(0, len(self._plan.requests), self._plan.num_at_once):
                if start:
                    self._run.submit(start)
                await self._run.follow()
                if connection.is_gone:
                    raise ClientDisconnect

    async def _render(self) -> Response:
        if len(self._plan.requests) * self._plan.model.engine.info.vector_size > _LOOP_NUMBERS:
            return await self._service.in_thread(self._rendered)
        return self._rendered()

    def _rendered(self) -> Response:
        return json_response(self._run.answer())


def check_requests(requests: Sequence[PoolingRequest], model: Model, noun: str = "input") -> None:
    """Raise InvalidRequestError, which names the input if there are several, if the engine cannot compute one."""
    for i, request in enumerate(requests):
        try:
            request.check(model.engine.info)
        except InvalidRequestError as error:
            if len(requests) == 1:
                raise
            raise InvalidRequestError(f"{noun} {i}: {error}", param=error.param, code=error.code) from error
