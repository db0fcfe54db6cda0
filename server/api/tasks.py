"""Which routes a server has by its --task, and what those of others answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter
from starlette.responses import Response

from gptserve.server.core.errors import ServiceError
from gptserve.weights.pooling import Task

ROUTES: Mapping[Task, tuple[str, ...]] = {
    "generate": (
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    ),
    "embed": ("/v1/embeddings",),
    "classify": ("/v1/classify", "/classify"),
    "score": ("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"),
}
"""The routes that need this task."""
ALSO: Mapping[Task, tuple[Task, ...]] = {"classify": ("score",)}
"""The tasks whose routes a server with another has, too: a classifier of one label scores pairs."""


def other_tasks_router(task: Task) -> APIRouter:
    """Return the routes of all other tasks, which say what they need."""
    router = APIRouter()
    for other, paths in ROUTES.items():
        for path in paths if other not in (task, *ALSO.get(task, ())) else ():
            router.add_api_route(path, _refusal(path, other, task), methods=["POST"], include_in_schema=False)
    return router


def _refusal(path: str, needed: Task, task: Task) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        message = f"{path} needs a server with --task {needed}; this one was started with --task {task}"
        raise ServiceError("unsupported_task", message)

    return refuse
