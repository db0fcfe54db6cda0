"""fetch and EventSource in headless Chromium, on a page of another origin than the server's."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import OFTEN, post, served, text_of

CLIENT = "browser"
pytestmark = pytest.mark.clients
FIELDS = {"max_tokens": 12, "temperature": 0, "seed": 1}


class Page(http.server.BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The URL of an empty page; by the name localhost it is of yet another origin."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def url(chat_model: Path, page: str) -> Iterator[str]:
    flags = ("--model", str(chat_model), "--served-model-name", "tiny", "--allowed-origins", page)
    with served(*flags, *OFTEN) as url:
        yield url


@pytest.fixture(scope="module")
def locked(chat_model: Path, page: str) -> Iterator[str]:
    flags = ("--served-model-name", "tiny", "--api-key", "secret", "--allowed-origins", page)
    with served("--model", str(chat_model), *flags) as url:
        yield url


def fetch(client: Environment, chromium: str, page: str, url: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    given = {"url": f"{url}/completions", "body": body, "key": key}
    found: dict[str, Any] = client.call_js("browser.mjs", "post", chromium, page, given)
    return found


def test_fetch_reads_answers_streams_and_errors(client: Environment, chromium: str, page: str, locked: str) -> None:
    body = {"prompt": "The cat", **FIELDS}
    whole = fetch(client, chromium, page, locked, body, "secret")
    stream = fetch(client, chromium, page, locked, {**body, "stream": True}, "secret")
    wrong_key = fetch(client, chromium, page, locked, body, "wrong")
    wrong_field = fetch(client, chromium, page, locked, {**body, "temperature": 9}, "secret")

    text = json.loads(whole["text"])["choices"][0]["text"]
    events = [block.removeprefix("data: ") for block in stream["text"].split("\n\n") if block.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    assert [answer["status"] for answer in (whole, stream, wrong_key, wrong_field)] == [200, 200, 401, 400]
    assert {answer["requestId"] for answer in (whole, stream, wrong_key, wrong_field)} == {"mine"}
    assert json.loads(wrong_key["text"])["error"]["code"] == "invalid_api_key"


def test_an_origin_that_is_not_named_is_refused(client: Environment, chromium: str, page: str, locked: str) -> None:
    other = page.replace("127.0.0.1", "localhost")

    assert fetch(client, chromium, other, locked, {"prompt": "The cat", **FIELDS}, "secret") == {"refused": "TypeError"}


def test_an_event_source_reads_to_the_end_and_stays_away(
    client: Environment, chromium: str, page: str, url: str
) -> None:
    body = {"prompt": "The cat", **FIELDS}
    begun = post(url, "completions", **body, background=True)

    found = client.call_js("browser.mjs", "follow", chromium, page, {"url": f"{url}/completions/{begun['id']}/events"})

    events = found["events"]
    assert not found["cameBack"]
    assert events.pop()[1] == "[DONE]"
    assert "".join(json.loads(data)["choices"][0]["text"] for _, data in events) == text_of(url, **body)
    assert len({last for last, _ in events}) == len(events)
