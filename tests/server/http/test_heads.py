"""Heads that break a rule of HTTP, and requests that ask for an upgrade, in any packets.

The latter are answered as the same requests that ask for none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from gptserve.server.core.errors import ServiceError
from gptserve.server.core.logs import RareWarning
from gptserve.server.http.connections import Connections
from gptserve.server.http.heads import check_head, without_upgrade
from gptserve.server.http.protocol import BoundedHttpProtocol
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient
from tests.server.http.test_protocol import exchange, status_and_error

# As java.net.http, browsers, proxies that pass both fields on, and some that nobody sends have them.
UPGRADES = [
    (
        b"Connection: Upgrade, HTTP2-Settings\r\n",
        b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAM\r\n",
    ),
    (b"Connection: keep-alive, Upgrade\r\n", b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"),
    (b"connection:upgrade\r\n", b"UPGRADE:h2c \r\nupgrade: TLS/1.0, websocket\r\n"),
    (b"Connection: a,UPGRADE ,b\r\nConnection: keep-alive\r\n", b"Upgrade: h2c\r\n"),
    (b"", b"Upgrade: h2c\r\n"),
]
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: t\r\n\r\n"


class RecordingTransport(asyncio.Transport):
    """One end of a connection whose client takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Do not: a test goes on sending."""

    def resume_reading(self) -> None:
        """Nothing was paused."""

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


async def tell(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with all that the request says, apart from what asks for an upgrade."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    of_upgrades = (b"connection", b"upgrade", b"http2-settings", b"sec-websocket-version")
    fields = [(name.decode(), value.decode()) for name, value in scope["headers"] if name not in of_upgrades]
    told = [scope["method"], scope["http_version"], scope["raw_path"].decode(), scope["query_string"].decode(), fields]
    answer = json.dumps([*told, body.decode()]).encode()
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def _answers(parts: Sequence[bytes]) -> tuple[bytes, bool]:
    config = Config(tell, http=BoundedHttpProtocol, lifespan="off", log_config=None)
    protocol = BoundedHttpProtocol(
        config, ServerState(), Connections(1), malformed=RareWarning(logging.getLogger()), write_limit_s=30
    )
    transport = RecordingTransport()
    protocol.connection_made(transport)
    for part in parts:
        protocol.data_received(part)
        await asyncio.sleep(0)
    while protocol.tasks:
        await asyncio.gather(*protocol.tasks)
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return transport.written, transport.is_closed


def answers(*parts: bytes) -> tuple[bytes, bool]:
    """Return what a connection that receives these parts answers, and whether it was closed."""
    return asyncio.run(asyncio.wait_for(_answers(parts), 20))


def request(
    start: bytes = b"POST /a?b=c HTTP/1.1",
    body: bytes = b"",
    framing: str = "length",
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """Return a request with the fields of an upgrade `before` and `after` those that frame its body."""
    head = start + b"\r\nHost: t\r\n" + before + b"x-empty:\r\n"
    if framing == "chunked":
        middle = len(body) // 2
        chunks = [part for part in (body[:middle], body[middle:]) if part]
        framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        return head + b"transfer-encoding: chunked\r\n" + after + b"\r\n" + framed + b"0\r\nx-trailer: 1\r\n\r\n"
    length = b"Content-Length: %d\r\n" % len(body) if framing == "length" else b""
    return head + length + after + b"\r\n" + (body if length else b"")


CLOSE = request(b"GET /last HTTP/1.1", framing="none", before=b"connection: close\r\n")
STARTS = [b"POST /a?b=c HTTP/1.1", b"GET /a%20b HTTP/1.1", b"DELETE http://t/x HTTP/1.1", b"M-SEARCH * HTTP/1.1"]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request with fields of an upgrade, and the same without them."""
    start, framing = draw(st.sampled_from(STARTS)), draw(st.sampled_from(["none", "length", "chunked"]))
    body = draw(st.sampled_from([b"", b"{}", HIDDEN, HIDDEN * 40, b"\r\n\r\n", b"0\r\n\r\n" + HIDDEN]))
    before, after = draw(st.sampled_from([(b"", b""), *UPGRADES]))
    if draw(st.booleans()):
        before, after = after, before
    return request(start, body, framing, before, after), request(start, body, framing)


