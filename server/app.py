"""The ASGI application: routes, middlewares and the one handler of errors, joined around an engine.

It does not start or stop the engine and reads no configuration; `serve.py` and tests do.
"""

from __future__ import annotations

import logging
from functools import partial

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

import gptserve
from gptserve.server.api.background import background_router
from gptserve.server.api.batches import batches_router
from gptserve.server.api.completions import chat_router, completions_router
from gptserve.server.api.embeddings import embeddings_router
from gptserve.server.api.files import files_router
from gptserve.server.api.messages import messages_router
from gptserve.server.api.models import models_router
from gptserve.server.api.operations import operations_router
from gptserve.server.api.responses import responses_router
from gptserve.server.api.scores import classify_router, scores_router
from gptserve.server.api.tasks import other_tasks_router
from gptserve.server.api.tokenize import tokenize_router
from gptserve.server.batches.batches import Batches
from gptserve.server.batches.store import BatchStore
from gptserve.server.completions.app_options import AppOptions
from gptserve.server.completions.model import ModelRegistry
from gptserve.server.completions.plan import restore_plan
from gptserve.server.completions.planning import Planning
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import CHAT_SHAPE, TEXT_SHAPE
from gptserve.server.core.error_responses import error_response
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.keys import ApiKeys
from gptserve.server.core.lifecycle import Lifecycle
from gptserve.server.core.limits import KeyLimits
from gptserve.server.core.metrics import Metrics
from gptserve.server.core.settings import ServerSettings
from gptserve.server.files.files import FileLimits, Files
from gptserve.server.files.store import FileStore
from gptserve.server.http.application import Application
from gptserve.server.http.envelope import TOLD_HEADERS, RequestEnvelope, report
from gptserve.server.http.hosts import HostGuard
from gptserve.server.http.root_path import RootPath
from gptserve.server.jobs.background import BackgroundJobs
from gptserve.server.jobs.resumption import Restore
from gptserve.server.jobs.store import NO_FORMER_OWNERS, FormerOwners, JobStore
from gptserve.server.operations.auth import OPERATION_PATHS, PROBE_PATHS, ApiKeyGuard
from gptserve.server.playground.router import PAGE_PATHS, playground_router
from gptserve.server.responses.plan import RESPONSE_SHAPE, restore_response
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest

logger = logging.getLogger(__name__)

MAX_PATH = 200  # characters of a path in a message
_OF_OTHERS = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/tags": "/v1/models",
    "/completion": "/v1/completions",
    "/embedding": "/v1/embeddings",
    "/generate": "/v1/completions",
}
"""What to call in place of routes of Ollama, llama.cpp and text-generation-inference."""


