"""uvicorn's server on a socket that is already bound, with its own listener that limits connections.

uvloop's own listeners accept without limit, give a TLS handshake a minute and do not report one that fails. `serve.py`
makes the server and ends it; `protocol.py` handles a connection's data.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gptserve.server.core.logs import RareWarning
from gptserve.server.http.connections import Connections, ProbeConnections
from gptserve.server.http.protocol import SLICE_BYTES, BoundedHttpProtocol, raw_response, too_many_connections
from gptserve.server.http.tls import Tls

BACKLOG = 2048  # connections that the system holds until they are accepted, as uvicorn has it
ACCEPTS_AT_ONCE = 16  # then the event loop turns, which frees the descriptors of closed connections
ACCEPT_PAUSE_S = 0.5  # when the system has no descriptor or memory for another
TLS_LIMIT_S = 10.0  # for the handshake, and for the shutdown
UNSENT_BYTES = 128 * 1024  # bytes that the system buffers for a client; more would hide that it does not read
TICK_S = 0.1  # uvicorn's
TICKS_PER_CHECK = 10
TICKS_PER_TLS_CHECK = 100  # 10 s; a renewed certificate is in use after the second check
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn with a Listener; ServingProcess handles the signals. `url` is valid once it has called `on_listening`."""

    def __init__(
        self,
        app: ASGIApp,
        on_listening: Callable[[], object],
        connections: Connections,
        *,
        write_limit_s: float,
        stop_limit_s: float,
        tls: Tls | None = None,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(protocol.idle_limit_s),
            timeout_graceful_shutdown=math.ceil(stop_limit_s),
        )
        config.load()
        super().__init__(config)
        make_protocol = partial(
            protocol, config, self.server_state, malformed=RareWarning(logger), write_limit_s=write_limit_s
        )
        self._listen = partial(Listener, make_protocol=make_protocol, connections=connections, tls=tls)
        self._on_listening = on_listening
        self.connections = connections
        self.url = ""
        self.on_lag: Callable[[float], object] = lambda seconds: None
        """Called with the lag of the event loop: the seconds that it wakes up too late."""
        self._ticked_at: float | None = None
        self._tls = tls
        self._tls_check: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    def hang_up(self, why: str) -> None:
        """Drop every connection; their requests end as if the clients had hung up, and then uvicorn ends."""
        connections = list(self.server_state.connections)
        if connections:
            plural = "" if len(connections) == 1 else "s"
            logger.warning("hanging up on %d client%s: %s", len(connections), plural, why)
        for connection in connections:
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        assert sockets is not None
        self.servers = [self._listen(sockets[0])]  # type: ignore[list-item]
        self.started = True
        host, port = sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Tell how late this tick is, check clients that do not read and the certificate; return whether to stop."""
        now = time.perf_counter()
        if self._ticked_at is not None:
            self.on_lag(max(0.0, now - self._ticked_at - TICK_S))
        self._ticked_at = now
        if counter % TICKS_PER_CHECK == 0:
            now = asyncio.get_running_loop().time()
            for connection in tuple(self.server_state.connections):
                assert isinstance(connection, BoundedHttpProtocol)
                connection.check_reader(now)
        if counter % TICKS_PER_TLS_CHECK == 0:
            self._check_tls()
        return await super().on_tick(counter)

    def _check_tls(self) -> None:
        """Begin to check the certificate, unless an earlier check waits for a disk."""
        if self._tls is not None and (self._tls_check is None or self._tls_check.done()):
            self._tls_check = asyncio.get_running_loop().run_in_executor(None, self._tls.follow_files)


class Listener:
    """Accepts connections if there is room, and a few more for probes. It has the methods that uvicorn calls."""

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[Connections], asyncio.Protocol],
        connections: Connections,
        tls: Tls | None,
    ) -> None:
        self._socket = listening
        self._make_protocol = make_protocol
        self._connections = connections
        self._probes = ProbeConnections(connections)
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._beginnings: set[asyncio.Task[Any]] = set()  # of connections that have no protocol yet
        self._shortages = RareWarning(logger)
        self._plain_http = RareWarning(logger)
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop accepting, and drop connections whose TLS handshake is not complete."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        for beginning in self._beginnings:
            beginning.cancel()

    async def wait_closed(self) -> None:
        """Return when no handshake is left; established connections may be."""
        await asyncio.gather(*self._beginnings, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._shortages.log(f"cannot accept connections: {error.strerror}")
                    self._loop.remove_reader(self._socket)
                    self._pause = self._loop.call_later(
                        ACCEPT_PAUSE_S, self._loop.add_reader, self._socket, self._accept
                    )
                    return
                continue  # this client has already hung up
            room = next((room for room in (self._connections, self._probes) if room.admit()), None)
            if room is not None:
                self._begin(accepted, address[0], room)
            else:
                self._refuse(accepted)

    def _begin(self, accepted: socket.socket, address: str, room: Connections) -> None:
        """Give a connection its transport and protocol; it is idle until its TLS handshake is complete."""
        accepted.setblocking(False)
        with contextlib.suppress(OSError):  # the client may have hung up already
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        context, limit_s = (None, None) if self._tls is None else (self._tls.context, TLS_LIMIT_S)
        make_protocol = partial(self._make_protocol, room)
        connecting = self._loop.connect_accepted_socket(
            make_protocol, accepted, ssl=context, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s
        )
        beginning = self._loop.create_task(connecting)
        self._beginnings.add(beginning)
        room.set_idle(beginning, beginning.cancel)
        beginning.add_done_callback(partial(self._end_beginning, accepted, address, room))

    def _end_beginning(
        self, accepted: socket.socket, address: str, room: Connections, beginning: asyncio.Task[Any]
    ) -> None:
        self._beginnings.discard(beginning)
        room.remove(beginning)
        error = None if beginning.cancelled() else beginning.exception()
        if beginning.cancelled() or error is not None:
            accepted.close()
        if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
            self._plain_http.log(f"{address} spoke plain HTTP to this port, which takes https:// only")
        elif error is not None:
            logger.debug("the connection of %s did not begin: %s", address, error)

    def _refuse(self, accepted: socket.socket) -> None:
        """Answer 503 and close a connection; with TLS only close it, as there has been no handshake."""
        self._connections.refuse()
        with accepted, contextlib.suppress(OSError):
            accepted.setblocking(False)
            if self._tls is None:
                accepted.send(raw_response(too_many_connections()))
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(SLICE_BYTES)  # closing with unread bytes would reset the connection and lose the answer
