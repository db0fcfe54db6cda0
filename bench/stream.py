"""One streamed completion, and the moments at which its events came.

A client that shares its machine with the server must cost little: it is a protocol of asyncio around the HTTP parser in
C that uvicorn has. `load.py` makes one for each request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise
from typing import cast

import httptools


@dataclass(slots=True)
class Outcome:
    """What one request showed, in seconds of one clock."""

    due: float
    """When the request should have been sent; all its times count from here."""
    num_asked: int
    """Tokens to generate."""
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of the events with choices, of which servers send one a token."""
    num_tokens: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    failure: str | None = None
    """The kind of failure; None for an answer that ended as it should."""
    message: str = ""
    """What the server or the system said of the failure."""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.due

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1] - self.due

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the times between events."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def mean_itl(self) -> float:
        """Mean time of a token after the first; 0 without one."""
        return (self.e2e - self.ttft) / max(1, (self.num_tokens or 0) - 1)


class CompletionStream(asyncio.Protocol):
    """Sends a request once it is connected and fills its outcome; `ended` is done when there is no more to read.

    Data that comes together has one arrival. httptools calls the methods that begin with `on_`.
    """

    def __init__(self, request: bytes, outcome: Outcome, clock: Callable[[], float]) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._outcome = outcome
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)
        self._outcome.sent = self._clock()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:  # also what a callback raised
            self._end("not a stream of completions", str(error.__context__ or error))

    def connection_lost(self, exc: Exception | None) -> None:
        """End; a complete answer has ended before, unless its length was not known."""
        self.on_message_complete()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._unread += body
        if self._status == HTTPStatus.OK:
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not self.ended.done():
                    self._take(line.removeprefix(b"data:").strip())

    def on_message_complete(self) -> None:
        if self._status in (0, HTTPStatus.OK):
            self._end("cut short")  # as [DONE] has not come
        else:
            self._end_with_error(f"status {self._status}", self._unread)

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._finish()
            return
        event = json.loads(data)
        if event.get("error"):
            self._end_with_error("error event", data)
            return
        if usage := event.get("usage"):
            self._outcome.num_tokens = usage["completion_tokens"]
            self._outcome.num_prompt_tokens = usage["prompt_tokens"]
            self._outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if event.get("choices"):
            self._outcome.arrivals.append(self._now)

    def _finish(self) -> None:
        """End well, unless there is no token. Some servers send the reason of the end as an event of its own."""
        outcome = self._outcome
        outcome.arrivals = outcome.arrivals[: outcome.num_tokens]
        self._end(None if outcome.arrivals else "no token")

    def _end_with_error(self, kind: str, body: bytes) -> None:
        """End with the error of the server, in the shape of OpenAI's API or in another."""
        try:
            error = json.loads(body)["error"]
            code = error.get("code")  # a text in OpenAI's API; llama.cpp repeats the status
            self._end(f"{kind}, {code if isinstance(code, str) else error['type']}", str(error["message"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            self._end(kind, body[:200].decode(errors="replace"))

    def _end(self, failure: str | None, message: str = "") -> None:
        if not self.ended.done():
            self._outcome.failure, self._outcome.message = failure, message
            self.ended.set_result(None)
