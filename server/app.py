"""The ASGI application: routes, middlewares and the one handler of errors, joined around an engine.

It does not start or stop the engine and reads no configuration; `serve.py` and tests do.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from gptserve.engine.process.client import EngineClient
from gptserve.server.api.background import background_router
from gptserve.server.api.completions import chat_router, completions_router
from gptserve.server.api.errors import error_response
from gptserve.server.api.models import models_router
from gptserve.server.api.operations import operations_router
from gptserve.server.background.journal import Journal
from gptserve.server.background.store import BackgroundStore, Restore
from gptserve.server.completions.chat import restore_chat
from gptserve.server.completions.harmony import find_marks
from gptserve.server.completions.plan import restore_completion
from gptserve.server.completions.service import AppOptions, Service, Tokenizer
from gptserve.server.completions.shapes import CHAT_SHAPE, TEXT_SHAPE
from gptserve.server.errors import ServiceError
from gptserve.server.http.envelope import RequestEnvelope, report
from gptserve.server.operations.auth import OPERATION_PATHS, PROBE_PATHS, ApiKeyGuard
from gptserve.server.operations.keys import ApiKeys
from gptserve.server.operations.lifecycle import Lifecycle
from gptserve.server.operations.metrics import Metrics


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, options: AppOptions, journal: Journal | None = None
) -> FastAPI:
    """Return the application; the engine may start later. `app.state` has the lifecycle, the store and the metrics.

    Without a journal background completions live in memory. Raises KeyFileError.
    """
    metrics = Metrics(engine, options.model_name)
    service = Service(engine, tokenizer, options, Lifecycle(), metrics)
    restore: dict[str, Restore] = {
        TEXT_SHAPE.object: restore_completion,
        CHAT_SHAPE.object: partial(restore_chat, tokenizer=tokenizer, marks=find_marks(tokenizer)),
    }
    store = BackgroundStore(service, journal or Journal(None), restore)
    metrics.watch_background(store.counts)
    settings = options.settings
    keys = ApiKeys(settings.api_keys, settings.api_key_file)
    open_paths = PROBE_PATHS if settings.protect_operations else PROBE_PATHS | OPERATION_PATHS
    app = FastAPI(
        title="gptserve",
        description="An exact, small inference server for GPT-style language models",
        version=_version(),
        openapi_url=None,  # FastAPI's document would know no request bodies, its pages load scripts from elsewhere
        redirect_slashes=False,
        middleware=[Middleware(RequestEnvelope), Middleware(ApiKeyGuard, keys=keys, open_paths=open_paths)],
        exception_handlers={HTTPException: _answer_routing_error},
    )
    app.state.lifecycle = service.lifecycle
    app.state.store = store
    app.state.metrics = metrics
    for make_router in (completions_router, chat_router, background_router):
        app.include_router(make_router(service, store))
    for make_plain_router in (models_router, operations_router):
        app.include_router(make_plain_router(service))
    return app


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    """Put Starlette's own errors, no such route or method, into the envelope of all others."""
    assert isinstance(error, HTTPException)
    told = ServiceError("not_found", f"there is no route {request.method} {request.url.path}")
    if error.status_code == 405:
        told = ServiceError("method_not_allowed", f"this route does not take {request.method} {request.url.path}")
    return error_response(report(told, request.scope), error.headers)


def _version() -> str:
    try:
        return importlib.metadata.version("gptserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that is not installed
