"""The limits on a request's head, over a real socket."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterable

import pytest

from server.protocol import BoundedHttpProtocol
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

GET = b"GET /version HTTP/1.1\r\nhost: test\r\n"
LIMIT = 64 * 1024


class Impatient(BoundedHttpProtocol):
    wait_limit_s = 0.05


class ImpatientLater(BoundedHttpProtocol):
    """Wait for the first head as long as a test may take, and hardly for what comes after it."""

    wait_limit_s = 3600.0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.wait_limit_s = 0.05


def exchange(server: LiveServer, parts: Iterable[bytes]) -> bytes:
    """Send the parts until the server hangs up and return what it said."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        try:
            for part in parts:
                client.sendall(part)
            while received := client.recv(65536):
                answer += received
        except (BrokenPipeError, ConnectionResetError):
            pass
    return answer


def status_and_error(answer: bytes) -> tuple[int, str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return int(head.split()[1]), error["code"], error["message"]


@pytest.mark.parametrize("header", [b"x: " + b"a" * 1000 + b"\r\n", b"a" * 1000], ids=["many headers", "one header"])
def test_a_head_without_end_is_refused_at_the_limit(serve: Callable[..., LiveServer], header: bytes) -> None:
    server = serve(FakeEngineClient())
    answer = exchange(server, [GET, header * (LIMIT // len(header) + 1)])
    assert status_and_error(answer) == (
        431,
        "head_too_large",
        "the head of a request may have at most 65536 bytes",
    )
    assert exchange(server, [GET, b"connection: close\r\n\r\n"]).startswith(b"HTTP/1.1 200 ")


def test_a_large_head_within_the_limit_is_taken(serve: Callable[..., LiveServer]) -> None:
    header = b"x: " + b"a" * 60_000 + b"\r\n"
    assert exchange(serve(FakeEngineClient()), [GET, header, b"connection: close\r\n\r\n"]).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [[], [GET]], ids=["nothing", "half a head"])
def test_a_head_that_does_not_arrive_in_time_is_a_408(serve: Callable[..., LiveServer], sent: list[bytes]) -> None:
    answer = exchange(serve(FakeEngineClient(), protocol=Impatient), sent)
    assert status_and_error(answer) == (408, "request_timeout", "the head of a request must arrive within 0.05 s")


def test_the_limit_counts_each_head_of_a_connection_and_no_body(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    header = b"x: " + b"a" * 40_000 + b"\r\n\r\n"
    body = json.dumps({"prompt": "x" * 200}).encode() + b" " * 200_000
    post = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    parts = [GET + header, post % len(body) + body, GET + b"connection: close\r\n" + header]
    assert exchange(server, parts).count(b"HTTP/1.1 200 ") == 3


def post(body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def test_a_body_before_it_is_not_counted_as_head(serve: Callable[..., LiveServer]) -> None:
    body = json.dumps({"prompt": "x"}).encode() + b" " * 120_000
    half = len(GET) // 2
    parts = [post(body) + GET[:half], GET[half:] + b"connection: close\r\n\r\n"]
    assert exchange(serve(FakeEngineClient()), parts).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("next_head", [GET, GET + b"x: " + b"a" * 8 * LIMIT], ids=["late", "too large"])
def test_nothing_is_written_into_an_answer_under_way(serve: Callable[..., LiveServer], next_head: bytes) -> None:
    engine = FakeEngineClient(auto=False)  # the answer ends when the test says so
    server = serve(engine, protocol=ImpatientLater)
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(post(json.dumps({"prompt": "x", "stream": True}).encode()))
        engine.wait_for(lambda: len(engine.submitted) == 1)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(next_head)
            let_the_limit_pass(server)
            engine.from_outside(engine.die)
            while received := client.recv(65536):
                answer += received
    under_way, end, after = answer.partition(b"\r\n0\r\n\r\n")
    assert under_way.startswith(b"HTTP/1.1 200 ") or not answer, "a head that is too large breaks the answer off"
    assert under_way.count(b"HTTP/1.1") == bool(answer)
    assert after.startswith(b"HTTP/1.1 408 ") == bool(end) == (next_head == GET)


def let_the_limit_pass(server: LiveServer) -> None:
    """Return when a wait that began before this call has come to its end: one that begins now has."""
    answer = exchange(server, [GET + b"\r\n", GET])
    assert [answer.count(b"HTTP/1.1 %d " % status) for status in (200, 408)] == [1, 1]


def test_a_body_that_nobody_reads_does_not_hold_the_connection(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), protocol=ImpatientLater)
    head = b"POST /nowhere HTTP/1.1\r\nhost: t\r\ncontent-length: 1000000\r\n\r\n"
    assert exchange(server, [head, b"x"]).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"])
def test_what_is_no_http_gets_the_envelope(serve: Callable[..., LiveServer], garbage: bytes) -> None:
    answer = exchange(serve(FakeEngineClient()), [garbage])
    assert status_and_error(answer) == (400, "invalid_http", "the request is not valid HTTP/1.1")


def test_an_upgrade_is_not_taken_up(serve: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture) -> None:
    upgrade = GET + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert exchange(serve(FakeEngineClient()), [upgrade]).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records
