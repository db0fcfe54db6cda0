"""POST /v1/completions and /v1/chat/completions: OpenAI's with vLLM's extra fields, as JSON or as a stream of events.

From the request's bytes to the response. A plain completion goes on to `completions/`, a background one through
`begin_in_background`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.api.background import (
    IDEMPOTENCY_KEY,
    LAST_EVENT,
    answer_in_background,
    begin_in_background,
    idempotency_key,
    last_event_seen,
    owner_of,
    request_to_keep,
)
from gptserve.server.completions.admission import leave, planned
from gptserve.server.completions.answer import CompletionResponse
from gptserve.server.completions.chat import plan_chat
from gptserve.server.completions.plan import CompletionPlan, plan_completion
from gptserve.server.completions.planning import Place
from gptserve.server.completions.service import Service
from gptserve.server.http.body import parse_json_object
from gptserve.server.http.envelope import log_fields
from gptserve.server.jobs.background import BackgroundJobs
from gptserve.server.schemas import completions as schemas
from gptserve.server.schemas.fields import Take, ignored_names, take_fields
from gptserve.server.schemas.openapi import error_responses, event_stream, json_body, links_to_completion

THREAD_BYTES = 2**16  # parsing takes some milliseconds in the worst case
MAX_PROMPT_LOGGED = 4096  # characters
_PROMPTS = ("prompt", "messages", "input", "query", "text_1")

Body = TypeVar("Body", bound=schemas.GenerationRequest)
Parsed = TypeVar("Parsed", bound=BaseModel)


def completions_router(service: Service, jobs: BackgroundJobs) -> APIRouter:
    """Return the route of completions."""
    models = schemas.CompletionRequest, schemas.Completion, schemas.Completion
    return _router(service, jobs, plan_completion, "/v1/completions", models, "completion", "Complete a prompt")


def chat_router(service: Service, jobs: BackgroundJobs) -> APIRouter:
    """Return the route of chats."""
    models = schemas.ChatRequest, schemas.ChatCompletion, schemas.ChatCompletionChunk
    return _router(service, jobs, plan_chat, "/v1/chat/completions", models, "chat_completion", "Answer a conversation")


def _router(
    service: Service,
    jobs: BackgroundJobs,
    plan: Callable[[Body, Service, str | None], Awaitable[CompletionPlan]],
    path: str,
    models: tuple[type[Body], type[BaseModel], type[BaseModel]],
    made: str,
    summary: str,
) -> APIRouter:
    """Return a route that answers with the completion that `plan` makes of a body; `models`: body, answer and chunk."""
    router = APIRouter(tags=[f"{made}s"])
    body_model, answer_model, chunk_model = models
    answered = {"model": answer_model, "description": "The answer; with `stream` as events, the last of them [DONE]"}

    @router.post(
        path,
        name=f"create_{made}",
        summary=summary,
        openapi_extra={**json_body(body_model), "parameters": [IDEMPOTENCY_KEY, *LAST_EVENT]},
        responses={
            200: {**answered, **event_stream(chunk_model)},
            202: {
                "model": schemas.BackgroundCompletion,
                "description": "With `background`: where to find the answer",
                **links_to_completion("$response.body#/id"),
            },
            204: {"description": "A retry of a stream whose `Last-Event-ID` was its last event"},
            **error_responses(400, 401, 404, 408, 409, 413, 415, 429, 500, 503),
        },
    )
    async def create_completion(request: Request) -> Response:
        started_at = time.perf_counter()
        key, owner, after = idempotency_key(request), owner_of(request), last_event_seen(request)
        service.admit(owner if key is None else None)  # refuse before reading megabytes; a retry begins nothing
        fields, body, num_bytes = await read_body(request, service, lambda _: body_model)
        place = Place(owner, started_at, body.timeout_ms, request.receive)
        is_kept = body.background or key is not None
        if after is not None and not (is_kept and body.stream):
            raise after.error("may be given only with stream true, and with background or an Idempotency-Key")
        if not is_kept:
            with planned(service, place, num_bytes) as planning:
                made_plan = await plan(body, planning, owner)
            return CompletionResponse(service, made_plan, started_at)
        _check_id(body)
        with planned(service, place, num_bytes) as planning:
            is_large = num_bytes > THREAD_BYTES
            background = await request_to_keep(jobs, planning, path, fields, key, is_large=is_large)

            async def make_plan() -> CompletionPlan:
                made_plan = await plan(background.seeded(body), planning, owner)
                leave(planning)
                return made_plan

            job = await begin_in_background(jobs, background, make_plan, after)
        return await answer_in_background(service, jobs, job, body, after)

    return router


async def read_body(
    request: Request, service: Service, choose: Callable[[dict[str, object]], type[Parsed]], take: Take = take_fields
) -> tuple[dict[str, object], Parsed, int]:
    """Read the body within the limits; return its fields, their model, which `choose` names, its number of bytes.

    A large body is parsed in a thread. Raises what these raise, ValidationError too.
    """
    settings = service.options.settings

    def parse(raw: bytearray) -> tuple[dict[str, object], Parsed, list[str]]:
        given = parse_json_object(raw)
        model = choose(given)
        fields, ignored = take(given, model, strict=settings.strict_fields)
        return fields, model.model_validate(fields), ignored

    async with service.bodies.read(request, settings.max_body_bytes, service.options.body_limit_s) as raw:
        num_bytes = len(raw)
        fields, body, ignored = await asyncio.to_thread(parse, raw) if num_bytes > THREAD_BYTES else parse(raw)
    if ignored:
        log_fields(request.scope)["ignored"] = ignored_names(ignored)
    if settings.log_prompts:
        prompt = next((fields[name] for name in _PROMPTS if name in fields), None)
        log_fields(request.scope)["prompt"] = str(prompt)[:MAX_PROMPT_LOGGED]
    return fields, body, num_bytes


def _check_id(body: schemas.GenerationRequest) -> None:
    """Raise InvalidRequestError if the client wants to choose the id under which all find a background completion."""
    if body.request_id is not None:
        message = "request_id may not be given with background or an Idempotency-Key, as others could guess the id"
        raise InvalidRequestError(message, param="request_id")
