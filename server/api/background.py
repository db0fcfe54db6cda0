"""Background completions, of chats too: how one begins, and GET /v1/completions/{id}, its events, its end, the list.

`api/completions.py` calls `begin_in_background` and `answer_in_background` for a request with `background` or an
Idempotency-Key.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.server.completions.admission import take_places
from gptserve.server.completions.encoding import json_response
from gptserve.server.completions.lengths import capped_max_tokens
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.service import Service
from gptserve.server.core.background_status import BackgroundStatus
from gptserve.server.core.errors import ServiceError, show
from gptserve.server.http.envelope import log_fields
from gptserve.server.jobs.background import BackgroundJobs, MakePlan
from gptserve.server.jobs.job import BackgroundJob, BackgroundRequest, not_found
from gptserve.server.jobs.position import PATTERN, LastEvent
from gptserve.server.jobs.response import BackgroundResponse
from gptserve.server.responses.plan import RESPONSE_SHAPE
from gptserve.server.schemas.completions import (
    ChatCompletionChunk,
    Completion,
    GenerationRequest,
    KeptChatCompletion,
    KeptCompletion,
    KeptEntry,
    KeptList,
)
from gptserve.server.schemas.openapi import ID, error_responses, event_stream, links_to_completion

IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 256},
    "description": "with the same key and body a retry gets the same completion",
}
_LIST_PATH = "/v1/completions"
# The path of each kind of completion, and the name of an operation on it. Each path serves both kinds.
_PATHS = ((f"{_LIST_PATH}/{{id}}", "completion"), ("/v1/chat/completions/{id}", "chat_completion"))
_EVENT_ID = {"type": "string", "pattern": f"^{PATTERN}$", "examples": ["17", "17.16.18"]}
LAST_EVENT = (
    {
        "name": "starting_after",
        "in": "query",
        "schema": _EVENT_ID,
        "description": "the id of the last event to leave out of a stream: the number of tokens of each choice",
    },
    {"name": "Last-Event-ID", "in": "header", "schema": _EVENT_ID, "description": "the same, as browsers send it"},
)
_STATUSES = get_args(BackgroundStatus)
_STATUS = {"name": "status", "in": "query", "schema": {"type": "string", "enum": list(_STATUSES)}}
_RESULT: dict[int | str, dict[str, Any]] = {
    200: {"model": KeptCompletion | KeptChatCompletion, **links_to_completion("$request.path.id")},
    **error_responses(401, 404, 500),
}
_BY_ID: dict[str, Any] = {"openapi_extra": {"parameters": [ID]}, "responses": _RESULT}
_RETRIEVE = {"summary": "Return a background completion so far", **_BY_ID}
_CANCEL = {"summary": "Cancel a background completion; one that has ended stays as it is", **_BY_ID}
_FOLLOW: dict[str, Any] = {
    "summary": "Stream the events of a background completion, from any of them on",
    "openapi_extra": {"parameters": [ID, *LAST_EVENT]},
    "response_class": Response,
    "responses": {
        200: event_stream(Completion, ChatCompletionChunk),
        204: {"description": "It has ended well, and there are no more events"},
        **error_responses(400, 401, 404, 500),
    },
}


def background_router(service: Service, jobs: BackgroundJobs) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["background"])
    operators = service.options.settings.operators

    async def found(request: Request) -> BackgroundJob:
        job = await jobs.find(request.path_params["id"], owner_of(request))
        if job.record.kind == RESPONSE_SHAPE.object:
            raise not_found(job.completion_id)
        return job

    async def retrieve(request: Request) -> Response:
        job = await found(request)
        log_fields(request.scope)["completion_id"] = job.completion_id
        answer = await jobs.result(job)
        return await service.in_thread(json_response, answer)  # which may be megabytes

    async def cancel(request: Request) -> Response:
        await jobs.cancel(await found(request))
        return await retrieve(request)

    async def events(request: Request) -> Response:
        after = last_event_seen(request)
        job = await found(request)
        return await _follow(service, jobs, job, after, stream=True)

    @router.get(
        _LIST_PATH,
        summary="List the background completions that run and that are kept, without their texts",
        openapi_extra={"parameters": [_STATUS]},
        responses={200: {"model": KeptList}, **error_responses(400, 401)},
    )
    async def list_completions(request: Request) -> Response:
        status, owner = request.query_params.get("status"), owner_of(request)
        if status is not None and status not in _STATUSES:
            message = f"status must be one of {', '.join(_STATUSES)}, got {show(status)}"
            raise ServiceError("invalid_value", message, param="status")
        listed = await jobs.list_jobs(owner, is_operator=owner in operators)
        chosen = [job for job in listed if status in (None, job.status)]
        return await service.in_thread(_list_response, chosen)  # which may be a thousand

    for path, kind in _PATHS:
        router.get(path, name=f"retrieve_{kind}", **_RETRIEVE)(retrieve)
        router.post(f"{path}/cancel", name=f"cancel_{kind}", **_CANCEL)(cancel)
        router.get(f"{path}/events", name=f"stream_{kind}", **_FOLLOW)(events)
    return router


def owner_of(request: Request) -> str | None:
    """Return the name of the API key, to which all belongs that the request begins; None without keys."""
    owner: str | None = request.scope["state"].get("owner")
    return owner


def idempotency_key(request: Request) -> str | None:
    """Return the key under which a client wants to find its completion again. Raises ServiceError."""
    key = request.headers.get("idempotency-key")
    if key is not None and re.fullmatch(r"[ -~]{1,256}", key) is None:
        message = f"Idempotency-Key must be 1 to 256 printable ASCII characters, got {show(key)}"
        raise ServiceError("invalid_value", message, param="Idempotency-Key")
    return key


def last_event_seen(request: Request) -> LastEvent | None:
    """Return the last event that the client has: `starting_after`, else `Last-Event-ID`. Raises ServiceError."""
    sources = (("starting_after", request.query_params), ("Last-Event-ID", request.headers))
    given = ((name, source.get(name)) for name, source in sources)
    seen = [LastEvent.parse(name, value) for name, value in given if value is not None]
    return seen[0] if seen else None


async def request_to_keep(
    jobs: BackgroundJobs, planning: Service, path: str, fields: dict[str, object], key: str | None, *, is_large: bool
) -> BackgroundRequest:
    """Return the request for a body with these fields, which is planned with `planning`. Raises ServiceError.

    A large one takes its owner's turn to be compared with others of its key, and counts as waiting meanwhile. A retry
    does not: it begins nothing.
    """
    if fields.get("background"):
        planning.check_shared("background")
    place = planning.place
    make = partial(BackgroundRequest.of, path, fields, place.owner, key, place.started_at)
    if key is None or not is_large:
        return make()
    if not jobs.has_key(place.owner, key):
        take_places(planning, place.owner, 1, 1)
    return await planning.in_worker(make)


async def begin_in_background(
    jobs: BackgroundJobs, background: BackgroundRequest, make_plan: MakePlan, after: LastEvent | None
) -> BackgroundJob:
    """Begin a background completion, or find the one that has its key.

    The client has the events of the stream up to `after`.
    """

    async def make_new_plan() -> CompletionPlan:
        plan = await make_plan()
        if after is not None:
            after.check_new(plan, jobs.fingerprints(background))
        return plan

    return await jobs.begin_or_find(background, make_new_plan)


async def answer_in_background(
    service: Service, jobs: BackgroundJobs, job: BackgroundJob, body: GenerationRequest, after: LastEvent | None
) -> Response:
    """Answer with a background completion as `body` asks; the client has the events of the stream up to `after`."""
    if body.background and not body.stream:
        plan = await jobs.plan(job)
        limit = capped_max_tokens(plan.body, plan.requests)
        headers = {} if limit is None else {"x-gptserve-max-tokens": str(limit)}
        return JSONResponse({**plan.head(), "status": job.status}, 202, headers)
    return await _follow(service, jobs, job, after, stream=bool(body.stream))


async def _follow(
    service: Service, jobs: BackgroundJobs, job: BackgroundJob, after: LastEvent | None, *, stream: bool
) -> Response:
    plan, whole = await jobs.plan(job), job.whole if job.status == "completed" else None
    if job.is_unreadable:
        after = None  # nothing is sent but the error
    if after is not None:
        # After a power cut a client may have tokens that the journal has not, and only some models make the same again.
        is_sure = job.record.batch_invariant or job.has_ended
        after.check(plan, whole, so_far=None if is_sure else await jobs.position(job, plan))
    return BackgroundResponse(service, plan, jobs.reader(job), stream=stream, after=after, whole=whole)


def _list_response(jobs: list[BackgroundJob]) -> Response:
    return JSONResponse(KeptList(data=[_to_entry(job) for job in jobs]).model_dump())


def _to_entry(job: BackgroundJob) -> KeptEntry:
    running = job.running  # it may end meanwhile
    num_tokens = job.num_tokens if running is None else running.run.output.num_tokens
    return KeptEntry(
        id=job.completion_id,
        object=job.record.kind,
        created=job.record.created,
        status=job.status,
        key_name=job.record.owner,
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=num_tokens,
        bytes=job.num_bytes,
    )
