"""The ASGI application: routes, middlewares and the one handler of errors, joined around an engine.

It neither starts nor stops the engine and reads no configuration; `serve.py` does, and tests do.
"""

from __future__ import annotations

import importlib.metadata

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from engine.client import EngineClient
from server.auth import ApiKeyGuard
from server.envelope import RequestEnvelope, report
from server.errors import error_response, routing_error
from server.lifecycle import Lifecycle
from server.metrics import Metrics
from server.routes.chat import chat_router
from server.routes.completions import completions_router
from server.routes.models import models_router
from server.routes.operations import operations_router
from server.service import AppOptions as AppOptions
from server.service import Service, Tokenizer


def create_app(engine: EngineClient, tokenizer: Tokenizer, options: AppOptions) -> FastAPI:
    """Return the application; the engine may be started later. `app.state.lifecycle` drains it."""
    service = Service(engine, tokenizer, options, Lifecycle(), Metrics(engine, options.model_name))
    app = FastAPI(
        title="gptserve",
        description="An exact, small inference server for GPT-style language models",
        version=_version(),
        openapi_url=None,  # FastAPI's document would know no request bodies, its pages load scripts from elsewhere
        redirect_slashes=False,
        middleware=[Middleware(RequestEnvelope), Middleware(ApiKeyGuard, keys=options.api_keys)],
        exception_handlers={HTTPException: _answer_routing_error},
    )
    app.state.lifecycle = service.lifecycle
    for make_router in (completions_router, chat_router, models_router, operations_router):
        app.include_router(make_router(service))
    return app


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    """Give Starlette's own errors, no such route and no such method, the envelope of all others."""
    assert isinstance(error, HTTPException)
    return error_response(report(routing_error(error, request.method, request.url.path), request.scope))


def _version() -> str:
    try:
        return importlib.metadata.version("gptserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that is not installed
