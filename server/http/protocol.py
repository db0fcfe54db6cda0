"""uvicorn's HTTP protocol with limits on everything that a connection can make us hold, and with our error envelope.

uvicorn limits neither the size nor the time of a head. It parses the body of a request that asks for an upgrade as the
next request. It takes the trailers of a body for headers. It queues pipelined requests without limit, and tells only
the last of them that the client has gone. It forgets an answered connection whose body never ends, and waits for ever
for a client that does not read. `body.py` limits the bodies themselves. `server.py` makes one protocol for each
connection.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gptserve.server.core.error_responses import error_response
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.logs import RareWarning
from gptserve.server.http.connections import Connections
from gptserve.server.http.heads import check_head, without_upgrade

SLICE_BYTES = 16 * 1024  # bytes parsed between two checks of the limits; one read may be 256,000 bytes
# What connections for probes serve, under any root path. Other paths that end so are answered at once, too.
PROBES = (b"/health", b"/ready", b"/metrics")
MIN_BYTES_TAKEN = 16 * 1024  # that a client must read within a write limit; the slowest modem read more in 30 s


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection that is closed when it exceeds a limit of size or time.

    The parser may hold max_head_bytes, and one slice of a read, that it has not reported yet: a head, the framing of
    chunks, trailers, blank lines. A head must arrive within wait_limit_s; the timer starts on connect, on a request's
    first byte and after a response whose request is still arriving. An idle connection is closed after idle_limit_s.
    While the write buffer is full, a client must read MIN_BYTES_TAKEN, or everything, in every write_limit_s. Nothing
    else is written during an answer.
    """

    max_head_bytes = 64 * 1024  # eight times nginx's default; a request here needs a few hundred bytes
    max_head_fields = 128  # Apache allows 100; each needs some hundred bytes more than its text
    max_body_parts = 8 * 1024  # chunks, or pieces of one that a slice cuts; each costs a microsecond at any size
    part_bytes = 256  # for so many bytes of a body there may be one part more: files are large
    max_unread_bytes = 256 * 1024  # of a body after its answer, as in Go's net/http; then the connection is closed
    max_pipelined = 32  # requests that wait for the one before; few clients send even one
    wait_limit_s = 30.0
    idle_limit_s = 75.0  # between two requests, nginx's default; clients' pools drop connections after 5 to 60 s

    def __init__(
        self,
        config: Config,
        state: ServerState,
        connections: Connections,
        *,
        malformed: RareWarning,
        write_limit_s: float,
    ) -> None:
        super().__init__(config, state, app_state={})
        self._connections = connections
        self._malformed = malformed
        self._write_limit_s = write_limit_s
        # A connection begins within its first head.
        self._part: Literal["head", "body", "nothing"] = "head"
        self._num_unreported = 0
        self._has_reported = False
        self._num_unread = 0
        self._num_body_parts = 0
        self._num_body_bytes = 0
        self._running: RequestResponseCycle | None = None  # the oldest of the pipeline; `cycle` is the newest
        self._error: ServiceError | None = None  # the reason why a callback stopped the parser
        self._wait: asyncio.TimerHandle | None = None
        # The time and the size of the write buffer when the client last made progress.
        self._unwritten: tuple[float, int] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.set_idle(self, self.hang_up)
        self._begin_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()  # it and its cycles refer to each other
        self._connections.remove(self)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing():
                return
            part = data[start : start + SLICE_BYTES]
            self._has_reported = False
            self._unset_keepalive_if_required()
            try:
                self._parse(part)
            except httptools.HttpParserError as error:
                refusal = self._error or ServiceError("invalid_http", "the request is not valid HTTP/1.1")
                reason = refusal if self._error else f"{refusal} ({error})"
                address = "a client" if self.client is None else self.client[0]
                if refusal.code != "too_many_connections":
                    self._malformed.log(f"{address} sent what cannot be answered: {reason}")
                self._refuse(refusal)
            self._count(len(part))

    def _parse(self, data: bytes) -> None:
        """Parse `data`, and each request that asks for an upgrade as if it did not.

        httptools ends a request that asks for an upgrade with its head, whatever body it declares. Its parser cannot go
        back into that body, so another one parses the same request from its first byte on.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                version = self.parser.get_http_version()
                head = without_upgrade(self.parser.get_method(), self.url, version, self.headers)
                data = head + data[upgrade.args[0] :]
                self.parser = _new_parser(self)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_reported = self._part != "head"
        self._part = "head"
        self._begin_wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "body":
            return  # a trailer: it is not needed, and must not pass for a header (RFC 9110, section 6.5.1)
        if len(self.headers) >= self.max_head_fields:
            self._stop(_head_too_large(f"{self.max_head_fields} fields"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        try:
            check_head(self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers)
        except ServiceError as error:
            self._stop(error)
        if self.parser.should_upgrade():
            return  # `_parse` lets another parser begin this request again
        if len(self.pipeline) >= self.max_pipelined:
            message = f"at most {self.max_pipelined} requests may wait for the one before them"
            self._stop(ServiceError("too_many_pipelined", message))
        if self._connections.probes_only and not self.url.partition(b"?")[0].endswith(PROBES):
            self._connections.refuse()
            self._stop(too_many_connections())
        super().on_headers_complete()
        if self._connections.probes_only:
            self.cycle.keep_alive = False
        self._part, self._has_reported = "body", True
        self._num_unread = self._num_body_parts = self._num_body_bytes = 0
        self._end_wait()

    def on_body(self, body: bytes) -> None:
        self._has_reported = True
        self._num_body_parts += 1
        self._num_body_bytes += len(body)
        if self._num_body_parts > self.max_body_parts + self._num_body_bytes // self.part_bytes:
            message = f"a body may come in {self.max_body_parts} chunks, and one for each {self.part_bytes} bytes"
            self._stop(ServiceError("too_many_chunks", message))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._part = "nothing"
        super().on_message_complete()
        if self._is_answering():
            self._connections.set_busy(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering() or self.transport.is_closing():
            return
        if self._part != "head":
            self._begin_wait(self.wait_limit_s if self._part == "body" else self.idle_limit_s)
        if self.transport.get_write_buffer_size() == 0:
            self._connections.set_idle(self, self.hang_up)

    def hang_up(self) -> None:
        """Drop the connection; its running request ends as if the client had hung up."""
        self.transport.abort()

    def check_reader(self, now: float) -> None:
        """Hang up on a client that reads too slowly. The server calls it every second; `now` is the loop's time.

        A write buffer that may still grow is not checked: it holds little.
        """
        num_left = self.transport.get_write_buffer_size()
        is_open = not self.transport.is_closing()
        if num_left == 0 or (is_open and self._is_answering() and not self.flow.write_paused):
            self._unwritten = None
            if num_left == 0 and is_open and not self._is_answering():
                self._connections.set_idle(self, self.hang_up)
        elif self._unwritten is None or num_left <= self._unwritten[1] - MIN_BYTES_TAKEN:
            self._unwritten = now, num_left
        elif now - self._unwritten[0] >= self._write_limit_s:
            self.hang_up()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _count(self, num_bytes: int) -> None:
        """Count parsed bytes, and refuse the request over a limit."""
        self._num_unreported = 0 if self._has_reported else self._num_unreported + num_bytes
        if self.transport.is_closing():
            return
        if self._num_unreported > self.max_head_bytes:
            self._refuse(_head_too_large(f"{self.max_head_bytes} bytes"))
        elif self._part == "body" and self.cycle.response_complete:
            self._num_unread += num_bytes
            if self._num_unread > self.max_unread_bytes:
                self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begin_wait(self, limit_s: float | None = None) -> None:
        """Give up after limit_s, by default wait_limit_s."""
        self._end_wait()
        self._wait = self.loop.call_later(limit_s or self.wait_limit_s, self._give_up)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _give_up(self) -> None:
        if self._is_answering():
            self._begin_wait()
        elif self._part != "head":
            self.transport.close()
        else:
            message = f"the head of a request must arrive within {self.wait_limit_s:g} s"
            self._refuse(ServiceError("request_timeout", message))

    def _stop(self, error: ServiceError) -> None:
        """Stop the parser from within a callback; `data_received` refuses what has come."""
        self._error = error
        raise error

    def _refuse(self, error: ServiceError) -> None:
        """Answer with an error, below ASGI; then close. An answer under way is broken off.

        A request whose body cannot be parsed is taken from the application, which has not begun to answer.
        """
        self._end_wait()
        if self._part == "body" and self.cycle is self._running and not self.cycle.response_started:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.write(raw_response(error))
        elif not self._is_answering() and self._part == "head":
            self.transport.write(raw_response(error))
        self.transport.close()


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return `app` as it answers an HTTP/1.0 request: without chunks (RFC 9112, section 7.1). Closing ends the body.

    uvicorn sends chunks to every client. It checks each part of a body against the length that is left, so that length
    is set to the length of each part.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_unchunked(message: Any) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer


def _new_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Return a parser like the one that uvicorn makes for a connection."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def raw_response(error: ServiceError) -> bytes:
    """Return an error as an HTTP response that closes the connection."""
    response = error_response(error, {"connection": "close"})
    status_line = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()
    lines = [status_line, *map(b": ".join, response.raw_headers), b"", b""]
    return b"\r\n".join(lines) + bytes(response.body)


def too_many_connections() -> ServiceError:
    """Return the error for a request or a connection for which there is no room."""
    return ServiceError("too_many_connections", "all connections that this server takes are in use")


def _head_too_large(limit: str) -> ServiceError:
    return ServiceError("head_too_large", f"the head of a request may have at most {limit}")
