"""API keys: an ASGI middleware that refuses requests without a valid key, logs its owner and counts its answers."""

from __future__ import annotations

from collections.abc import Mapping, Set

from starlette.types import ASGIApp, Receive, Scope, Send

from gptserve.server.core.errors import ServiceError
from gptserve.server.core.keys import ApiKeys
from gptserve.server.core.limits import KeyLimits
from gptserve.server.http.envelope import log_fields

PROBE_PATHS = frozenset({"/health", "/ready"})
OPERATION_PATHS = frozenset({"/metrics", "/version", "/openapi.json"})
"""Open unless --protect-operations: scrapers have no key, and these routes tell nothing about requests."""


class ApiKeyGuard:
    """Requires one of `keys` as `Authorization: Bearer KEY` or `x-api-key: KEY`, except on `open_paths` and for HEAD /.

    Clients of Anthropic's API send the one or the other, or both: then one of them has to be valid.

    The name of the key's owner becomes "owner" in the scope's state, and "key" in the log line.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Set[str], limits: KeyLimits) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise ServiceError."""
        if scope["path"] in self._open_paths or (scope["method"], scope["path"]) == ("HEAD", "/"):
            await self._app(scope, receive, send)
            return
        owner = self._owner(dict(scope["headers"]))
        scope["state"]["owner"] = log_fields(scope)["key"] = owner
        with self._limits.answering(owner):
            await self._app(scope, receive, send)

    def _owner(self, headers: Mapping[bytes, bytes]) -> str:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        keys = [given.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:
            keys.append(headers[b"x-api-key"].strip())
        if not keys:
            raise _unauthorized("this server needs an API key: send the header 'Authorization: Bearer KEY'")
        name = next(filter(None, map(self._keys.name_of, keys)), None)
        if name is None:
            raise _unauthorized("Incorrect API key provided: it is not one of this server's")
        return name


def _unauthorized(message: str) -> ServiceError:
    return ServiceError("invalid_api_key", message)
