"""Routes for operators and their machines: /health, /ready, /metrics, /version, /openapi.json, and HEAD /."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.server.api.tokenize import TOKENIZE_BODIES
from gptserve.server.completions.service import Service
from gptserve.server.schemas.batches import BatchRequest
from gptserve.server.schemas.completions import ChatCompletionChunk, ChatRequest, CompletionRequest, Status, Version
from gptserve.server.schemas.embeddings import EmbeddingRequest
from gptserve.server.schemas.messages import MessageEvent, MessagesErrorBody, MessagesRequest, TokenCountRequest
from gptserve.server.schemas.openapi import error_responses, openapi_document
from gptserve.server.schemas.responses import ResponseEvent, ResponsesRequest
from gptserve.server.schemas.scores import ClassifyRequest, RerankRequest, ScoreRequest

_NO_KEY: dict[str, Any] = {"security": []}
_TEXT: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def operations_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operations"])
    settings = service.options.settings
    extra, refusals = (None, error_responses(401)) if settings.protect_operations else (_NO_KEY, {})
    unwell = error_responses(503)
    document: dict[str, Any] = {}

    @router.get(
        "/health", summary="Liveness probe: whether the server is healthy", openapi_extra=_NO_KEY, responses=unwell
    )
    async def health() -> Status:
        service.check_alive()
        return Status()

    @router.get(
        "/ready",
        summary="Readiness probe: a real token was decoded, and no shutdown has begun",
        openapi_extra=_NO_KEY,
        responses=unwell,
    )
    async def ready() -> Status:
        service.check_ready()
        return Status()

    @router.get("/version", summary="Version of the server", openapi_extra=extra, responses=refusals)
    async def version(request: Request) -> Version:
        return Version(version=request.app.version)

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        openapi_extra=extra,
        responses={200: _TEXT, **refusals},
    )
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.head("/", include_in_schema=False)
    async def root() -> Response:
        """Tell a client of Anthropic's API, which asks so, that there is a server."""
        return Response()

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        if not document:
            completions = CompletionRequest, ChatRequest, ChatCompletionChunk
            of_messages = MessagesRequest, TokenCountRequest, MessageEvent, MessagesErrorBody
            of_generation = *completions, ResponsesRequest, ResponseEvent, *of_messages
            of_scores = ScoreRequest, RerankRequest
            of_task = {
                "generate": of_generation,
                "embed": (EmbeddingRequest,),
                "classify": (ClassifyRequest, *of_scores),
                "score": of_scores,
            }[settings.engine.task]
            models = (*of_task, *TOKENIZE_BODIES, BatchRequest)
            make = partial(openapi_document, request.app, models, settings)
            document.update(await asyncio.to_thread(make))  # some 100 ms, once
        return JSONResponse(document)

    return router
