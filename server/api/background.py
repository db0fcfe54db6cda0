"""Background completions, of chats too: how one begins, and GET /v1/completions/{id}, its events, its cancelling.

`api/completions.py` calls `answer_in_background` for a request with `background` or an Idempotency-Key.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.server.api.openapi import error_responses, event_stream, links_to_completion
from gptserve.server.api.schemas import (
    ChatCompletionChunk,
    Completion,
    GenerationRequest,
    KeptChatCompletion,
    KeptCompletion,
)
from gptserve.server.background.job import BackgroundRequest
from gptserve.server.background.response import BackgroundResponse
from gptserve.server.background.store import BackgroundStore, MakePlan
from gptserve.server.completions.answer import json_response
from gptserve.server.completions.service import Service
from gptserve.server.errors import ServiceError, show
from gptserve.server.http.envelope import log_fields

IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 256},
    "description": "with the same key and body a retry gets the same completion",
}
_PATH = "/v1/completions/{id}"
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_BY_ID = {"parameters": [_ID]}
_MAX_EVENT = 10**18 - 1
_NUMBER = {"type": "integer", "minimum": 0, "maximum": _MAX_EVENT}
_AFTER = {"name": "starting_after", "in": "query", "schema": _NUMBER, "description": "the last event to leave out"}
_LAST = {"name": "Last-Event-ID", "in": "header", "schema": _NUMBER, "description": "the same, as browsers send it"}
_RESULT: dict[int | str, dict[str, Any]] = {
    200: {"model": KeptCompletion | KeptChatCompletion, **links_to_completion("$request.path.id")},
    **error_responses(401, 404, 500),
}


def background_router(service: Service, store: BackgroundStore) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["background"])

    @router.get(_PATH, summary="Return a background completion so far", openapi_extra=_BY_ID, responses=_RESULT)
    async def retrieve_completion(request: Request) -> Response:
        job = store.find(request.path_params["id"])
        log_fields(request.scope)["completion_id"] = job.completion_id
        answer = await store.result(job)
        return await service.in_thread(json_response, answer)  # which may be megabytes

    @router.post(
        _PATH + "/cancel",
        summary="Cancel a background completion; one that has ended stays as it is",
        openapi_extra=_BY_ID,
        responses=_RESULT,
    )
    async def cancel_completion(request: Request) -> Response:
        await store.cancel(store.find(request.path_params["id"]))
        return await retrieve_completion(request)

    @router.get(
        _PATH + "/events",
        summary="Stream the events of a background completion, from any of them on",
        openapi_extra={"parameters": [_ID, _AFTER, _LAST]},
        response_class=Response,
        responses={
            200: event_stream(Completion, ChatCompletionChunk),
            204: {"description": "It has ended well, and there are no more events"},
            **error_responses(400, 401, 404, 500),
        },
    )
    async def stream_completion(request: Request) -> Response:
        after = _last_event_seen(request)
        job = store.find(request.path_params["id"])
        plan, is_over = await store.plan(job), after > 0 and job.status == "completed"
        return BackgroundResponse(service, plan, store.reader(job), stream=True, after=after, is_over=is_over)

    return router


def idempotency_key(request: Request) -> str | None:
    """Return the key under which a client wants to find its completion again. Raises ServiceError."""
    key = request.headers.get("idempotency-key")
    rule = "1 to 256 printable ASCII characters"
    return None if key is None else _checked("Idempotency-Key", key, r"[ -~]{1,256}", rule)


async def answer_in_background(
    request: Request,
    service: Service,
    store: BackgroundStore,
    background: BackgroundRequest,
    body: GenerationRequest,
    make_plan: MakePlan,
) -> Response:
    """Begin a background completion, or find the one that has its key, and answer as `body` asks."""
    after = _last_event_seen(request)
    job = await store.begin_or_find(background, make_plan)
    plan = await store.plan(job)
    if body.background and not body.stream:
        return JSONResponse({**plan.head(), "status": job.status}, 202)
    return BackgroundResponse(service, plan, store.reader(job), stream=bool(body.stream), after=after)


def _last_event_seen(request: Request) -> int:
    """Return the id of the last event that the client has: `starting_after`, else `Last-Event-ID`, else 0.

    Raises ServiceError.
    """
    rule = f"the id of an event, a whole number from 0 to {_MAX_EVENT}"
    sources = (("starting_after", request.query_params), ("Last-Event-ID", request.headers))
    given = ((name, source.get(name)) for name, source in sources)
    seen = [int(_checked(name, value, r"[0-9]{1,18}", rule)) for name, value in given if value is not None]
    return seen[0] if seen else 0


def _checked(name: str, value: str, pattern: str, rule: str) -> str:
    if re.fullmatch(pattern, value) is None:
        raise ServiceError("invalid_value", f"{name} must be {rule}, got {show(value)}", param=name)
    return value
