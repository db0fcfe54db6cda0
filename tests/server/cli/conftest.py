"""A command line in this process, and a stand-in for the server that it asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gptserve.server.cli.main import main


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
        self.server.authorization = self.headers["authorization"]
        status, body = self.server.answer
        self._answer(status, [body] if isinstance(body, str) else body)

    def _answer(self, status: int, parts: Any) -> None:
        self.send_response(status)
        if self.server.length is not None:
            self.send_header("content-length", str(self.server.length))
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class StandIn(ThreadingHTTPServer):
    """A stand-in server: keeps what it was asked, answers with `answer`, a status and a body or its parts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.answer: tuple[int, Any] = (200, "")
        self.models = '{"data": [{"id": "teller"}]}'
        self.length: int | None = None
        """The content-length that answers claim to have."""
        self.asked: list[dict[str, Any]] = []
        self.path = ""
        self.authorization: str | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http
        http.shutdown()
        thread.join()
