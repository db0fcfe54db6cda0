"""Structured output of a real server: one schema asked for in every way, and the same answer after deaths."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.grammar.schemas import assert_valid
from tests.server.serving import LIMIT_S, Process

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
LONG = {"guided_regex": "([a-z]{1,9} ){250}", "max_tokens": 900}
BODY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 1.5, "seed": 3, "max_tokens": 200}
WAYS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": json.dumps(SCHEMA)},
]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    launched: list[Process] = []

    def start(*flags: str) -> Process:
        launched.append(Process("--state-dir", str(tmp_path / "state"), *flags))
        return launched[-1]

    yield start
    for process in launched:
        process.kill()


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**BODY, **body})
    assert response.status_code in (200, 202), response.text
    return response.json()  # type: ignore[no-any-return]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def streamed(client: httpx.Client, after_first: Any, **body: Any) -> list[str]:
    """Return the texts of a stream's choices; call `after_first` after its first event."""
    made: dict[int, str] = {}
    with client.stream("POST", "/v1/completions", json={**BODY, **body, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                made[choice["index"]] = made.get(choice["index"], "") + choice["text"]
            if after_first is not None:
                after_first()
                after_first = None
    return [made[index] for index in sorted(made)]


@pytest.mark.slow
def test_the_answer_is_the_same_however_it_is_asked_for_and_whatever_dies(launch: Any) -> None:
    process = launch("--speculative-ngram", "2")
    with process.wait_until_ready() as client:
        answers = [texts(complete(client, n=2, logprobs=1, **way)) for way in WAYS]
        assert answers[1:] == answers[:1] * 2
        assert streamed(client, None, n=2, **WAYS[0]) == answers[0]
        for text in answers[0]:
            assert_valid(text, SCHEMA)
        whole = texts(complete(client, **LONG))
        assert streamed(client, process.engine().kill, **LONG) == whole
        assert re.search(r"^gptserve_engine_restarts_total\S* 1\.0$", client.get("/metrics").text, re.MULTILINE)
        begun = complete(client, background=True, **LONG)
        os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait(LIMIT_S)
    with launch().wait_until_ready() as client:
        with client.stream("GET", f"/v1/completions/{begun['id']}/events") as response:
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        kept = client.get(f"/v1/completions/{begun['id']}").json()
        assert (kept["status"], texts(kept)) == ("completed", whole)