@given(st.lists(pairs(), min_size=1, max_size=6), st.data())
def test_any_requests_in_any_packets_are_answered_as_without_their_upgrades(
    drawn: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    sent = b"".join(asked for asked, _ in drawn) + CLOSE
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=12)))
    parts = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    plain, is_closed = answers(b"".join(plain for _, plain in drawn) + CLOSE)
    assert plain.count(b"HTTP/1.1 200 ") == len(drawn) + 1
    assert is_closed
    assert answers(*parts) == (plain, True)


@pytest.mark.some(2)
@pytest.mark.parametrize("framing", ["none", "length", "chunked"])
@pytest.mark.parametrize("upgrade", range(len(UPGRADES)))
def test_a_packet_may_end_anywhere(upgrade: int, framing: str) -> None:
    sent = request(body=HIDDEN, framing=framing, before=UPGRADES[upgrade][0], after=UPGRADES[upgrade][1]) + CLOSE
    plain = answers(request(body=HIDDEN, framing=framing) + CLOSE)
    assert plain[0].count(b"HTTP/1.1 200 ") == 2
    for i in range(1, len(sent)):
        assert answers(sent[:i], sent[i:]) == plain
    assert answers(*[sent[i : i + 1] for i in range(len(sent))]) == plain


UPGRADE = b"".join(UPGRADES[0])


