"""Reading a JSON request body within limits of size, time and complexity."""

from __future__ import annotations

import asyncio

from pydantic_core import from_json
from starlette.requests import Request

from server.errors import ApiError, show

# No other thread runs while a body is parsed and checked. Each limit stands for 10 to 40 ms of that, all of them for
# 50 ms. A prompt of 128k token ids has half the commas. Strings are counted, too: a prompt may be a document of JSON.
MAX_COUNTS = {b"[": 2**16, b"{": 2**14, b":": 2**16, b",": 2**18}


async def read_json_body(request: Request, max_bytes: int, limit_s: float) -> bytes:
    """Return the raw body; stop reading when it is too large or too late. Raises ApiError or ClientDisconnect."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415, f"content-type must be application/json, got {content_type or 'none'}", code="unsupported_media_type"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{declared} bytes", max_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        headers = {"connection": "close"}
        message = f"the body must arrive within {limit_s:g} s"
        raise ApiError(408, message, code="request_timeout", headers=headers) from None


def parse_json_object(raw: bytes) -> dict[str, object]:
    """Return the object a body is. Raises ApiError."""
    _check_complexity(raw)
    try:
        value = from_json(raw)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body: input should be an object, got {show(value)}", code="invalid_type")
    return value


def _check_complexity(raw: bytes) -> None:
    for mark, most in MAX_COUNTS.items():
        count = raw.count(mark)
        if count > most:
            message = f"the body may have {mark.decode()!r} at most {most} times, in strings or not, got {count}"
            raise ApiError(400, message, code="body_too_complex")


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large("more", max_bytes)
    return bytes(body)


def _too_large(size: str, max_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot carry another request.
    return ApiError(
        413,
        f"the body may have at most {max_bytes} bytes, got {size}",
        code="body_too_large",
        headers={"connection": "close"},
    )
