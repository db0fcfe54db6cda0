"""POST /v1/embeddings: the vectors of texts, in the shape of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gptserve.server.api.background import owner_of
from gptserve.server.api.completions import read_body
from gptserve.server.completions.admission import planned
from gptserve.server.completions.planning import Place
from gptserve.server.completions.service import Service
from gptserve.server.embeddings.plan import plan_embeddings
from gptserve.server.embeddings.run import PooledPlan, PooledResponse
from gptserve.server.schemas.embeddings import EmbeddingList, EmbeddingRequest, PooledRequest
from gptserve.server.schemas.openapi import error_responses, json_body

Body = TypeVar("Body", bound=PooledRequest)


def embeddings_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["embeddings"])

    @router.post(
        "/v1/embeddings",
        summary="Turn texts into vectors",
        openapi_extra=json_body(EmbeddingRequest),
        responses={
            200: {"model": EmbeddingList, "description": "A vector of each input"},
            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
        },
    )
    async def create_embedding(request: Request) -> Response:
        return await answer_pooled(request, service, EmbeddingRequest, plan_embeddings)

    return router


async def answer_pooled(
    request: Request,
    service: Service,
    schema: type[Body],
    plan: Callable[[Body, Service, str | None], Awaitable[PooledPlan]],
) -> Response:
    """Read a body of this schema, plan it, and answer with what the plan makes of the states of its prompts."""
    started_at = time.perf_counter()
    owner = owner_of(request)
    service.admit(owner)  # refuse before reading megabytes
    _, body, num_bytes = await read_body(request, service, lambda _: schema)
    place = Place(owner, started_at, body.timeout_ms, request.receive)
    with planned(service, place, num_bytes) as planning:
        planned_body = await plan(body, planning, owner)
    return PooledResponse(service, planned_body, started_at)
