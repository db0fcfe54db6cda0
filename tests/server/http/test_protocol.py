"""The limits on all that comes and goes over a connection, by real sockets where a rule is not one of time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable, Iterable, Iterator

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gptserve.server.core.logs import RareWarning
from gptserve.server.http.connections import Connections
from gptserve.server.http.protocol import MIN_BYTES_TAKEN, SLICE_BYTES, BoundedHttpProtocol
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

GET = b"GET /version HTTP/1.1\r\nhost: test\r\n"
LIMIT = 64 * 1024


class Impatient(BoundedHttpProtocol):
    wait_limit_s = 0.05


class Patient(BoundedHttpProtocol):
    """One that no time closes, so that a limit of size must have done it."""

    wait_limit_s = 3600.0


class ImpatientLater(BoundedHttpProtocol):
    """Wait for the first head as long as a test may take, and hardly for what comes after it."""

    wait_limit_s = 3600.0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.wait_limit_s = self.idle_limit_s = 0.05


def exchange(server: LiveServer, parts: Iterable[bytes]) -> bytes:
    """Send the parts until the server hangs up and return what it said."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                client.sendall(part)
        with contextlib.suppress(ConnectionResetError):  # what came before the server hung up is there to read
            while received := client.recv(65536):
                answer += received
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


def test_malformed_requests_are_logged_once_with_their_address(
    serve: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(FakeEngineClient())
    for _ in range(20):
        exchange(server, [b"BREW / HTTP/1.1\r\n\r\n"])
        exchange(server, [GET + b"host: other\r\n\r\n"])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "127.0.0.1 sent what cannot be answered: the request is not valid HTTP/1.1 (Invalid method encountered)"
    ]


@pytest.mark.parametrize("target", [b"http://t", b"http://t:99999/", b"http://[::1/", b"//"])
def test_a_target_without_a_path_or_a_host_gets_an_answer(serve: Callable[..., LiveServer], target: bytes) -> None:
    head = b"GET " + target + b" HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    assert exchange(serve(FakeEngineClient()), [head]).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))


def test_an_upgrade_is_not_taken_up(serve: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture) -> None:
    upgrade = GET + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert exchange(serve(FakeEngineClient()), [upgrade]).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
)
CHUNK = b'e\r\n{"prompt":"x"}\r\n'
ONE_MEGABYTE = 2**20


def test_a_trailer_is_no_header(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), api_keys=("sesame",))
    trailers = b"authorization: Bearer sesame\r\nx-request-id: mine\r\n"
    close = b"connection: close\r\n"
    in_head = exchange(server, [CHUNKED + close + trailers + b"\r\n" + CHUNK + b"0\r\n\r\n"])
    in_trailer = exchange(server, [CHUNKED + close + b"\r\n" + CHUNK + b"0\r\n" + trailers + b"\r\n"])
    assert (in_head[9:12], b"x-request-id: mine" in in_head) == (b"200", True)
    assert (in_trailer[9:12], b"x-request-id: mine" in in_trailer) == (b"401", False)
    assert len(server.engine.submitted) == 1


