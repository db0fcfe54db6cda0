"""An ASGI middleware that answers only to certain hosts, so that no web page calls the server by DNS rebinding.

The owner of a page's name can make it mean 127.0.0.1. Then the page's scripts call the server as their own origin, and
only the Host field tells (https://en.wikipedia.org/wiki/DNS_rebinding). Starlette's TrustedHostMiddleware does not
parse IPv6 addresses and answers in plain text.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from starlette.types import ASGIApp, Receive, Scope, Send

from gptserve.server.core.errors import ServiceError, show


class HostGuard:
    """Refuses requests whose host is not one of `hosts`, except on `open_paths`; *.a.example is any name below it."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], open_paths: Set[str]) -> None:
        self._app = app
        self._names = frozenset(host.lower() for host in hosts if not host.startswith("*."))
        self._suffixes = tuple(host[1:].lower() for host in hosts if host.startswith("*."))
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise ServiceError."""
        if scope["path"] not in self._open_paths:
            host = _host(scope)
            if host is not None and host not in self._names and not host.endswith(self._suffixes):
                message = f"the host {show(host)} is not one that --allowed-hosts lets this server answer to"
                raise ServiceError("host_not_allowed", message)
        await self._app(scope, receive, send)


def _host(scope: Scope) -> str | None:
    """Return the host that a request is for: in lower case, without its port and the dot that ends a full name.

    None over HTTP/1.0 without a Host field, which no browser sends.
    """
    field: bytes | None = dict(scope["headers"]).get(b"host")
    if field is None:
        return None
    host = field.decode("latin-1").strip().lower()
    name, colon, port = host.rpartition(":")
    if colon and "]" not in port:
        host = name
    return host.removesuffix(".")
