"""Accepting connections, by real sockets: how many, which give way, and what becomes of TLS that does not begin."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn

from gptserve.server.http import connections as connections_module
from gptserve.server.http.connections import PROBE_CONNECTIONS, Connections
from gptserve.server.http.server import HttpServer, Listener
from gptserve.server.http.tls import Tls
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


@contextlib.contextmanager
def streams(server: LiveServer, count: int) -> Iterator[list[socket.socket]]:
    """Hold streams that do not end, each on a connection of its own; on entry all have begun."""
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(head % len(body) + body)
            assert clients[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
        yield clients


def test_when_all_connections_are_busy_a_new_one_gets_a_503(
    serve: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(FakeEngineClient(auto=False), max_connections=3)
    body = json.dumps({"prompt": "x"}).encode()
    with streams(server, 3) as clients:
        responses = [httpx.get(server.url + "/v1/models", timeout=20) for _ in range(20)]
        responses += [httpx.post(server.url + "/v1/completions", content=body, timeout=20) for _ in range(5)]
        clients[0].close()
        server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
        while len(server.connections) - server.connections.num_idle == 3:
            pass
        assert httpx.get(server.url + "/v1/models", timeout=20).status_code == 200
        assert server.metric("gptserve_connections_refused_total") == 25
    assert {response.status_code for response in responses} == {503}
    assert responses[0].json()["error"] == {
        "message": "all connections that this server takes are in use",
        "type": "server_error",
        "param": None,
        "code": "too_many_connections",
    }
    assert int(responses[0].headers["retry-after"]) >= 1
    said = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    assert said - {"closing idle connections: 1 may be idle and 3 may be open"} == {
        "refusing connections: all 3 that may be open are busy"
    }
    assert len(server.engine.submitted) == 3


@pytest.mark.parametrize("root_path", [None, "/llm"])
def test_probes_are_answered_when_all_connections_are_busy(
    serve: Callable[..., LiveServer], root_path: str | None
) -> None:
    server = serve(FakeEngineClient(auto=False), max_connections=3, root_path=root_path)
    with streams(server, 3), contextlib.ExitStack() as stack, httpx.Client(timeout=20) as client:
        idle = [stack.enter_context(connect(server)) for _ in range(2 * PROBE_CONNECTIONS)]
        for path in ("/health", "/ready?x=1", "/metrics") * 5:
            response = client.get(server.url + (root_path or "") + path)
            assert (response.status_code, response.headers["connection"]) == (200, "close")
        assert client.get(server.url + "/v1/models").status_code == 503
        open_ = [connection for connection in idle if not has_ended(connection)]
        assert len(open_) < PROBE_CONNECTIONS


def has_ended(client: socket.socket) -> bool:
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return client.recv(1) == b""
    return False


def test_all_is_refused_when_the_connections_of_probes_are_busy_too(
    serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "PROBE_CONNECTIONS", 0)
    server = serve(FakeEngineClient(auto=False), max_connections=2)
    with streams(server, 2):
        response = httpx.get(server.url + "/health", timeout=20)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "too_many_connections")


def test_a_connection_for_probes_serves_no_other_request_in_its_pipeline(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False), max_connections=2)
    with streams(server, 2), connect(server) as client:
        health, models = (b"GET %b HTTP/1.1\r\nhost: t\r\n\r\n" % path for path in (b"/health", b"/v1/models"))
        client.sendall(health + models)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while received := client.recv(65536):
                answer += received
    assert b'"object":"list"' not in answer
    assert answer.count(b"HTTP/1.1 200 ") <= 1


def test_idle_connections_make_room_and_streams_go_on(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False), max_connections=6)
    with streams(server, 2) as clients, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(10)]
        assert [client.recv(1) for client in idle[:6]] == [b""] * 6
        assert httpx.get(server.url + "/health", timeout=20).status_code == 200
        server.engine.from_outside(server.engine.step)
        assert all(b"data: " in client.recv(65536) for client in clients)
        assert server.metric("gptserve_connections_closed_idle_total") >= 7
        assert server.metric("gptserve_connections") <= 6


def test_a_request_whose_body_does_not_end_makes_room(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), max_connections=2)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    for _ in range(5):
        with connect(server) as slow:
            slow.sendall(head + b"{")
            assert httpx.get(server.url + "/health", timeout=20).status_code == 200
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(1) == b""


def test_a_connection_that_has_its_answer_is_idle(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), max_connections=2)
    with connect(server) as kept_alive:
        kept_alive.sendall(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
        answer = kept_alive.recv(65536)
        while not answer.endswith(b"}"):
            answer += kept_alive.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        while server.connections.num_idle == 0:
            pass
        assert httpx.get(server.url + "/health", timeout=20).status_code == 200
        assert kept_alive.recv(1) == b""


def test_a_system_without_descriptors_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Exhausted(socket.socket):
        num_failures = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")
            transport.close()

    async def run() -> bytes:
        with Exhausted() as listening:
            listening.bind(("127.0.0.1", 0))
            listener = Listener(listening, lambda _: Greeting(), Connections(10), None)
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            said = await reader.read()
            writer.close()
            listener.close()
            await listener.wait_closed()
            return said

    assert asyncio.run(run()) == b"hello"
    assert [record.getMessage() for record in caplog.records] == ["cannot accept connections: Too many open files"]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*make.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    return Tls(folder / "cert.pem", folder / "key.pem")


def ask_over_tls(server: LiveServer) -> int:
    url = f"https://127.0.0.1:{server.port}/health"
    return httpx.get(url, verify=ssl._create_unverified_context(), timeout=20).status_code


@needs_openssl
def test_plain_http_on_the_port_of_tls_is_logged_once(
    serve: Callable[..., LiveServer], tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(FakeEngineClient(), tls=tls)
    for _ in range(3):
        with connect(server) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
    assert ask_over_tls(server) == 200
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["127.0.0.1 spoke plain HTTP to this port, which takes https:// only"]


@needs_openssl
def test_tls_that_does_not_begin_is_an_idle_connection(serve: Callable[..., LiveServer], tls: Tls) -> None:
    server = serve(FakeEngineClient(), tls=tls, max_connections=4)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(8)]
        for client in silent[:6]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert ask_over_tls(server) == 200


def test_uvicorn_still_has_what_the_server_builds_upon() -> None:
    overridden = set(vars(HttpServer)) & set(vars(uvicorn.Server))
    assert overridden >= {"capture_signals", "startup", "on_tick"}
    server = uvicorn.Server(uvicorn.Config(lambda: None))
    assert {"server_state", "started", "should_exit"} <= set(vars(server))
    assert server.server_state.connections == set()


def test_it_says_nothing_where_it_hangs_up_on_nobody(caplog: pytest.LogCaptureFixture) -> None:
    server = object.__new__(HttpServer)
    server.server_state = uvicorn.server.ServerState()
    server.hang_up("told to stop again")
    assert not caplog.records
