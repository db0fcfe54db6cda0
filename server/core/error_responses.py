"""Every error that a client can get, in OpenAI's envelope: {"error": {message, type, param, code}}; on the routes of
messages in Anthropic's: {"type": "error", "error": {type, message}, "request_id"}.

`to_service_error` is the one table of the exceptions of others, `_CODES` the one from codes to HTTP's statuses.
`http/envelope.py`, `http/protocol.py` and the encoders of events send what is made here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import Scope

from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.server.core.errors import ServiceError, show, shutting_down
from gptserve.weights.errors import ChatTemplateError

UNAVAILABLE_RETRY_AFTER_S = 5  # about the time for an orchestrator to route elsewhere, or for a small model to load
INTERNAL_ERROR = "internal_error"  # the code of unexpected errors
# After these fields of the schemas pydantic's location names the member of the union.
UNIONS = frozenset({"prompt", "stop", "content", "input", "output", "tool_choice", "system", "text_1", "text_2"})
# What pydantic's location has for a key of an object, and for the kinds of parts, items and tools.
_NO_FIELDS = frozenset(
    {
        *("[key]", "[text]", "[refusal]"),
        *("[message]", "[function_call]", "[custom_tool_call]", "[call_output]", "[item_reference]"),
        *("[function]", "[custom]", "[namespace]", "[hosted]"),
        "[document]",
        *("[thinking]", "[tool_use]", "[tool_result]", "[tool_reference]"),
    }
)

# The codes of each status. All others are of requests that break a rule, with status 400.
_CODES = {
    401: "invalid_api_key",
    403: "host_not_allowed",
    404: "not_found model_not_found completion_not_found file_not_found batch_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "idempotency_key_reused cancelled file_in_use",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "queue_full too_many_kept rate_limit_exceeded",
    431: "head_too_large",
    500: f"{INTERNAL_ERROR} generation_failed journal_failed model_changed",
    501: "not_implemented",
    503: "loading draining engine_restarting engine_unavailable journal_unavailable queue_timeout too_many_bodies "
    "too_many_connections",
}
# The rest of the body is not read, so the connection cannot carry another request.
_CLOSING = ("request_timeout", "body_too_large", "too_many_bodies")
# A retry cannot fix these, so they have x-should-retry: false; OpenAI's clients try every other 409 and 5xx again.
_FINAL = ("idempotency_key_reused", "cancelled", "file_in_use", "generation_failed", "model_changed", "not_implemented")

_MESSAGES_PATH = re.compile(r"/v1/messages(/|$)")
# Anthropic's classes of errors by status, and the classes of all others. Their clients know 503 as overload, too.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# Replaces those of pydantic's messages that use Python's words.
_JSON_RULES = {
    "list_type": "input should be an array",
    "dict_type": "input should be an object",
    "model_type": "input should be an object",
    "none_required": "input should be null",
}


def to_service_error(error: Exception) -> ServiceError:
    """Return what a client is told of an exception; an unexpected one is an INTERNAL_ERROR."""
    match error:
        case ServiceError():
            return error
        case InvalidRequestError():
            return ServiceError(error.code, str(error), param=error.param)
        case ChatTemplateError():
            return ServiceError("invalid_chat_template_input", str(error), param="messages")
        case ValidationError():
            return _invalid_body(error)
        case QueueFullError():
            return ServiceError("queue_full", str(error), retry_after_s=error.retry_after_s)
        case EngineDiedError(kind=DeathKind.CLOSED):
            return shutting_down()
        case EngineDiedError():
            return ServiceError("engine_unavailable", f"the engine has died: {error}")
    return ServiceError(INTERNAL_ERROR, "the server failed to answer this request")


def status_of(error: ServiceError) -> int:
    """Return HTTP's status."""
    return next((status for status, codes in _CODES.items() if error.code in codes.split()), 400)


def codes_of(*statuses: int) -> list[str]:
    """Return the codes that have one of these statuses."""
    return [code for status in statuses for code in _CODES[status].split()]


def headers_of(error: ServiceError) -> dict[str, str]:
    """Return the headers that tell a client's library more."""
    headers = {}
    retry_after_s = UNAVAILABLE_RETRY_AFTER_S if status_of(error) == 503 else error.retry_after_s
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if error.code in _FINAL:
        headers["x-should-retry"] = "false"
    if error.code in _CLOSING:
        headers["connection"] = "close"
    if error.code == "invalid_api_key":
        headers["www-authenticate"] = "Bearer"
    return headers


def error_body(error: ServiceError) -> dict[str, dict[str, str | None]]:
    """Return the envelope; `type` is OpenAI's coarse class of the error."""
    status = status_of(error)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def messages_error_body(error: ServiceError, request_id: str | None = None) -> dict[str, object]:
    """Return Anthropic's envelope; that of an event has no request id."""
    status = status_of(error)
    kind = _MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    named = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {"type": kind, "message": str(error)}, **named}


def is_of_messages(path: str) -> bool:
    """Return whether a path is that of the routes of messages, or below it."""
    return _MESSAGES_PATH.search(path) is not None


def error_response(
    error: ServiceError, headers: Mapping[str, str] | None = None, *, scope: Scope | None = None
) -> JSONResponse:
    """Render `error` as a response, with further headers, in the envelope of the path in the scope."""
    body: Mapping[str, object] = error_body(error)
    if scope is not None and is_of_messages(scope["path"]):
        body = messages_error_body(error, scope.get("state", {}).get("log_fields", {}).get("request_id"))
    return JSONResponse(body, status_of(error), {**headers_of(error), **(headers or {})})


def _invalid_body(error: ValidationError) -> ServiceError:
    """Return the error for the first fault in a request body."""
    first = error.errors(include_url=False, include_context=False)[0]
    kind, value = first["type"], first["input"]
    said = first["msg"].replace(" after validation", "").replace("Dictionary", "Object")  # both are Python's words
    rule = _JSON_RULES.get(kind) or said[0].lower() + said[1:]
    steps = itertools.pairwise((None, *first["loc"]))
    path = [part for before, part in steps if before not in UNIONS and part not in _NO_FIELDS]
    if not path:
        return ServiceError("invalid_type", f"the body: {rule}, got {show(value)}")
    where = str(path[0])[:60] + "".join(f"[{p}]" if isinstance(p, int) else f".{str(p)[:60]}" for p in path[1:])
    if kind == "missing":
        return ServiceError("missing_required_parameter", f"{where} is required", param=where)
    if kind == "extra_forbidden":
        return ServiceError("unknown_parameter", f"unknown field {where}, got {show(value)}", param=where)
    code = "invalid_type" if kind.endswith("_type") or kind == "none_required" else "invalid_value"
    return ServiceError(code, f"{where}: {rule}, got {show(value)}", param=str(path[0]))
