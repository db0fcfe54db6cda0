"""uvicorn's HTTP protocol with limits on what comes before a request is complete, and with our envelope of errors.

uvicorn limits neither the size of a head nor how long it may take, and forgets a connection whose body never ends once
it is answered. Bodies that are read are body.py's affair. `serve.py` hands the class to uvicorn.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection that is closed when a head exceeds max_head_bytes or is not there wait_limit_s after a wait began.

    A wait begins with the connection, with the first byte of a head and with the end of an answer. While an answer is
    under way nothing is written beside it.
    """

    max_head_bytes = 64 * 1024  # eight times nginx's default; a request here needs a few hundred bytes
    wait_limit_s = 30.0

    _num_head_bytes: int | None = None  # None: no head has begun
    _head_is_new = False
    _wait: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._begin_wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # In the first read of a connection nothing comes before the head.
        self._num_head_bytes, self._head_is_new = 0, self.cycle is not None
        self._begin_wait()

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        self._end_wait()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._num_head_bytes is None and not self._is_answering():
            self._begin_wait()

    def data_received(self, data: bytes) -> None:
        self._head_is_new = False
        super().data_received(data)
        # Bytes that came with the end of another request are not counted: they are at most one read.
        if self._num_head_bytes is None or self._head_is_new or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self.max_head_bytes:
            message = f"the head of a request may have at most {self.max_head_bytes} bytes"
            self._refuse(ApiError(431, message, code="head_too_large"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: an upgrade that is not taken up is a plain request (RFC 9110, section 7.8)."""

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begin_wait(self) -> None:
        self._end_wait()
        self._wait = self.loop.call_later(self.wait_limit_s, self._give_up)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _give_up(self) -> None:
        if self._is_answering():
            self._begin_wait()
        elif self._num_head_bytes is None:
            self.transport.close()
        else:
            message = f"the head of a request must arrive within {self.wait_limit_s:g} s"
            self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Close, having answered below ASGI, which has no request yet; an answer under way is broken off instead."""
        self._end_wait()
        if not self._is_answering():
            body = json.dumps(error.body()).encode()
            status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            headers = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write((status + headers).encode() + body)
        self.transport.close()
