"""The lines of a batch's input file: read within a limit, checked, and the seed and the ids that a line stands for.

A line is OpenAI's: {"custom_id", "method": "POST", "url", "body"}. Knows neither models nor HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from gptserve.engine.request import DRAWN_SEED_LIMIT
from gptserve.server.core.errors import ServiceError, show
from gptserve.server.http.body import parse_json_object

_SKIPPED_BYTES = 2**20  # of a line that is too long, at once
_MAX_CUSTOM_ID = 512  # characters


@dataclass(slots=True)
class RawLine:
    """The n-th line of a file, counted from 1; `data` is None for one that is longer than the limit, or was let go."""

    n: int
    data: bytes | None

    def let_go(self) -> None:
        """Hold the bytes no more, which may be many, once the request in them is read."""
        self.data = None

    @property
    def is_blank(self) -> bool:
        """Whether nothing stands in it."""
        return self.data is not None and not self.data.strip()


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A checked line: one request."""

    custom_id: str
    url: str
    body: dict[str, object]


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file that are not blank; no more than max_bytes of one are in memory."""
    return (raw for raw in read_all_lines(file, max_bytes) if not raw.is_blank)


def read_all_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file, the blank ones, too."""
    n = 0
    while data := file.readline(max_bytes + 1):
        n += 1
        is_long = len(data) > max_bytes and not data.endswith(b"\n")
        while is_long and (rest := file.readline(_SKIPPED_BYTES)):
            if rest.endswith(b"\n"):
                break
        yield RawLine(n, None if is_long else data)


def repeated_lines(lines: Iterable[RawLine]) -> tuple[list[int], set[int]]:
    """Return the numbers of all lines, and of those whose custom_id a line before has. Of each id it holds a hash."""
    numbers, repeated, seen = [], set(), set()
    for raw in lines:
        numbers.append(raw.n)
        with suppress(ServiceError):
            custom_id = parse_json_object(raw.data or b"").get("custom_id")
            if isinstance(custom_id, str):
                digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
                if digest in seen:
                    repeated.add(raw.n)
                seen.add(digest)
    return numbers, repeated


def line_of(raw: RawLine, max_bytes: int, urls: Collection[str], *, is_repeated: bool) -> BatchLine:
    """Return a line whose url is one of `urls`. Raises ServiceError, which names the number of the line."""
    try:
        if is_repeated:
            raise ServiceError("invalid_value", "custom_id must differ from those before", param="custom_id")
        if raw.data is None:
            raise ServiceError("body_too_large", f"it may have at most {max_bytes} bytes")
        return _check(parse_json_object(raw.data), urls)
    except ServiceError as error:
        raise ServiceError(error.code, f"line {raw.n}: {error}", param=error.param) from None


def _check(fields: dict[str, object], urls: Collection[str]) -> BatchLine:
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
        raise _invalid("custom_id", f"a text of 1 to {_MAX_CUSTOM_ID} characters", custom_id)
    if method != "POST":
        raise _invalid("method", "POST", method)
    if not isinstance(url, str) or url not in urls:
        raise _invalid("url", f"one of {', '.join(urls)}", url)
    if not isinstance(body, dict):
        raise _invalid("body", "an object", body)
    return BatchLine(custom_id, url, body)


def _invalid(param: str, rule: str, value: object) -> ServiceError:
    return ServiceError("invalid_value", f"{param} must be {rule}, got {show(value)}", param=param)


def line_digest(batch_id: str, n: int) -> str:
    """Return what the ids of the n-th line of a batch are made of."""
    return hashlib.sha256(f"{batch_id}\n{n}".encode()).hexdigest()[:32]


def line_seed(batch_id: str, n: int) -> int:
    """Return the seed of the n-th line of a batch where its body has none, so that it can be computed again."""
    digest = hashlib.sha256(f"seed\n{batch_id}\n{n}".encode()).digest()
    return int.from_bytes(digest) % DRAWN_SEED_LIMIT
