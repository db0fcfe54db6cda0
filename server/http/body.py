"""Reading a JSON request body within limits of size, time and complexity."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pydantic_core import from_json
from starlette.requests import Request

from gptserve.server.core.errors import ServiceError, show
from gptserve.server.http.json_numbers import check_numbers

MAX_INCOMING_BYTES = 64 * 2**20  # 32 of the largest by default; an honest one takes some milliseconds

# No other thread runs while a body is parsed and checked. A body at one limit takes 10 to 40 ms, at all of them 50 ms.
# A prompt of 128k token ids has half the commas. Marks in strings count, too: a prompt may be a JSON document.
MAX_COUNTS = {b"[": 2**16, b"{": 2**14, b":": 2**16, b",": 2**18}

_TOLERATED_CONTENT_TYPES = frozenset({"", "application/x-www-form-urlencoded"})


class IncomingBodies:
    """The bodies that are being read or parsed, together at most MAX_INCOMING_BYTES, but at least one of any size.

    Over the limit, the body that has been arriving longest is given up: a slow client is more likely to mean harm.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._arriving: dict[asyncio.Timeout, bytearray] = {}  # the longest first

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int, limit_s: float) -> AsyncIterator[bytearray]:
        """Yield the raw body, which counts until the block is left. Stop reading when it is too large or too late.

        Raises ServiceError or ClientDisconnect.
        """
        _check_head(request, max_bytes)
        body, limit = bytearray(), asyncio.timeout(limit_s)
        self._arriving[limit] = body
        try:
            with suppress(TimeoutError):
                async with limit:
                    await self._read(request, body, max_bytes)
            if self._arriving.pop(limit, None) is None:
                raise ServiceError("too_many_bodies", "other bodies arrive at once and this one took longest")
            if limit.expired():
                raise ServiceError("request_timeout", f"the body must arrive within {limit_s:g} s")
            yield body
        finally:
            self._arriving.pop(limit, None)
            self._num_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray, max_bytes: int) -> None:
        async for part in request.stream():
            body += part
            self._num_bytes += len(part)
            if len(body) > max_bytes:
                raise _too_large("more", max_bytes)
            if self._num_bytes > max(MAX_INCOMING_BYTES, max_bytes) and self._arriving:
                limit = next(iter(self._arriving))
                given_up = self._arriving.pop(limit)
                self._num_bytes -= len(given_up)
                given_up.clear()
                limit.reschedule(asyncio.get_running_loop().time())


def parse_json_object(raw: bytes | bytearray) -> dict[str, object]:
    """Parse a body that must be a JSON object. Raises ServiceError."""
    for mark, max_count in MAX_COUNTS.items():
        count = raw.count(mark)
        if count > max_count:
            message = f"the body may have {mark.decode()!r} at most {max_count} times, in strings or not, got {count}"
            raise ServiceError("body_too_complex", message)
    try:
        value = from_json(raw.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise ServiceError("invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ServiceError("invalid_type", f"the body: input should be an object, got {show(value)}")
    check_numbers(raw, value)
    return value


def _check_head(request: Request, max_bytes: int) -> None:
    """Raise ServiceError if the headers announce another type, a coding or too large a body.

    Clients that only post, such as `curl -d`, announce a form or nothing. Browsers send such a body without asking this
    server, from any page, so it is refused if they name the page's origin.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    is_tolerated = media_type in _TOLERATED_CONTENT_TYPES and "origin" not in request.headers
    if media_type != "application/json" and not is_tolerated:
        message = f"content-type must be application/json, got {content_type or 'none'}"
        raise ServiceError("unsupported_media_type", message)
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        message = f"the body must not be encoded, got content-encoding {show(coding)}"
        raise ServiceError("unsupported_media_type", message)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{declared} bytes", max_bytes)


def _too_large(size: str, max_bytes: int) -> ServiceError:
    return ServiceError("body_too_large", f"the body may have at most {max_bytes} bytes, got {size}")
