"""POST /v1/embeddings: the vectors of texts, in the shape of OpenAI's API. And what other tasks' routes answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gptserve.server.api.background import owner_of
from gptserve.server.api.completions import read_body
from gptserve.server.completions.admission import planned
from gptserve.server.completions.planning import Place
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError
from gptserve.server.embeddings.answer import EmbeddingResponse
from gptserve.server.embeddings.plan import plan_embeddings
from gptserve.server.schemas.embeddings import EmbeddingList, EmbeddingRequest
from gptserve.server.schemas.openapi import error_responses, json_body
from gptserve.weights.pooling import Task

ROUTES: Mapping[Task, tuple[str, ...]] = {
    "generate": (
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    ),
    "embed": ("/v1/embeddings",),
}
"""The routes that only a server with this task has."""


def embeddings_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["embeddings"])

    @router.post(
        "/v1/embeddings",
        name="create_embedding",
        summary="Turn texts into vectors",
        openapi_extra=json_body(EmbeddingRequest),
        responses={
            200: {"model": EmbeddingList, "description": "A vector of each input"},
            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
        },
    )
    async def create_embedding(request: Request) -> Response:
        started_at = time.perf_counter()
        owner = owner_of(request)
        service.admit(owner)  # refuse before reading megabytes
        _, body, num_bytes = await read_body(request, service, lambda _: EmbeddingRequest)
        place = Place(owner, started_at, body.timeout_ms, request.receive)
        with planned(service, place, num_bytes) as planning:
            plan = await plan_embeddings(body, planning, owner)
        return EmbeddingResponse(service, plan, started_at)

    return router


def other_tasks_router(task: Task) -> APIRouter:
    """Return the routes of all other tasks, which say what they need."""
    router = APIRouter()
    for other, paths in ROUTES.items():
        for path in paths if other != task else ():
            router.add_api_route(path, _refusal(path, other, task), methods=["POST"], include_in_schema=False)
    return router


def _refusal(path: str, needed: Task, task: Task) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        message = f"{path} needs a server with --task {needed}; this one was started with --task {task}"
        raise ServiceError("unsupported_task", message)

    return refuse
