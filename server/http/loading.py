"""The placeholder application: answers 503 with the progress until the model is loaded.

`serve.py` makes it before anything is loaded, and then opens it. Knows neither the engine nor the routes behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gptserve.server.core.error_responses import error_response, headers_of
from gptserve.server.core.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a model has come: a share in [0, 1], and in words."""

    status: Literal["downloading", "loading"]
    share: float
    words: str


class LoadingApp:
    """Passes requests on to the application given to `open`. Until then it refuses them, with the progress."""

    def __init__(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._started_at = time.monotonic()
        self._app: ASGIApp = self._refuse

    def open(self, app: ASGIApp) -> None:
        """Let `app` answer from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        progress = self._progress()
        error = ServiceError("loading", f"the model is {progress.status}: {progress.words}; try again later")
        response: Response = error_response(error, scope=scope)
        if scope["path"].endswith("/health"):
            elapsed_s = round(time.monotonic() - self._started_at, 1)
            state = {
                "status": progress.status,
                "progress": round(progress.share, 3),
                "detail": progress.words,
                "elapsed_s": elapsed_s,
            }
            response = JSONResponse(state, 503, headers_of(error))
        await response(scope, receive, send)