def test_a_body_after_an_upgrade_is_taken(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    fields = b"host: t\r\ncontent-type: application/json\r\n" + UPGRADE
    head = b"POST /v1/completions HTTP/1.1\r\n" + fields + b"content-length: %d\r\n\r\n" % len(body)
    last = b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    for parts in ([head + body + last], [head, body, last], [head + body[:3], body[3:] + last]):
        answer = exchange(server, parts)
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert answer.index(b'"object":"text_completion"') < answer.index(b'"version"')
    assert len(server.engine.submitted) == 3


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
@pytest.mark.parametrize("connection", [b"upgrade", b"upgrade, close"])
def test_no_request_is_found_in_a_body(serve: Callable[..., LiveServer], path: bytes, connection: bytes) -> None:
    """Not even while the rest of the body does not come."""
    hidden = b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    fields = b"host: t\r\ncontent-type: application/json\r\nupgrade: h2c\r\nconnection: " + connection
    length = b"\r\ncontent-length: %d\r\n\r\n" % len(hidden)
    answer = exchange(serve(FakeEngineClient()), [b"POST " + path + b" HTTP/1.1\r\n" + fields + length, hidden, CLOSE])
    assert b'"version"' not in answer
    assert answer.startswith(b"HTTP/1.1 4")


def test_a_head_with_an_upgrade_keeps_its_limits(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    start = b"GET /version HTTP/1.1\r\nhost: t\r\n" + UPGRADE
    end = b"connection: close\r\n\r\n"
    num_fields = (start + end).count(b"\r\n") - 2
    for fields, status in [
        (b"x: " + b"a" * 60_000 + b"\r\n", 200),
        (b"x: " + b"a" * 90_000 + b"\r\n", 431),
        (b"a:b\r\n" * (128 - num_fields), 200),
        (b"a:b\r\n" * (129 - num_fields), 431),
    ]:
        assert int(exchange(server, [start + fields + end]).split()[1]) == status


def test_pipelined_upgrades_are_bounded(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    asked = b"GET /version HTTP/1.1\r\nhost: t\r\n" + UPGRADE + b"\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    assert exchange(server, [asked * 32 + last]).count(b"HTTP/1.1 200 ") == 33
    assert exchange(server, [asked * 40 + last]).count(b"HTTP/1.1 200 ") < 33


@pytest.mark.parametrize("extra", [b"", b"content-length: 51\r\n", UPGRADE], ids=["alone", "with a body", "an upgrade"])
def test_connect_is_not_implemented(serve: Callable[..., LiveServer], extra: bytes) -> None:
    head = b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n" + extra + b"\r\n"
    answer = exchange(serve(FakeEngineClient()), [head + HIDDEN])
    assert status_and_error(answer) == (
        501,
        "not_implemented",
        "this server is no proxy and does not take CONNECT",
    )
    assert b"\r\nx-should-retry: false\r\n" in answer


@pytest.mark.parametrize(
    ("version", "fields", "message"),
    [
        ("1.1", b"", "a request over HTTP/1.1 must have one Host field, got 0"),
        ("1.1", b"host: t\r\nHost: t\r\n", "a request over HTTP/1.1 must have one Host field, got 2"),
        ("1.0", b"host: t\r\nHost: u\r\n", "a request over HTTP/1.0 must have one Host field, got 2"),
        ("1.1", b"host: a b\r\n", "the Host field must be a name or an address, with or without a port, got 'a b'"),
        ("1.1", b"host: a/b\r\n", "the Host field must be a name or an address, with or without a port, got 'a/b'"),
        ("1.1", b"host: u@a\r\n", "the Host field must be a name or an address, with or without a port, got 'u@a'"),
        ("1.1", b"host: a:b\r\n", "the Host field must be a name or an address, with or without a port, got 'a:b'"),
        ("1.1", b"host: ::1\r\n", "the Host field must be a name or an address, with or without a port, got '::1'"),
        ("1.1", b"host: \xff\r\n", "the Host field must be a name or an address, with or without a port, got '\xff'"),
        ("2.0", b"host: t\r\n", "the protocol must be HTTP/1.0 or HTTP/1.1, got HTTP/2.0"),
        ("0.9", b"host: t\r\n", "the protocol must be HTTP/1.0 or HTTP/1.1, got HTTP/0.9"),
    ],
)
def test_a_head_that_breaks_a_rule_is_refused(
    serve: Callable[..., LiveServer], version: str, fields: bytes, message: str
) -> None:
    head = b"GET /version HTTP/" + version.encode() + b"\r\n" + fields
    server = serve(FakeEngineClient())
    assert status_and_error(exchange(server, [head + b"\r\n"])) == (400, "invalid_http", message)
    assert status_and_error(exchange(server, [head + UPGRADE + b"\r\n"])) == (400, "invalid_http", message)


@pytest.mark.parametrize(
    "host",
    [b"", b"t", b"a_b.example.org:80", b"127.0.0.1:1", b"[::1]:1", b"[fe80::1%25eth0]", b"a:", b"t \t"],
)
def test_a_host_is_a_name_or_an_address(host: bytes) -> None:
    check_head(b"GET", b"/", "1.1", [(b"host", host)])
    check_head(b"GET", b"/", "1.0", [])


@pytest.mark.some(3)
@pytest.mark.parametrize("coding", [b"xchunked", b"identity", b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked"])
@pytest.mark.parametrize("upgrade", [b"", UPGRADE], ids=["plain", "upgrade"])
def test_another_transfer_encoding_is_not_implemented(
    serve: Callable[..., LiveServer], coding: bytes, upgrade: bytes
) -> None:
    server = serve(FakeEngineClient())
    fields = b"host: t\r\n" + upgrade + b"content-type: application/json\r\ntransfer-encoding: " + coding
    head = b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\n\r\n"
    shown = coding.replace(b"\r\ntransfer-encoding: ", b", ").decode()
    message = f"the only Transfer-Encoding that this server takes is chunked, got '{shown}'"
    answer = exchange(server, [head + b"10\r\n" + b'{"prompt": "abc"}\r\n0\r\n\r\n'])
    assert status_and_error(answer) == (501, "not_implemented", message)
    assert server.engine.submitted == []


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"chunked \t"])
def test_chunked_is_taken_however_it_is_written(coding: bytes) -> None:
    check_head(b"POST", b"/", "1.1", [(b"host", b"t"), (b"transfer-encoding", coding)])


def test_a_head_lacks_only_the_upgrade() -> None:
    fields = [(b"host", b"t"), (b"upgrade", b"h2c"), (b"content-length", b"5 "), (b"x-upgrade", b""), (b"host", b"u")]
    head = without_upgrade(b"POST", b"/a?b", "1.0", fields)
    assert head == b"POST /a?b HTTP/1.0\r\nhost: t\r\ncontent-length: 5 \r\nx-upgrade: \r\nhost: u\r\n\r\n"


@pytest.mark.parametrize(
    "target", [b"/v1/completions#/health", b"#/health", b"http://t/v1/models#/ready", b"/?a#/metrics"]
)
def test_a_target_has_no_fragment(target: bytes) -> None:
    """The route would see the path before it, and what tells probes apart its end."""
    with pytest.raises(ServiceError) as caught:
        check_head(b"POST", target, "1.1", [(b"host", b"t")])
    assert str(caught.value) == f"the target of a request may have no fragment, got {target.decode()!r}"
    assert caught.value.code == "invalid_http"


def test_a_fragment_is_a_400(serve: Callable[..., LiveServer]) -> None:
    answer = exchange(serve(FakeEngineClient()), [b"GET /v1/models#/health HTTP/1.1\r\nhost: t\r\n\r\n"])
    message = "the target of a request may have no fragment, got '/v1/models#/health'"
    assert status_and_error(answer) == (400, "invalid_http", message)
