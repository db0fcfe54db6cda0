"""Every error that a client can get, in OpenAI's envelope: {"error": {message, type, param, code}}.

`to_api_error` is the one table from exceptions to status and code; `error_response` and `sse.py` render the result.
Knows nothing of routes.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.server.background.journal import JournalError
from gptserve.weights.errors import ChatTemplateError, TokenizerError

UNAVAILABLE_RETRY_AFTER_S = 5  # about the time for an orchestrator to route elsewhere, or for a small model to load
INTERNAL_ERROR = "internal_error"  # the code of unexpected errors
MAX_MESSAGE = 400  # characters; do not send a value of megabytes back
# After these fields of schemas.py pydantic's location names the member of the union.
UNIONS = frozenset({"prompt", "stop", "content"})

_ROUTING_ERRORS = {404: ("not_found", "there is no route"), 405: ("method_not_allowed", "this route does not take")}

# Replaces those of pydantic's messages that use Python's words.
_JSON_RULES = {
    "list_type": "input should be an array",
    "dict_type": "input should be an object",
    "model_type": "input should be an object",
    "none_required": "input should be null",
}


class ApiError(Exception):
    """An answer other than 200. `param` is the field at fault."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        super().__init__(shown)
        self.status = status
        self.message = shown
        self.code = code
        self.param = param
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ApiError:
        """Return the error with these `fields`."""
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        """Return all its fields, as JSON types."""
        names = ("status", "message", "code", "param", "headers")
        return {name: getattr(self, name) for name in names}

    def fresh(self) -> ApiError:
        """Return a copy without a traceback; raising one instance again would keep every reader's frames alive."""
        return ApiError(**self.fields())

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the envelope."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def unavailable(message: str, *, code: str) -> ApiError:
    """Return a 503 with a Retry-After."""
    return ApiError(503, message, code=code, headers={"retry-after": str(UNAVAILABLE_RETRY_AFTER_S)})


def shutting_down() -> ApiError:
    """Return the error for requests that a shutdown refuses or cuts off."""
    return unavailable("the server is shutting down", code="draining")


def to_api_error(error: Exception) -> ApiError:
    """Return the API's error for an exception; an unexpected one is a 500."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), code=error.code, param=error.param)
        case TokenizerError():
            return ApiError(400, f"prompt: {error}", code="invalid_value", param="prompt")
        case ChatTemplateError():
            return ApiError(400, str(error), code="invalid_chat_template_input", param="messages")
        case ValidationError():
            return _invalid_body(error)
        case JournalError():
            return ApiError(500, str(error), code="journal_failed")
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_after_s)})
        case EngineDiedError(kind=DeathKind.CLOSED):
            return shutting_down()
        case EngineDiedError():
            return unavailable(f"the engine has died: {error}", code="engine_unavailable")
    return ApiError(500, "the server failed to answer this request", code=INTERNAL_ERROR)


def routing_error(error: HTTPException, method: str, path: str) -> ApiError:
    """Return the error for a request that no route takes."""
    code, rule = _ROUTING_ERRORS[error.status_code]
    return ApiError(error.status_code, f"{rule} {method} {path}", code=code, headers=dict(error.headers or {}))


def error_response(error: ApiError) -> JSONResponse:
    """Render `error` as a response."""
    return JSONResponse(error.body(), error.status, error.headers)


def show(value: object) -> str:
    """Return a user's value, shortened and almost as JSON."""
    return _Shown().repr(value)


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist, self.maxdict, self.maxstring, self.maxlong, self.maxother = 4, 4, 60, 40, 60

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - reprlib finds it by the type's name
        return "null"


def _invalid_body(error: ValidationError) -> ApiError:
    """Return the error for the first fault in a request body."""
    first = error.errors(include_url=False, include_context=False)[0]
    kind, value = first["type"], first["input"]
    rule = _JSON_RULES.get(kind) or first["msg"][0].lower() + first["msg"][1:]
    steps = itertools.pairwise((None, *first["loc"]))
    path = [part for before, part in steps if before not in UNIONS and part != "[key]"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {rule.removeprefix('invalid JSON: ')}", code="invalid_json")
    if not path:
        return ApiError(400, f"the body: {rule}, got {show(value)}", code="invalid_type")
    where = str(path[0])[:60] + "".join(f"[{p}]" if isinstance(p, int) else f".{str(p)[:60]}" for p in path[1:])
    if kind == "missing":
        return ApiError(400, f"{where} is required", code="missing_required_parameter", param=where)
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {where}, got {show(value)}", code="unknown_parameter", param=where)
    code = "invalid_type" if kind.endswith("_type") or kind == "none_required" else "invalid_value"
    return ApiError(400, f"{where}: {rule}, got {show(value)}", code=code, param=str(path[0]))
