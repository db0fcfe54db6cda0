"""FastAPI for any ASGI server: the middlewares see requests only.

https://asgi.readthedocs.io/en/latest/specs/
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send


class Application(FastAPI):
    """Answers requests through the middlewares; the events of a server's life and websockets go to the router at once.

    The router completes start-up and shutdown, and refuses every websocket, as there is no route for one.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one scope."""
        if scope["type"] == "http":
            await super().__call__(scope, receive, send)
        else:
            await self.router({**scope, "app": self}, receive, send)
