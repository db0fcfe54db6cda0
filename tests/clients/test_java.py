"""java.net.http, as Spring AI and LangChain4j use it: on http:// it offers to upgrade every request to HTTP/2."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.serving import LIMIT_S

pytestmark = pytest.mark.clients
PROGRAM = Path(__file__).parent / "Upgrading.java"


@pytest.mark.parametrize("stream", [False, True])
def test_completions_and_streams(stories: str, stream: bool) -> None:
    java = shutil.which("java")
    if java is None:
        pytest.skip("Java is not installed")
    body = {"prompt": "The cat", "max_tokens": 12, "temperature": 0, "stream": stream}
    said = subprocess.run(
        [java, str(PROGRAM), stories, json.dumps(body)], check=True, capture_output=True, text=True, timeout=LIMIT_S
    ).stdout.splitlines()
    answers = [line.split(" ", 2) for line in said]
    assert [answer[:2] for answer in answers] == [["HTTP_1_1", "200"]] * 6
    expected = _texts(httpx.post(f"{stories}/completions", json=body, timeout=LIMIT_S).text)
    for i, (_, _, found) in enumerate(answers):
        if i % 3 < 2:
            assert _texts(found.replace("\\n", "\n")) == expected
        else:
            assert [model["id"] for model in json.loads(found)["data"]] == ["storyteller"]


def _texts(answer: str) -> list[str]:
    """Return the texts of an answer in one piece, or of its events."""
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith(("data: {", "{"))]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]
