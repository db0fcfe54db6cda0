"""What comes from servers that are broken, foreign or out of reach: an answer if it can be one, else one sentence."""

from __future__ import annotations

import io
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.server.cli.remote import MAX_LINE_BYTES
from tests.server.cli.conftest import StandIn
from tests.server.cli.events import chat_event, events, text_event


def complete(run: Any, server: StandIn) -> tuple[object, str, str]:
    outcome: tuple[object, str, str] = run("complete", "x", "--url", server.url)
    return outcome


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (events({"choices": [{"text": None}]}, {"choices": [], "error": None}, text_event("there"), "[DONE]"), "there"),
        ('data:{"choices": [{"text": "a\u2028b"}]}\r\n\r\ndata:[DONE]\r\n\r\n', "a\u2028b"),
        (events({"choices": [{"text": "\ud83d"}, {"text": "!"}]}, "[DONE]"), "?!"),
        (events("[DONE]"), ""),
    ],
)
def test_a_stream_that_is_odd_and_whole_is_an_answer(stream: str, expected: str, run: Any, server: StandIn) -> None:
    server.answer = (200, stream)

    assert complete(run, server) == (0, expected and f"{expected}\n", "")


def test_a_chat_may_leave_out_what_it_does_not_say(run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who?")))
    choices: list[dict[str, Any]] = [{"delta": None}, {"delta": {}}, {"delta": {"role": "assistant", "content": None}}]
    server.answer = (200, events({"choices": choices}, chat_event("there"), "[DONE]"))

    assert run("chat", "--url", server.url) == (0, "there\n", "")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "odd",
    [
        *("3", '"hello"', "null", "[]", "{}", "not json", "[" * 100_000, '{"error": {"code": 3}}', '{"error": true}'),
        *('{"choices": null}', '{"choices": 3}', '{"choices": [3]}', '{"choices": "a"}', '{"choices": [{"text": 3}]}'),
        *('{"choices": [{"delta": "a"}]}', '{"choices": [{"delta": {"content": ["a"]}}]}'),
    ],
)
def test_an_event_that_is_no_part_of_an_answer_is_one_sentence(odd: str, run: Any, server: StandIn) -> None:
    server.answer = (200, events(text_event("there"), odd, "[DONE]"))

    expected = f"gptserve: the server sent an event that is no part of an answer: {odd[:100]!r}\n"
    assert complete(run, server) == (1, "there\n", expected)


def test_an_event_that_is_not_utf_8_is_one_sentence(run: Any, server: StandIn) -> None:
    server.answer = (200, b'data: {"choices": [{"text": "\xff"}]}\n\n')

    expected = 'the server sent an event that is no part of an answer: \'{"choices": [{"text": "\ufffd"}]}\''
    assert complete(run, server) == (1, "", f"gptserve: {expected}\n")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "it\n died", "type": "server_error"}},
        {"error": "it died"},
        {"error": {"error": "it died"}, "choices": []},
        {"object": "error", "message": "it died"},
        {"detail": "it died"},
    ],
)
@pytest.mark.parametrize("status", [200, 500])
def test_the_message_of_an_error_is_found(status: int, error: object, run: Any, server: StandIn) -> None:
    stream = events(error)
    server.answer = (status, stream if status == 200 else stream.split("data: ")[1].split("\n")[0])

    assert complete(run, server) == (1, "", "gptserve: it died\n")


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
def test_an_answer_that_is_no_stream_is_one_sentence(kind: str, run: Any, server: StandIn) -> None:
    server.answer, server.headers["content-type"] = (200, "<html>\n"), kind

    assert complete(run, server) == (1, "", f"gptserve: {server.url} answered with {kind} instead of events\n")


def test_a_line_without_an_end_is_not_kept(run: Any, server: StandIn) -> None:
    server.answer = (200, ["data: ", *["x" * 65536] * (MAX_LINE_BYTES // 65536)])

    assert complete(run, server) == (1, "", f"gptserve: the server sent a line of more than {MAX_LINE_BYTES} bytes\n")


def test_a_redirection_is_named_and_not_followed(run: Any, server: StandIn) -> None:
    server.answer, server.headers["location"] = (307, ""), "https://elsewhere/v1"

    assert complete(run, server) == (1, "", "gptserve: the server redirects to https://elsewhere/v1\n")


def test_messages_have_no_control_characters(run: Any, server: StandIn) -> None:
    server.answer = (400, '{"error": {"message": "no\\u001b[2J"}}')

    assert complete(run, server) == (1, "", "gptserve: no\\x1b[2J\n")


def test_this_machine_is_reached_without_a_proxy(run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = (200, events(text_event("there"), "[DONE]"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    assert complete(run, server) == (0, "there\n", "")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HTTPS_PROXY", "ftp://x", "Unknown scheme for proxy URL URL('ftp://x')"),
        ("SSL_CERT_FILE", "/no/such", "[Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_variable_of_the_network_is_one_sentence(
    variable: str, value: str, expected: str, run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", httpx.create_ssl_context)  # not the kept one
    monkeypatch.setenv(variable, value)

    expected = f"gptserve: a variable such as HTTPS_PROXY or SSL_CERT_FILE is wrong: {expected}\n"
    assert complete(run, server) == (1, "", expected)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_certificate_that_is_not_trusted_is_one_sentence(run: Any, server: StandIn, tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = {"keyout": str(tmp_path / "key"), "out": str(tmp_path / "certificate")}
    arguments = [word for name, path in files.items() for word in (f"-{name}", path)]
    subprocess.run([*make.split(), *arguments], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["out"], files["keyout"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")

    status, out, err = run("complete", "x", "--url", url)

    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"gptserve: no answer from {url}: [SSL: CERTIFICATE_VERIFY_FAILED] ")
    assert err.endswith("; SSL_CERT_FILE may name another file of certificates to trust\n")
