"""An ASGI middleware for a server behind a proxy that serves it under a path, such as /llm."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Takes the root path off the paths of requests; those without it, as of probes, stay as they are."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        path: str = scope["path"]
        if path.startswith(f"{self._root_path}/"):
            scope = {**scope, "path": path.removeprefix(self._root_path)}
        await self._app(scope, receive, send)
