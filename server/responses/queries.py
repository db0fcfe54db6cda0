"""The parameters in the paths and queries of the routes of one response: their documents, and what a request asks."""

from __future__ import annotations

import re
from typing import get_args

from starlette.requests import Request

from gptserve.server.core.errors import ServiceError, show
from gptserve.server.responses.stream import NO_EVENT
from gptserve.server.schemas.responses import LOGPROBS, Includable

NOTHING = tuple(value for value in get_args(Includable) if value != LOGPROBS)
"""What may be included and asks for nothing."""

INCLUDE = {
    "name": "include",
    "in": "query",
    "schema": {"type": "array", "items": {"enum": [*NOTHING]}},
    "description": "changes nothing, as reasoning comes in the clear; also accepted as `include[]`",
}
STREAM = {"name": "stream", "in": "query", "schema": {"type": "boolean"}, "description": "answer as events"}
AFTER_EVENT = {
    "name": "starting_after",
    "in": "query",
    "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    "description": "the sequence_number of the last event to leave out of a stream",
}


def stream_asked(request: Request) -> tuple[bool, int]:
    """Return whether the events are asked for, and the number of the last one that is not. Raises ServiceError."""
    stream, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
    if stream not in ("true", "false"):
        raise _error("stream", f"stream must be true or false, got {show(stream)}")
    if after is None:
        return stream == "true", NO_EVENT
    if stream == "false":
        raise _error("starting_after", "starting_after may be given only with stream true")
    if re.fullmatch("[0-9]{1,9}", after) is None:
        message = f"starting_after must be the sequence_number of an event, such as 17, got {show(after)}"
        raise _error("starting_after", message)
    return True, int(after)


def check_include(request: Request, *, has_logprobs: bool) -> None:
    """Raise ServiceError if a request wants something with its answer that has not been kept."""
    query = request.query_params
    for value in (*query.getlist("include"), *query.getlist("include[]")):
        if value == LOGPROBS and not has_logprobs:
            message = f"include may have {LOGPROBS} only where the request for the response had it, too"
            raise _error("include", message)
        if value not in (LOGPROBS, *NOTHING):
            raise _error("include", f"include may have {', '.join((LOGPROBS, *NOTHING))}, got {show(value)}")


def _error(param: str, message: str) -> ServiceError:
    return ServiceError("invalid_value", message, param=param)
