"""The placeholder application: until the model is loaded, requests wait for it at first, and then get 503.

`serve.py` makes it before anything is loaded, and then opens it. Knows neither the engine nor the routes behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gptserve.server.core.error_responses import error_response, headers_of
from gptserve.server.core.errors import ServiceError

PATIENCE_S = 10.0
"""Small models load within it. Who waits for others is told soon, as a router may know a server that is ready."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a model has come: a share in [0, 1], and in words."""

    status: Literal["downloading", "loading"]
    share: float
    words: str


class LoadingApp:
    """Passes requests on to the application given to `open`.

    Until then what is posted waits, up to patience_s after this was made, if the model needs no download. All other
    requests are refused, with the progress.
    """

    def __init__(self, progress: Callable[[], Progress], patience_s: float) -> None:
        self._progress = progress
        self._started_at = time.monotonic()
        self._patience_s = patience_s
        self._is_decided = asyncio.Event()
        self._app: ASGIApp = self._wait

    def open(self, app: ASGIApp) -> None:
        """Let `app` answer from now on."""
        self._app = app
        self._is_decided.set()

    def give_up(self) -> None:
        """Refuse what waits; once it is open, this does nothing."""
        self._is_decided.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._app(scope, receive, send)

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_s = self._started_at + self._patience_s - time.monotonic()
        if scope["method"] == "POST" and self._progress().status == "loading" and left_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_decided.wait(), left_s)
        # A bound method is a new object each time.
        await (self._refuse if self._app == self._wait else self._app)(scope, receive, send)

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
