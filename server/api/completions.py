"""POST /v1/completions and /v1/chat/completions: OpenAI's with vLLM's extra fields, as JSON or as a stream of events.

From the request's bytes to the response. A plain completion goes on to `completions/`, a background one through
`answer_in_background`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gptserve.server.api import schemas
from gptserve.server.api.background import IDEMPOTENCY_KEY, answer_in_background, idempotency_key
from gptserve.server.api.body import parse_json_object
from gptserve.server.api.openapi import error_responses, json_body, text
from gptserve.server.background.job import BackgroundRequest
from gptserve.server.background.store import BackgroundStore
from gptserve.server.completions.answer import CompletionResponse
from gptserve.server.completions.chat import plan_chat
from gptserve.server.completions.harmony import find_marks
from gptserve.server.completions.plan import CompletionPlan, plan_completion
from gptserve.server.completions.service import Service

THREAD_BYTES = 2**16  # parsing takes some milliseconds in the worst case

Body = TypeVar("Body", bound=schemas.GenerationRequest)


def completions_router(service: Service, store: BackgroundStore) -> APIRouter:
    """Return the route of completions."""
    models = schemas.CompletionRequest, schemas.Completion, schemas.Completion
    return _router(service, store, plan_completion, "/v1/completions", models, "completions", "Complete a prompt")


def chat_router(service: Service, store: BackgroundStore) -> APIRouter:
    """Return the route of chats."""
    plan = partial(plan_chat, marks=find_marks(service.tokenizer))
    models = schemas.ChatRequest, schemas.ChatCompletion, schemas.ChatCompletionChunk
    return _router(service, store, plan, "/v1/chat/completions", models, "chat", "Answer a conversation")


def _router(
    service: Service,
    store: BackgroundStore,
    plan: Callable[[Body, Service], Awaitable[CompletionPlan]],
    path: str,
    models: tuple[type[Body], type[BaseModel], type[BaseModel]],
    tag: str,
    summary: str,
) -> APIRouter:
    """Return a route that answers with the completion that `plan` makes of a body; `models`: body, answer and chunk."""
    router = APIRouter(tags=[tag])
    body_model, answer_model, chunk_model = models
    description = f"The answer; with `stream`, events whose data is a {chunk_model.__name__} each, then [DONE]"

    def parse(raw: bytearray, key: str | None, started_at: float) -> tuple[Body, BackgroundRequest | None]:
        fields = parse_json_object(raw)
        body = body_model.model_validate(fields)
        is_background = body.background or key is not None
        return body, BackgroundRequest.of(path, fields, key, started_at) if is_background else None

    async def receive(request: Request, key: str | None, started_at: float) -> tuple[Body, BackgroundRequest | None]:
        options = service.options
        async with service.bodies.read(request, options.settings.max_body_bytes, options.body_limit_s) as raw:
            arguments = raw, key, started_at
            return parse(*arguments) if len(raw) <= THREAD_BYTES else await asyncio.to_thread(parse, *arguments)

    @router.post(
        path,
        summary=summary,
        openapi_extra={**json_body(body_model), "parameters": [IDEMPOTENCY_KEY]},
        responses={
            200: {"model": answer_model, "description": description, **text("text/event-stream")},
            202: {"model": schemas.BackgroundCompletion, "description": "With `background`: where to find the answer"},
            **error_responses(400, 401, 404, 408, 409, 413, 415, 429, 500, 503),
        },
    )
    async def create_completion(request: Request) -> Response:
        started_at = time.perf_counter()
        service.admit()  # refuse before reading megabytes
        body, background = await receive(request, idempotency_key(request), started_at)
        if background is not None:
            return await answer_in_background(request, service, store, background, body, lambda: plan(body, service))
        return CompletionResponse(service, await plan(body, service), started_at)

    return router
