"""API keys: an ASGI middleware that lets only their bearers through, to every route but the probes."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyGuard:
    """Requires `Authorization: Bearer KEY` with one of `keys`; without keys it lets everyone through."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise ApiError."""
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            self._check(dict(scope["headers"]).get(b"authorization", b""))
        await self._app(scope, receive, send)

    def _check(self, authorization: bytes) -> None:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise _unauthorized("this server needs an API key: send the header 'Authorization: Bearer KEY'")
        # All keys are compared, each in constant time: how long it takes tells nothing about any of them.
        if True not in [hmac.compare_digest(given.strip(), key) for key in self._keys]:
            raise _unauthorized("the API key is not one of this server's")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