def create_app(
    models: ModelRegistry, options: AppOptions, store: JobStore, file_store: FileStore, batch_store: BatchStore
) -> FastAPI:
    """Return the application; the engines may start later. `app.state` has the lifecycle, what is kept and the metrics.

    Background completions are kept in `store`, files and batches in those of theirs. Raises KeyFileError.
    """
    metrics = Metrics(models.default.engine, models.default.name, options.settings.metrics_prefix)
    settings = options.settings
    keys = ApiKeys(settings.api_keys, settings.api_key_file) if settings.needs_key else None
    limits = KeyLimits(
        partial(_max_requests, settings, keys),
        settings.max_tokens_per_minute_per_key,
        lambda: max(1, metrics.max_connections // 2) if _has_several_owners(keys) else None,
    )
    has_several_owners = partial(_has_several_owners, keys)
    planning = Planning(has_several_owners, settings.engine.max_queue_time_s)
    metrics.num_planned = lambda: planning.num_requests
    service = Service(models, options, Lifecycle(), metrics, limits, planning=planning)
    restore: dict[str, Restore] = {
        TEXT_SHAPE.object: partial(restore_plan, schema=CompletionRequest, shape=TEXT_SHAPE),
        CHAT_SHAPE.object: partial(restore_plan, schema=ChatRequest, shape=CHAT_SHAPE),
        RESPONSE_SHAPE.object: restore_response,
    }
    former_owners = NO_FORMER_OWNERS if keys is None else FormerOwners(keys.positions, keys.owners)
    jobs = BackgroundJobs(service, store, restore, former_owners=former_owners)
    file_limits = FileLimits(settings.max_file_bytes, settings.max_files_bytes, has_several_owners)
    files = Files(file_store, file_limits)
    batches = Batches(service, files, batch_store, file_limits)
    _watch(metrics, jobs, store, files, batches)
    if keys is not None:
        for name in keys.positions.keys() & set(settings.operators) - keys.owners:
            logger.warning("--operator %s names no key any more: that key is now %s", name, keys.positions[name])
    app = Application(
        title="gptserve",
        description="An exact, small inference server for GPT-style language models",
        version=gptserve.__version__,
        openapi_url=None,  # FastAPI's document would know no request bodies, its pages load scripts from elsewhere
        redirect_slashes=False,
        middleware=_middlewares(options, keys, limits, metrics),
        exception_handlers={HTTPException: _answer_routing_error},
    )
    app.state.lifecycle = service.lifecycle
    app.state.jobs = jobs
    app.state.files, app.state.batches = files, batches
    app.state.metrics = metrics
    routers = [*_task_routers(service, jobs), files_router(service, files), batches_router(service, batches)]
    routers += [make(service) for make in (tokenize_router, models_router, operations_router)]
    if settings.playground and settings.engine.task == "generate":
        routers.append(playground_router(service))
    for router in routers:
        _add_routes(app, router, metrics)
    return app


def _watch(metrics: Metrics, jobs: BackgroundJobs, store: JobStore, files: Files, batches: Batches) -> None:
    """Show what is kept in the metrics."""
    metrics.background_counts = jobs.counts
    metrics.journal_bytes = store.num_bytes
    store.on_write = metrics.journal_write_time.observe
    metrics.file_totals = lambda: (files.num_files, files.num_bytes)
    metrics.batch_counts, metrics.line_counts = batches.counts, batches.num_lines


def _task_routers(service: Service, jobs: BackgroundJobs) -> list[APIRouter]:
    """Return the routes of the server's task, and what those of others answer."""
    task = service.options.settings.engine.task
    others = other_tasks_router(task)
    of_pooling = {
        "embed": (embeddings_router,),
        "classify": (classify_router, scores_router),
        "score": (scores_router,),
    }
    if task in of_pooling:
        return [*(make(service) for make in of_pooling[task]), others]
    of_jobs = [make(service, jobs) for make in (completions_router, background_router, chat_router, responses_router)]
    return [*of_jobs, messages_router(service), others]


def _add_routes(app: FastAPI, router: APIRouter, metrics: Metrics) -> None:
    """Add the routes themselves: `include_router` keeps the router beside them and makes each a second time."""
    for route in router.routes:
        assert isinstance(route, APIRoute)
        route.operation_id = route.name  # clients that are generated call their functions so
        for method in route.methods or ():
            metrics.expect_answers(method, route.path, {200, *route.responses})
        app.router.routes.append(route)


def _middlewares(options: AppOptions, keys: ApiKeys | None, limits: KeyLimits, metrics: Metrics) -> list[Middleware]:
    """Return the middlewares that the settings ask for, the outermost first."""
    settings, found = options.settings, list[Middleware]()
    if settings.origins:  # first, as preflights carry no key: https://fetch.spec.whatwg.org/#http-cors-protocol
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_methods=["GET", "HEAD", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after", *TOLD_HEADERS],
            )
        )
    if settings.root_path is not None:
        found.append(Middleware(RootPath, settings.root_path))
    if options.tracing is not None:
        found.append(Middleware(options.tracing.middleware))
    found.append(Middleware(RequestEnvelope, metrics, limits))
    if "*" not in settings.hosts:  # probes and scrapers use any address
        found.append(Middleware(HostGuard, hosts=settings.hosts, open_paths=PROBE_PATHS | {"/metrics"}))
    if keys is not None:
        open_paths = PROBE_PATHS if settings.protect_operations else PROBE_PATHS | OPERATION_PATHS
        open_paths |= PAGE_PATHS if settings.playground else frozenset()
        found.append(Middleware(ApiKeyGuard, keys=keys, open_paths=open_paths, limits=limits))
    return found


def _max_requests(settings: ServerSettings, keys: ApiKeys | None) -> int | None:
    """Return how many requests of a key may run or wait; half of all, where keys have several owners."""
    if settings.max_requests_per_key is None and _has_several_owners(keys):
        return max(1, (settings.engine.max_num_seqs + settings.engine.max_num_queued_reqs) // 2)
    return settings.max_requests_per_key


def _has_several_owners(keys: ApiKeys | None) -> bool:
    return keys is not None and len(keys.owners) > 1


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    """Put Starlette's own errors, no such route or method, into the envelope of all others."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:MAX_PATH]}"
    told, headers = ServiceError("not_found", f"there is no route {asked}; {_what_to_call(request)}"), error.headers
    if error.status_code == 405 and (methods := _methods(request)):
        headers = {"Allow": methods}
        message = f"this route does not take {asked}; it takes {methods}"
        told = ServiceError("method_not_allowed", message)
    told = report(told, request.scope)
    if request.url.path.startswith("/api/"):  # Ollama's clients show a text alone
        return JSONResponse({"error": str(told)}, error.status_code, headers)
    return error_response(told, headers, scope=request.scope)


def _methods(request: Request) -> str:
    """Return the methods that a path takes; Starlette names those of its first route alone.

    A route of just this path hides those that take its end for an id.
    """
    path = request.url.path
    same = [route for route in request.app.router.routes if route.path == path]
    own = {method for route in same for method in route.methods or ()}
    methods = ("GET", "POST", "DELETE")
    return ", ".join(method for method in methods if (method in own if own else _is_route(request, method, path)))


def _what_to_call(request: Request) -> str:
    """Return a hint at the route that a client probably means: with /v1, or without a slash at its end."""
    path = request.url.path.rstrip("/")
    for likely in (path, f"/v1{path}", path[max(0, path.rfind("/v1/")) :], _OF_OTHERS.get(path, path)):
        if likely != request.url.path and _is_route(request, request.method, likely):
            return f"call {request.method} {likely}"
    return "/openapi.json lists the routes"


def _is_route(request: Request, method: str, path: str) -> bool:
    scope = {**request.scope, "method": method, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes)