@pytest.mark.parametrize(
    ("before", "endless"),
    [
        (CHUNKED + b"\r\n" + CHUNK + b"0\r\n", b"a:b\r\n"),
        (CHUNKED + b"\r\n" + CHUNK + b"0\r\na:", b"b"),
        (CHUNKED + b"\r\n" + CHUNK + b"1;", b"a=b;"),
        (CHUNKED + b"\r\n", b"0"),
        (GET + b"\r\n", b"\r\n"),
    ],
    ids=["many trailers", "one trailer", "chunk extensions", "a chunk's size", "blank lines"],
)
def test_what_no_request_is_made_of_is_bounded(serve: Callable[..., LiveServer], before: bytes, endless: bytes) -> None:
    server = serve(FakeEngineClient(), protocol=Patient)
    exchange(server, [before, *[endless * (SLICE_BYTES // len(endless))] * (ONE_MEGABYTE // SLICE_BYTES)])
    assert server.engine.submitted == []


def test_trailers_within_the_limit_are_dropped(serve: Callable[..., LiveServer]) -> None:
    trailers = b"a:b\r\n" * 12_000
    parts = [CHUNKED + b"connection: close\r\n\r\n" + CHUNK + b"0\r\n", trailers, b"\r\n"]
    assert exchange(serve(FakeEngineClient()), parts).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("num_fields", "status"), [(128, 200), (129, 431)])
def test_the_fields_of_a_head_are_bounded(serve: Callable[..., LiveServer], num_fields: int, status: int) -> None:
    head = GET + b"connection: close\r\n" + b"a:b\r\n" * (num_fields - 2) + b"\r\n"
    answer = exchange(serve(FakeEngineClient()), [head])
    assert int(answer.split()[1]) == status
    if status == 431:
        message = "the head of a request may have at most 128 fields"
        assert status_and_error(answer) == (431, "head_too_large", message)


def test_requests_in_a_pipeline_are_bounded(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False), protocol=Patient)
    streaming = post(json.dumps({"prompt": "x", "stream": True}).encode())  # its answer does not end
    exchange(server, [streaming + (GET + b"\r\n") * 33])
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
    last = GET + b"connection: close\r\n\r\n"
    assert exchange(server, [(GET + b"\r\n") * 32 + last]).count(b"HTTP/1.1 200 ") == 33


def test_a_client_that_hangs_up_ends_the_first_request_of_its_pipeline(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(post(json.dumps({"prompt": "x", "stream": True}).encode()) + GET + b"\r\n")
        server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


@pytest.mark.parametrize(
    ("chunk", "statuses"),
    [(b"1\r\nx\r\n", {b"404", b"400"}), (b"4000\r\n" + b"x" * 0x4000 + b"\r\n", {b"404"})],
    ids=["tiny", "large"],
)
def test_a_body_that_nobody_reads_is_bounded(
    serve: Callable[..., LiveServer], chunk: bytes, statuses: set[bytes]
) -> None:
    """So many tiny chunks are refused, if that is noticed before the answer."""
    server = serve(FakeEngineClient(), protocol=Patient)
    head = b"POST /nowhere HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = exchange(server, [head, *[chunk * (ONE_MEGABYTE // len(chunk))] * 64])
    assert answer[9:12] in {*statuses, b""}  # the reset may take the answer along


@pytest.mark.parametrize(("num_chunks", "is_taken"), [(8000, True), (9000, False)])
def test_the_chunks_of_a_body_are_bounded(serve: Callable[..., LiveServer], num_chunks: int, is_taken: bool) -> None:
    server = serve(FakeEngineClient(), protocol=Patient)
    spaces = b"1\r\n \r\n" * num_chunks
    answer = exchange(server, [CHUNKED + b"connection: close\r\n\r\n" + spaces + CHUNK, b"0\r\n\r\n"])
    assert len(server.engine.submitted) == is_taken
    if is_taken:
        assert answer.startswith(b"HTTP/1.1 200 ")
    else:
        says = "a body may come in 8192 chunks, and one for each 256 bytes"
        assert status_and_error(answer) == (400, "too_many_chunks", says)


def test_a_large_body_may_come_in_more_chunks(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), protocol=Patient, max_body_bytes=2**22)
    spaces = b"100\r\n" + b" " * 256 + b"\r\n"
    answer = exchange(server, [CHUNKED + b"connection: close\r\n\r\n" + spaces * 10_000 + CHUNK, b"0\r\n\r\n"])
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_malformed_body_gets_an_answer(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    for parts in ([CHUNKED + b"\r\n" + CHUNK + b"x\r\n"], [CHUNKED + b"\r\n", CHUNK, b"x\r\n"]):
        answer = exchange(server, parts)
        assert status_and_error(answer) == (400, "invalid_http", "the request is not valid HTTP/1.1")
    answer = exchange(server, [(GET + b"\r\n") * 2 + CHUNKED + b"\r\n" + CHUNK + b"x\r\n"])
    assert b"HTTP/1.1 200 " not in answer, "who pipelines after a malformed body is cut off"
    assert server.engine.submitted == []


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_malformed_body_does_not_break_into_an_answer(serve: Callable[..., LiveServer], num_parts: int) -> None:
    server = serve(FakeEngineClient(), protocol=Patient)
    nowhere = CHUNKED.replace(b"/v1/completions", b"/nowhere") + b"\r\n" + CHUNK
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(nowhere)
        answer = client.recv(65536)
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
        client.sendall(b"x\r\n" if num_parts == 1 else b"5\r\nhello\r\nx\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(65536) == b""
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 404 ")


@contextlib.contextmanager
def reader_that_stands_still(server: LiveServer, body: dict[str, object]) -> Iterator[None]:
    """Ask for more than the system buffers, and read none of it."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(post(json.dumps(body).encode()))
        yield


def test_a_stream_that_nobody_reads_is_aborted(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False), protocol=Patient, write_limit_s=0.1)
    body = {"prompt": "x", "n": 128, "max_tokens": 200, "stream": True, "logprobs": 4}
    with reader_that_stands_still(server, body):
        server.engine.wait_for(lambda: len(server.engine.submitted) == 128)
        for _ in range(100):
            server.engine.from_outside(server.engine.step)
        server.engine.wait_for(lambda: len(set(server.engine.aborted)) == 128)
        server.wait_until_idle()
        while server.metric("gptserve_connections") > 1:
            pass


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_dropped(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), protocol=Patient, write_limit_s=0.1)
    with reader_that_stands_still(server, {"prompt": "x", "n": 128, "max_tokens": 200, "logprobs": 4}):
        server.engine.wait_for(lambda: server.engine.num_outputs == 128 * 200)
        while server.metric("gptserve_connections") > 1:
            pass


def test_the_time_limit_of_a_request_ends_it_although_nobody_reads(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False), protocol=Patient, write_limit_s=3600)
    body = {"prompt": "x", "n": 128, "max_tokens": 200, "stream": True, "logprobs": 4, "timeout_ms": 1000}
    with reader_that_stands_still(server, body):
        server.engine.wait_for(lambda: len(server.engine.submitted) == 128)
        for _ in range(100):
            server.engine.from_outside(server.engine.step)
        server.engine.wait_for(lambda: len(set(server.engine.aborted)) == 128)


class FakeTransport(asyncio.Transport):
    """One end of a connection whose client takes only as much as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left = 0
        self.is_aborted = False
        self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.num_left

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True


def make_protocol() -> tuple[BoundedHttpProtocol, FakeTransport]:
    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    config = Config(app, http=BoundedHttpProtocol, lifespan="off", log_config=None)
    protocol = BoundedHttpProtocol(
        config, ServerState(), Connections(1), malformed=RareWarning(logging.getLogger()), write_limit_s=30
    )
    transport = FakeTransport()
    protocol.connection_made(transport)
    return protocol, transport


async def end(protocol: BoundedHttpProtocol) -> None:
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)


@pytest.mark.parametrize(
    ("sizes", "is_aborted"),
    [
        ([900_000, 900_000, 900_000, 900_000], True),
        ([900_000, 900_000, 900_000 - MIN_BYTES_TAKEN + 1, 900_000 - MIN_BYTES_TAKEN + 1], True),
        ([900_000, 900_000, 900_000 - MIN_BYTES_TAKEN, 900_000 - 2 * MIN_BYTES_TAKEN], False),
        ([900_000, 900_000, 0, 900_000], False),
    ],
    ids=["nothing", "hardly anything", "enough", "all"],
)
@pytest.mark.parametrize("state", ["paused", "closing", "answered"])
def test_a_client_must_take_some_of_its_answer_in_time(sizes: list[int], is_aborted: bool, state: str) -> None:
    async def run() -> bool:
        protocol, transport = make_protocol()
        if state != "answered":
            protocol.data_received(GET + b"\r\n")
        if state == "paused":
            protocol.pause_writing()
        if state == "closing":
            transport.close()
        for i, size in enumerate(sizes):
            transport.num_left = size
            protocol.check_reader(15.0 * i)
        await end(protocol)
        return transport.is_aborted

    assert asyncio.run(run()) is is_aborted


def test_a_slow_client_of_an_answer_that_grows_is_let_be() -> None:
    async def run() -> bool:
        protocol, transport = make_protocol()
        protocol.data_received(GET + b"\r\n")
        for i in range(10):
            transport.num_left = 1000 * (i + 1)
            protocol.check_reader(15.0 * i)
        await end(protocol)
        return transport.is_aborted

    assert asyncio.run(run()) is False


def test_uvicorn_still_has_what_is_built_upon() -> None:
    overridden = set(vars(BoundedHttpProtocol)) & set(vars(HttpToolsProtocol))
    assert overridden >= {
        "connection_made",
        "connection_lost",
        "data_received",
        "on_message_begin",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "_start_asgi_task",
    }
    assert hasattr(HttpToolsProtocol, "_unset_keepalive_if_required")

    async def names() -> tuple[set[str], set[str]]:
        protocol, _ = make_protocol()
        protocol.data_received(GET + b"\r\n")
        cycle, flow = protocol.cycle, protocol.flow
        assert isinstance(cycle, RequestResponseCycle)
        assert isinstance(flow, FlowControl)
        assert (cycle.response_complete, flow.write_paused, len(protocol.pipeline)) == (False, False, 0)
        await end(protocol)
        return set(vars(protocol)), {name for name, _ in protocol.headers}

    attributes, headers = asyncio.run(names())
    assert attributes >= {"pipeline", "cycle", "flow", "headers", "transport", "loop"}
    assert headers == {b"host"}


class ImpatientWhenIdle(BoundedHttpProtocol):
    wait_limit_s = 3600.0
    idle_limit_s = 0.05


def test_an_idle_connection_has_a_limit_of_its_own(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), protocol=ImpatientWhenIdle)
    assert exchange(server, [GET + b"\r\n"]).startswith(b"HTTP/1.1 200 ")
    assert server.server.config.timeout_keep_alive == 1, "uvicorn's own limit is not shorter"


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n"])
def test_a_stream_over_http_1_0_ends_with_its_connection_and_has_no_chunks(
    serve: Callable[..., LiveServer], header: bytes
) -> None:
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
    answer = exchange(serve(FakeEngineClient()), [head % (len(body), header) + body])
    headers, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    assert all(block.startswith(b"data: ") for block in events.split(b"\n\n")[:-1])


def test_an_answer_over_http_1_0_is_whole(serve: Callable[..., LiveServer]) -> None:
    answer = exchange(serve(FakeEngineClient()), [GET.replace(b"1.1", b"1.0") + b"\r\n"])
    assert b"\r\ncontent-length: " in answer
    assert answer.endswith(b"}")


@pytest.mark.some(2)
@pytest.mark.parametrize("path", [b"/version", b"/v1/models", b"/health"])
def test_head_is_get_without_the_body(serve: Callable[..., LiveServer], path: bytes) -> None:
    server = serve(FakeEngineClient())
    request = b" " + path + b" HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    whole, head = exchange(server, [b"GET" + request]), exchange(server, [b"HEAD" + request])

    def fields(answer: bytes) -> list[bytes]:
        lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
        return [line for line in lines if not line.startswith((b"date", b"x-request-id"))]

    assert fields(head) == fields(whole)
    assert head.endswith(b"\r\n\r\n")
    assert not whole.endswith(b"\r\n\r\n")


def test_head_of_a_route_without_get_is_a_405(serve: Callable[..., LiveServer]) -> None:
    answer = exchange(
        serve(FakeEngineClient()), [b"HEAD /v1/chat/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"]
    )
    assert answer.startswith(b"HTTP/1.1 405 ")
