"""Reads an upload: a form of multipart/form-data whose file goes to the disk as it comes, within limits.

No more than a piece of it is in memory. `api/files.py` calls `read_upload`. Knows no owners.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gptserve.server.core.errors import ServiceError, show
from gptserve.server.files.files import PIECE_BYTES, Upload

LEAST_BYTES_PER_S = 2**15  # a quarter of a megabit a second, as the largest body of JSON must have
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELD_BYTES = 64
_MAX_NAME = 255  # characters of a file's name
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(slots=True)
class Form:
    """What a form says beside the bytes of its file."""

    filename: str | None = None
    fields: dict[str, str] = field(default_factory=dict)


async def read_upload(content_type: str, stream: AsyncIterator[bytes], upload: Upload, limit_s: float) -> Form:
    """Write the file of a form to `upload`, as it comes; return the rest of the form.

    It must come within limit_s and the time that its bytes take at LEAST_BYTES_PER_S. Raises ServiceError and what
    `stream` and `upload` raise.
    """
    reader, num_bytes = _Reader(_boundary(content_type)), 0
    began, limit = asyncio.get_running_loop().time(), asyncio.timeout(limit_s)
    try:
        async with limit:
            async for part in stream:
                num_bytes += len(part)
                limit.reschedule(began + limit_s + num_bytes / LEAST_BYTES_PER_S)
                reader.feed(part)
                if len(reader.content) >= PIECE_BYTES:
                    await upload.write(reader.take())
            form = reader.end()
            if reader.content:
                await upload.write(reader.take())
            return form
    except TimeoutError:
        if not limit.expired():
            raise
        rule = f"a file must arrive within {limit_s:g} s and a second for each {LEAST_BYTES_PER_S} bytes"
        raise ServiceError("request_timeout", f"{rule}: {num_bytes} bytes have") from None


def _boundary(content_type: str) -> bytes:
    media_type, options = parse_options_header(content_type)
    if media_type != b"multipart/form-data" or not options.get(b"boundary"):
        message = f"content-type must be multipart/form-data with a boundary, got {show(content_type) or 'none'}"
        raise ServiceError("unsupported_media_type", message)
    return options[b"boundary"]


class _Reader:
    """The parts of a form; `content` are the bytes of its file that nobody has taken."""

    def __init__(self, boundary: bytes) -> None:
        self.content = bytearray()
        self._form = Form()
        self._values: dict[str, bytearray] = {}
        self._header, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._target: bytearray = self.content
        self._most: int | None = None
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, data: bytes) -> None:
        """Read more of the body. Raises ServiceError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None

    def take(self) -> bytes:
        """Return the bytes of the file that have come since the last call."""
        taken = bytes(self.content)
        self.content.clear()
        return taken

    def end(self) -> Form:
        """Return the form once its body has ended. Raises ServiceError."""
        if not self._has_ended:
            raise ServiceError("invalid_value", "the form has no end: its last boundary is missing")
        if self._form.filename is None:
            raise ServiceError("missing_required_parameter", "file is required", param="file")
        self._form.fields.update((name, _text(name, value)) for name, value in self._values.items())
        return self._form

    def _begin_part(self) -> None:
        self._disposition = b""

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = _text("the name of a field", options.get(b"name", b""))
        if name == "file":
            if self._form.filename is not None:
                raise ServiceError("invalid_value", "file may be given once", param="file")
            if b"filename" not in options:
                raise ServiceError("invalid_type", "file must be a file with a filename", param="file")
            self._form.filename = _filename(options[b"filename"])
            self._target, self._most = self.content, None
            return
        if name not in _FIELDS:
            known = ", ".join(("file", *_FIELDS))
            raise ServiceError("unknown_parameter", f"a form may have {known}, got {show(name)}", param=name[:60])
        if name in self._values:
            raise ServiceError("invalid_value", f"{name} may be given once", param=name)
        self._target, self._most = self._values.setdefault(name, bytearray()), _MAX_FIELD_BYTES

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._target += data[start:end]
        if self._most is not None and len(self._target) > self._most:
            name = next(name for name, value in self._values.items() if value is self._target)
            raise ServiceError("invalid_value", f"{name} may have at most {self._most} bytes", param=name)

    def _end(self) -> None:
        self._has_ended = True


def _filename(raw: bytes) -> str:
    """Return the last part of a name, which is no path here (RFC 7578, section 4.2). Raises ServiceError."""
    name = _text("filename", raw)
    for coded, mark in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):  # html.spec.whatwg.org, multipart form data
        name = name.replace(coded, mark)
    name = re.split(r"[/\\]", name)[-1]
    if not 0 < len(name) <= _MAX_NAME or _UNPRINTABLE.search(name):
        rule = f"filename must have 1 to {_MAX_NAME} characters after its last slash, none of them a control character"
        raise ServiceError("invalid_value", f"{rule}, got {show(name)}", param="file")
    return name


def _text(name: str, raw: bytes | bytearray) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ServiceError("invalid_value", f"{name} must be UTF-8") from None


def _malformed(error: FormParserError) -> ServiceError:
    return ServiceError("invalid_value", f"the body is no form of multipart/form-data: {error}")
