"""The outermost ASGI middleware: request ids, answers to exceptions, one log line per request.

Routes add fields to the log line with `log_fields(scope)`; an outer middleware gives the first of them.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptserve.server.core.error_responses import INTERNAL_ERROR, error_response, is_of_messages, to_service_error
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.limits import KeyLimits
from gptserve.server.core.metrics import NO_ROUTE, Metrics

CLIENT_GONE = 499  # nginx's status for a client that hung up; only in the log
PROBES = frozenset({"/health", "/ready", "/metrics", "/playground/engine"})
# Fields of the log line that the client is told, too, and their headers.
_TOLD = {
    "ignored": "x-gptserve-ignored",
    "max_tokens": "x-gptserve-max-tokens",
    "completion_id": "x-gptserve-completion-id",
}
TOLD_HEADERS = tuple(_TOLD.values())
_SANE_ID = re.compile(rb"[!-~]{1,128}")

logger = logging.getLogger(__name__)


def log_fields(scope: Scope) -> dict[str, Any]:
    """Return the fields of this request's log line, a dict to add to."""
    fields: dict[str, Any] = scope["state"]["log_fields"]
    return fields


def report(error: Exception, scope: Scope) -> ServiceError:
    """Return what the client is told of an exception; log an unexpected one with its traceback."""
    told = to_service_error(error)
    fields = log_fields(scope)
    fields["error"] = told.code
    if told.code == INTERNAL_ERROR:
        logger.error("request failed unexpectedly", exc_info=error, extra={"request_id": fields["request_id"]})
    return told


class RequestEnvelope:
    """Reads or makes the request id, sends it with every answer, and answers exceptions."""

    def __init__(self, app: ASGIApp, metrics: Metrics, limits: KeyLimits) -> None:
        self._app = app
        self._metrics = metrics
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started_at = time.perf_counter()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        fields: dict[str, Any] = {"request_id": request_id.decode(), "status": None, **state.get("log_fields", {})}
        state["log_fields"] = fields
        # HEAD is GET without the body, which uvicorn leaves out (RFC 9110, section 9.3.2); that of / has its own route.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" and scope["path"] != "/" else scope
        ids = (b"x-request-id", b"request-id") if is_of_messages(scope["path"]) else (b"x-request-id",)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields["status"] = message["status"]
                told = [
                    (header.encode(), str(fields[name]).encode())
                    for name, header in _TOLD.items()
                    if fields.get(name) is not None
                ]
                left = self._limits.headers(scope["state"].get("owner"))
                message["headers"] = [*message["headers"], *((name, request_id) for name in ids), *told, *left]
            await send(message)

        try:
            await self._app(routed, receive, send_with_id)
        except ClientDisconnect:
            fields["status"] = CLIENT_GONE
        except Exception as error:
            if fields["status"] is not None:
                raise
            await error_response(report(error, scope), scope=scope)(scope, receive, send_with_id)
        finally:
            fields["total_s"] = round(time.perf_counter() - started_at, 6)
            route = getattr(routed.get("route"), "path", NO_ROUTE)
            self._metrics.count_answer(scope["method"], route, fields["status"] or CLIENT_GONE)
            _log(scope, fields)


def _request_id(scope: Scope) -> bytes:
    """Return the client's id if it is short and printable, else a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _log(scope: Scope, fields: dict[str, Any]) -> None:
    level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
    told = " ".join(f"{name}={value}" for name, value in fields.items() if name != "request_id" and value is not None)
    extra = {"method": scope["method"], "path": scope["path"], **fields}
    logger.log(level, "%s %s %s", scope["method"], scope["path"], told, extra=extra)
