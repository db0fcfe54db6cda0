"""The Responses API: POST /v1/responses, and the routes of one response by its id.

A response is a chat in another shape. One that is stored is a background completion in the same store, under the same
rules of owners, limits and restarts.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.api.background import IDEMPOTENCY_KEY, idempotency_key, owner_of, request_to_keep
from gptserve.server.api.completions import THREAD_BYTES, read_body
from gptserve.server.api.pages import page_json, page_of, page_parameters
from gptserve.server.completions.admission import leave, planned
from gptserve.server.completions.answer import CompletionResponse
from gptserve.server.completions.encoding import json_response
from gptserve.server.completions.lengths import capped_max_tokens
from gptserve.server.completions.planning import Place
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError
from gptserve.server.http.envelope import log_fields
from gptserve.server.jobs.background import BackgroundJobs
from gptserve.server.jobs.job import BackgroundJob, BackgroundRequest
from gptserve.server.responses.input_list import item_json, items_by_id
from gptserve.server.responses.kept import KeptResponses
from gptserve.server.responses.plan import (
    ResponsePlan,
    count_input_tokens,
    input_items,
    plan_response,
)
from gptserve.server.responses.queries import (
    AFTER_EVENT,
    INCLUDE,
    STREAM,
    check_include,
    stream_asked,
)
from gptserve.server.responses.stream import (
    NO_EVENT,
    ResponseEncoder,
    StoredAnswer,
    count_events,
)
from gptserve.server.schemas.openapi import ID, error_responses, event_stream, json_body
from gptserve.server.schemas.response_fields import take_response_fields
from gptserve.server.schemas.responses import (
    LOGPROBS,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)

_PATH = "/v1/responses"
_BY_ID = f"{_PATH}/{{id}}"
_METHODS = ("GET", "POST", "DELETE")
_MAX_LIMIT, _LIMIT = 100, 20
_LACKING = {
    f"{_PATH}/compact": "compaction of a conversation (truncation auto is another way)",
    "/v1/conversations": "a conversation object (previous_response_id is another way)",
    "/v1/conversations/{path:path}": "a conversation object (previous_response_id is another way)",
}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ResponseObject,
        "description": "The response; with `stream` as events",
        **event_stream(ResponseEvent),
    }
}


def responses_router(service: Service, jobs: BackgroundJobs) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["responses"])
    routes = _Routes(service, jobs)
    router.post(
        _PATH,
        summary="Answer with a response, which is stored",
        openapi_extra={**json_body(ResponsesRequest), "parameters": [IDEMPOTENCY_KEY]},
        responses={**_ANSWER, **error_responses(400, 401, 404, 408, 409, 413, 415, 429, 500, 503)},
    )(routes.create_response)
    router.post(
        f"{_PATH}/input_tokens",
        summary="Count the tokens that a response would have as its input",
        openapi_extra=json_body(ResponsesRequest),
        responses={200: {"model": InputTokens}, **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)},
    )(routes.count_input_tokens)
    for path, what in _LACKING.items():
        router.add_api_route(path, partial(_refuse, what), methods=[*_METHODS], include_in_schema=False)
    router.get(
        _BY_ID,
        summary="Return a response so far, or stream its events from any of them on",
        openapi_extra={"parameters": [ID, STREAM, AFTER_EVENT, INCLUDE]},
        responses={**_ANSWER, **error_responses(400, 401, 404, 500)},
    )(routes.retrieve_response)
    router.get(
        f"{_BY_ID}/input_items",
        summary="List the items that a response was made of",
        openapi_extra={"parameters": [ID, *page_parameters(_MAX_LIMIT, _LIMIT), INCLUDE]},
        responses={200: {"model": InputItemList}, **error_responses(400, 401, 404, 500)},
    )(routes.list_input_items)
    router.post(
        f"{_BY_ID}/cancel",
        summary="Cancel a response; a background one that has ended stays as it is",
        openapi_extra={"parameters": [ID]},
        responses={200: {"model": ResponseObject}, **error_responses(400, 401, 404, 500)},
    )(routes.cancel_response)
    router.delete(
        _BY_ID,
        summary="Delete a response; one that runs is cancelled",
        openapi_extra={"parameters": [ID]},
        responses={200: {"model": DeletedResponse}, **error_responses(401, 404, 500)},
    )(routes.delete_response)
    return router


class _Routes:
    """The functions of the routes."""

    def __init__(self, service: Service, jobs: BackgroundJobs) -> None:
        self._service = service
        self._jobs = jobs
        self._kept = KeptResponses(service, jobs)

    async def create_response(self, request: Request) -> Response:
        """Plan a response; begin it in the store, or compute it for its client alone."""
        started_at = time.perf_counter()
        service, jobs = self._service, self._jobs
        key, owner = idempotency_key(request), owner_of(request)
        service.admit(owner if key is None else None)  # refuse before reading megabytes; a retry begins nothing
        fields, body, num_bytes = await read_body(request, service, lambda _: ResponsesRequest, take_response_fields)
        _check_together(body, key)
        place = Place(owner, started_at, receive=request.receive)
        if body.store is False:
            with planned(service, place, num_bytes) as planning:
                plan = await plan_response(await self._kept.asked(body, planning), None, planning, owner)
            return CompletionResponse(service, plan, started_at, ResponseEncoder(plan))
        with planned(service, place, num_bytes) as planning:
            is_large = num_bytes > THREAD_BYTES
            background = await request_to_keep(jobs, planning, _PATH, fields, key, is_large=is_large)
            # Found before its conversation is read: what came before it may have been deleted since.
            job = await jobs.find_same(background)
            if job is None:
                job = await self._begin(body, background, planning)
        plan = await self._kept.plan(job)
        if body.background and not body.stream:
            log_fields(request.scope)["max_tokens"] = capped_max_tokens(plan.body, plan.requests)
            return await self._answer(job, plan, request)
        ends_with_client = not body.background and key is None
        return StoredAnswer(service, jobs, job, plan, bool(body.stream), ends_with_client=ends_with_client)

    async def _begin(self, body: ResponsesRequest, background: BackgroundRequest, planning: Service) -> BackgroundJob:
        """Begin a response in the store, or find the one that has got the same key meanwhile."""
        asked = await self._kept.asked(body, planning)
        kept = {**background.fields, "earlier": [item.model_dump() for item in asked.earlier]}
        if asked.input != body.input:
            kept["input"] = [item.model_dump() for item in input_items(asked)]
        background = replace(background, fields=kept)

        async def make_plan() -> ResponsePlan:
            plan = await plan_response(asked, background, planning, background.owner)
            leave(planning)
            return plan

        return await self._jobs.begin_or_find(background, make_plan)

    async def count_input_tokens(self, request: Request) -> Response:
        """Count the tokens of the input."""
        service = self._service
        service.check_alive()
        _, body, num_bytes = await read_body(request, service, lambda _: ResponsesRequest, take_response_fields)
        with planned(service, Place(owner_of(request), receive=request.receive), num_bytes) as planning:
            asked = await self._kept.asked(body, planning)
            counted = await count_input_tokens(asked, planning)
        return JSONResponse(InputTokens(input_tokens=counted).model_dump())

    async def retrieve_response(self, request: Request) -> Response:
        """Return a response, or its events."""
        stream, after = stream_asked(request)
        job = await self._found(request)
        plan = await self._kept.plan(job)
        check_include(request, has_logprobs=plan.asked.includes_logprobs)
        if not stream:
            return await self._answer(job, plan, request)
        if job.is_unreadable:
            after = NO_EVENT  # nothing is sent but the error
        if after > NO_EVENT:
            await self._check_after(after, job, plan)
        return StoredAnswer(self._service, self._jobs, job, plan, stream=True, after=after)

    async def list_input_items(self, request: Request) -> Response:
        """Return a page of the items that a response was made of."""
        job = await self._found(request)
        check_include(request, has_logprobs=False)
        items = items_by_id(job.completion_id, (await self._kept.plan(job)).asked)
        page, has_more = page_of(request, list(items.items()), itemgetter(0), most=_MAX_LIMIT, default=_LIMIT)
        listed = page_json([item_json(item_id, item) for item_id, item in page], has_more=has_more)
        return await self._service.in_thread(json_response, listed)

    async def cancel_response(self, request: Request) -> Response:
        """Cancel a response."""
        job = await self._found(request)
        plan = await self._kept.plan(job)
        if job.has_ended and not plan.asked.background:
            message = (
                f"cannot cancel a synchronous response: {job.completion_id!r} has ended, and background was not true"
            )
            raise ServiceError("invalid_value", message, param="id")
        await self._jobs.cancel(job)
        return await self._answer(job, await self._kept.plan(job), request)

    async def delete_response(self, request: Request) -> Response:
        """Delete a response."""
        job = await self._found(request)
        await self._jobs.delete(job)
        return JSONResponse(DeletedResponse(id=job.completion_id).model_dump())

    async def _found(self, request: Request) -> BackgroundJob:
        """Return the job that the path names. Raises ServiceError."""
        return await self._kept.find(request.path_params["id"], owner_of(request), "id")

    async def _answer(self, job: BackgroundJob, plan: ResponsePlan, request: Request) -> Response:
        """Return the response so far."""
        log_fields(request.scope)["completion_id"] = job.completion_id
        answer = await self._kept.read(job, plan)
        return await self._service.in_thread(json_response, answer)

    async def _check_after(self, after: int, job: BackgroundJob, plan: ResponsePlan) -> None:
        """Raise ServiceError if a response has no event `after`, nor can get it.

        After a power cut a reader may be ahead of a response that runs again. It waits if the same tokens come again.
        """
        if not job.has_ended and job.record.batch_invariant:
            return
        status, batches = job.status, await self._jobs.outputs(job)
        count = await self._service.in_thread(count_events, plan, batches, status)
        if after >= count:
            message = f"starting_after may be at most {count - 1}, as the response has no more events, got {after}"
            raise ServiceError("invalid_value", message, param="starting_after")


async def _refuse(what: str, request: Request) -> Response:
    """Raise ServiceError: this server lacks the route."""
    raise ServiceError("not_found", f"{what} is not supported by this server: there is no {request.url.path}")


def _check_together(body: ResponsesRequest, key: str | None) -> None:
    """Raise InvalidRequestError if fields contradict each other."""
    if body.store is False and (body.background or key is not None):
        raise InvalidRequestError("store must not be false with background or an Idempotency-Key", param="store")
    wanted = None if body.text is None else body.text.format
    if wanted is not None and (wanted.schema_ is not None) != (wanted.type == "json_schema"):
        rule = "may be given only" if wanted.type != "json_schema" else "must be given"
        message = f"text.format.schema {rule} with the type json_schema"
        raise InvalidRequestError(message, param="text.format.schema")
    if body.top_logprobs and not body.includes_logprobs:
        raise InvalidRequestError(f"top_logprobs may be given only with include {LOGPROBS}", param="top_logprobs")
