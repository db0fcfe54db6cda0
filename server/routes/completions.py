"""POST /v1/completions: OpenAI's completions with vLLM's extra fields, as JSON or as a stream of events.

`add_completion_route` is the way of every completion, a chat's too, from the request's bytes to the answer's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.client import TokenStream
from server import sse
from server.body import parse_json_object, read_json_body
from server.completion import CompletionPlan, CompletionRun, plan_completion
from server.envelope import log_fields, report
from server.openapi import error_responses, json_body
from server.output import Delta, join_deltas
from server.schemas import Completion, CompletionRequest, GenerationRequest, StreamOptions
from server.service import Service

THREAD_BYTES = 2**16  # some milliseconds of parsing in the worst case

Body = TypeVar("Body", bound=GenerationRequest)


def completions_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["completions"])
    add_completion_route(
        router,
        service,
        plan_completion,
        path="/v1/completions",
        summary="Complete a prompt",
        models=(CompletionRequest, Completion, Completion),
    )
    return router


def add_completion_route(
    router: APIRouter,
    service: Service,
    plan: Callable[[Body, Service], Awaitable[CompletionPlan]],
    *,
    path: str,
    summary: str,
    models: tuple[type[Body], type[BaseModel], type[BaseModel]],
) -> None:
    """Add a route that does what `plan` makes of a body; `models` are of the body, the answer and a chunk."""
    body_model, answer_model, chunk_model = models
    description = f"The answer; with `stream`, events whose data is a {chunk_model.__name__} each, then [DONE]"

    def parse(raw: bytes) -> Body:
        return body_model.parse(parse_json_object(raw))

    @router.post(
        path,
        summary=summary,
        openapi_extra=json_body(body_model),
        responses={
            200: {
                "model": answer_model,
                "description": description,
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
        },
    )
    async def create_completion(request: Request) -> Response:
        started_at = time.perf_counter()
        service.admit()  # before megabytes are read for nothing
        raw = await read_json_body(request, service.options.max_body_bytes, service.options.body_limit_s)
        body = parse(raw) if len(raw) <= THREAD_BYTES else await asyncio.to_thread(parse, raw)
        return CompletionResponse(service, await plan(body, service), started_at)


class CompletionResponse(Response):
    """Submits a planned completion and answers with it; nothing more is computed once the client has gone."""

    def __init__(self, service: Service, plan: CompletionPlan, started_at: float) -> None:
        super().__init__()
        self._service = service
        self._plan = plan
        self._run = CompletionRun(plan, service.tokenizer, service.metrics, started_at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError or EngineError as long as nothing was sent."""
        with self._service.lifecycle.active():
            stream = self._service.submit(self._plan.requests)
            answer = self._send_stream if self._plan.body.stream else self._send_whole
            try:
                await answer(stream, scope, receive, send)
            except ClientDisconnect:
                raise
            except Exception:
                self._run.is_failed = True
                raise
            finally:
                stream.abort()
                log_fields(scope).update(self._run.close())

    async def _send_whole(self, stream: TokenStream, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the completion in one piece."""
        collected: list[list[Delta]] = [[] for _ in self._plan.requests]
        async with sse.Connection(receive, send, stream.abort) as connection:
            async for outputs in stream:
                for index, delta in self._run.apply(outputs, stream):
                    collected[index].append(delta)
        if connection.is_gone:
            raise ClientDisconnect
        # The scores of a long prompt are megabytes of JSON, for each choice.
        is_scored = self._plan.requests[0].params.prompt_logprobs is not None
        response = await asyncio.to_thread(self._render, collected) if is_scored else self._render(collected)
        await response(scope, receive, send)

    def _render(self, collected: list[list[Delta]]) -> JSONResponse:
        """Return the answer of which these are all parts, by choice."""
        shape, joined = self._plan.shape, [join_deltas(deltas) for deltas in collected]
        choices = [shape.choice(index, delta) for index, delta in enumerate(joined)]
        rest = {**shape.beside(joined[0]), "usage": self._run.usage()}
        return JSONResponse({**self._plan.head(self._service), "choices": choices, **rest})

    async def _send_stream(self, stream: TokenStream, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the completion as events; an error from here on is an event too."""
        options = self._plan.body.stream_options or StreamOptions()
        head, include_usage = self._plan.head(self._service), bool(options.include_usage)
        encoder = sse.EventEncoder(head, self._plan.shape, include_usage=include_usage)
        await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        keep_alive_s = self._service.options.keep_alive_s
        async with sse.Connection(receive, send, stream.abort, keep_alive_s=keep_alive_s) as connection:
            try:
                async for outputs in stream:
                    events = [
                        encoder.chunk(index, delta, self._run.usage() if options.continuous_usage_stats else None)
                        for index, delta in self._run.apply(outputs, stream)
                        if not delta.is_empty
                    ]
                    if events:
                        await connection.write("".join(events).encode("ascii"))
                end = (encoder.usage_chunk(self._run.usage()) if include_usage else "") + sse.DONE
            except Exception as error:
                self._run.is_failed = True
                end = encoder.error(report(error, scope).body())
        if connection.is_gone:
            raise ClientDisconnect
        await send({"type": "http.response.body", "body": end.encode("ascii"), "more_body": False})
