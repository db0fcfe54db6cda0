"""What a client asks of a list by `limit`, `after` and `order`, and the page that it gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from gptserve.server.core.errors import ServiceError, show

Entry = TypeVar("Entry")


def page_parameters(most: int, default: int) -> list[dict[str, Any]]:
    """Return the descriptions of the parameters in the query."""
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    order = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}}
    after = {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "the id before the page"}
    return [{"name": "limit", "in": "query", "schema": limit}, order, after]


def page_of(
    request: Request, entries: Sequence[Entry], id_of: Callable[[Entry], str], *, most: int, default: int
) -> tuple[list[Entry], bool]:
    """Return the entries that a request asks for, newest first unless it says otherwise, and whether there are more.

    `entries` are oldest first. Raises ServiceError.
    """
    query = request.query_params
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after")
    if re.fullmatch("[0-9]{1,6}", limit) is None or not 1 <= int(limit) <= most:
        raise _error("limit", f"limit must be a whole number from 1 to {most}, got {show(limit)}")
    if order not in ("asc", "desc"):
        raise _error("order", f"order must be asc or desc, got {show(order)}")
    asked = list(entries if order == "asc" else reversed(entries))
    if after is not None:
        place = next((i for i, entry in enumerate(asked) if id_of(entry) == after), None)
        if place is None:
            raise _error("after", f"after must be the id of an entry of the list, got {show(after)}")
        asked = asked[place + 1 :]
    return asked[: int(limit)], len(asked) > int(limit)


def page_json(entries: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, object]:
    """Return a page of entries, each with an id."""
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": has_more}


def _error(param: str, message: str) -> ServiceError:
    return ServiceError("invalid_value", message, param=param)
