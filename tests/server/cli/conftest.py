"""A command line in this process, and a stand-in for the server that it asks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gptserve.server.cli.main import main
from tests.server.cli.events import events
from tests.server.serving import LIMIT_S


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line; return exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run


class Answers(BaseHTTPRequestHandler):
    """Answers as its StandIn says."""

    server: StandIn

    def do_GET(self) -> None:
        self._answer(200, [self.server.models])

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.path = self.path
        self.server.paths.append(self.path)
        self.server.asked_with.append((self.headers["idempotency-key"], self.headers["last-event-id"]))
        self.server.authorization = self.headers["authorization"]
        status, body = self.server.answer
        self._answer(status, [body] if isinstance(body, str | bytes) else body)

    def _answer(self, status: int, parts: Any) -> None:
        self.send_response(status)
        for header in self.server.headers.items():
            self.send_header(*header)
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode() if isinstance(part, str) else part)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class StandIn(ThreadingHTTPServer):
    """A stand-in server: keeps what it was asked, answers with `answer`, a status and a body or its parts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.answer: tuple[int, Any] = (200, "")
        self.models = '{"data": [{"id": "teller"}]}'
        self.headers = {"content-type": "text/event-stream; charset=utf-8"}
        self.asked: list[dict[str, Any]] = []
        self.asked_with: list[tuple[str | None, str | None]] = []
        """The key and the last event id of each request."""
        self.path = ""
        self.paths: list[str] = []
        self.authorization: str | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def standing_in() -> Iterator[StandIn]:
    """Run a stand-in server."""
    with StandIn() as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with standing_in() as http:
        yield http


@pytest.fixture
def hold(server: StandIn) -> Iterator[Callable[..., threading.Event]]:
    """Let the stand-in send these events, and then no more until the test has ended; the result is set when it does."""
    asked, over = threading.Event(), threading.Event()

    def parts(*payloads: object) -> Iterator[str]:
        asked.set()
        yield events(*payloads)
        over.wait(LIMIT_S)

    def hold(*payloads: object) -> threading.Event:
        server.answer = (200, parts(*payloads))
        return asked

    yield hold
    over.set()
