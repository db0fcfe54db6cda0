"""POST /v1/completions: OpenAI's completions with vLLM's extra fields, as JSON or as a stream of events."""

from __future__ import annotations

import time

from fastapi import APIRouter
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
from server.schemas import Completion, CompletionRequest, StreamOptions
from server.service import Service


def completions_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["completions"])

    @router.post(
        "/v1/completions",
        summary="Complete a prompt",
        openapi_extra=json_body(CompletionRequest),
        responses={
            200: {
                "model": Completion,
                "description": "The completion; with `stream`, events whose data is one of these each, then [DONE]",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
        },
    )
    async def create_completion(request: Request) -> Response:
        started_at = time.perf_counter()
        service.admit()  # before megabytes are read for nothing
        raw = await read_json_body(request, service.options.max_body_bytes, service.options.body_limit_s)
        body = CompletionRequest.parse(parse_json_object(raw))
        plan = await plan_completion(body, service)
        return CompletionResponse(service, plan, started_at)

    return router


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
        choices = [join_deltas(deltas).to_json(index) for index, deltas in enumerate(collected)]
        content = {**self._plan.head(self._service), "choices": choices, "usage": self._run.usage()}
        await JSONResponse(content)(scope, receive, send)

    async def _send_stream(self, stream: TokenStream, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the completion as events; an error from here on is an event too."""
        options = self._plan.body.stream_options or StreamOptions()
        encoder = sse.EventEncoder(self._plan.head(self._service), include_usage=bool(options.include_usage))
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
                end = (encoder.usage_chunk(self._run.usage()) if options.include_usage else "") + sse.DONE
            except Exception as error:
                self._run.is_failed = True
                end = encoder.error(report(error, scope).body())
        if connection.is_gone:
            raise ClientDisconnect
        await send({"type": "http.response.body", "body": end.encode("ascii"), "more_body": False})
