"""The routes of batches, in the shapes of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.server.api.background import owner_of
from gptserve.server.api.completions import read_body
from gptserve.server.api.files import check_expiry
from gptserve.server.api.pages import page_json, page_of, page_parameters
from gptserve.server.batches.batches import Batches
from gptserve.server.batches.runner import KeptBatch
from gptserve.server.completions.service import Service
from gptserve.server.core.background_status import BATCH_STATUSES
from gptserve.server.http.envelope import log_fields
from gptserve.server.schemas.batches import (
    BatchError,
    BatchErrors,
    BatchList,
    BatchObject,
    BatchRequest,
    RequestCounts,
)
from gptserve.server.schemas.openapi import ID, error_responses, json_body

_PATH = "/v1/batches"
_MAX_LIMIT, _LIMIT = 100, 20


def batches_router(service: Service, batches: Batches) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["batches"])

    async def found(request: Request) -> KeptBatch:
        return await batches.find(request.path_params["id"], owner_of(request))

    @router.post(
        _PATH,
        summary="Answer the requests in a file, behind all others",
        openapi_extra=json_body(BatchRequest),
        responses={200: {"model": BatchObject}, **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)},
    )
    async def create_batch(request: Request) -> Response:
        service.check_shared("a batch")
        _, body, _ = await read_body(request, service, lambda _: BatchRequest)
        expiry = body.output_expires_after
        kept_s = None if expiry is None else check_expiry("output_expires_after", expiry.anchor, expiry.seconds)
        begun = await batches.begin(owner_of(request), body.endpoint, body.input_file_id, body.metadata, kept_s)
        log_fields(request.scope)["batch_id"] = begun.record.batch_id
        return JSONResponse(to_batch_object(begun).model_dump())

    @router.get(
        _PATH,
        summary="List your batches, newest first",
        openapi_extra={"parameters": page_parameters(_MAX_LIMIT, _LIMIT)},
        responses={200: {"model": BatchList}, **error_responses(400, 401)},
    )
    async def list_batches(request: Request) -> Response:
        listed = await batches.list_batches(owner_of(request))
        page, has_more = page_of(request, listed, lambda one: one.record.batch_id, most=_MAX_LIMIT, default=_LIMIT)
        return JSONResponse(page_json([to_batch_object(batch).model_dump() for batch in page], has_more=has_more))

    @router.get(
        f"{_PATH}/{{id}}",
        summary="Describe a batch",
        openapi_extra={"parameters": [ID]},
        responses={200: {"model": BatchObject}, **error_responses(401, 404)},
    )
    async def retrieve_batch(request: Request) -> Response:
        return JSONResponse(to_batch_object(await found(request)).model_dump())

    @router.post(
        f"{_PATH}/{{id}}/cancel",
        summary="Cancel a batch; what it has so far goes into its files",
        openapi_extra={"parameters": [ID]},
        responses={200: {"model": BatchObject}, **error_responses(401, 404)},
    )
    async def cancel_batch(request: Request) -> Response:
        batch = await found(request)
        await batches.cancel(batch)
        return JSONResponse(to_batch_object(batch).model_dump())

    return router


def to_batch_object(batch: KeptBatch) -> BatchObject:
    """Return a batch as clients see it."""
    record = batch.record
    errors = [BatchError(code=e.code, message=e.message, param=e.param, line=e.line) for e in record.errors]
    times = {f"{status}_at": record.times.get(status) for status in BATCH_STATUSES if status != "validating"}
    return BatchObject.model_validate(
        {
            "id": record.batch_id,
            "endpoint": record.endpoint,
            "errors": BatchErrors(data=errors) if errors else None,
            "input_file_id": record.input_file_id,
            "status": record.status,
            "output_file_id": record.output_file_id,
            "error_file_id": record.error_file_id,
            "created_at": record.created,
            "expires_at": record.expires_at,
            **times,
            "request_counts": RequestCounts(
                total=record.num_lines, completed=batch.num_completed, failed=batch.num_failed
            ),
            "metadata": record.metadata,
        }
    )
