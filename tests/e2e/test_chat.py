"""`gptserve chat` with a real server."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import httpx
import pytest

from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.cli.terminal import Terminal
from tests.server.serving import LIMIT_S, MORTAL, Process

CUT_OFF = "(cut off at the limit of tokens)\n"


@pytest.mark.slow
def test_a_conversation_outlives_its_server(tmp_path: Path) -> None:
    gate, path = EngineGate(tmp_path), tmp_path / "chat.json"
    with contextlib.ExitStack() as stack:
        first = Process("--chat-template", "plain", main=MORTAL, **{VARIABLE: str(tmp_path)})
        stack.callback(first.kill)
        with first.wait_until_ready() as client:
            url = str(client.base_url).rstrip("/")
        chat = Terminal("chat", "--url", url, "--max-tokens", "6", "--seed", "1")
        stack.callback(chat.close)
        chat.wait_for("> ")
        chat.type("Who are you?\n")
        chat.wait_for(CUT_OFF)
        gate.shut()
        chat.type("Who am I?\n")
        while not gate.is_reached:
            assert first.popen.poll() is None
        first.kill()
        chat.wait_for("gptserve: ")
        chat.wait_for("> ")

        second = Process("--chat-template", "plain", "--port", url.rpartition(":")[2])
        stack.callback(second.kill)
        second.wait_until_ready().close()
        chat.type("Who is there?\n")
        chat.wait_for(CUT_OFF)
        chat.type(f"/save {path}\n")
        chat.wait_for("(saved 4 messages")
        messages = json.loads(path.read_text())["messages"]
        body = {"messages": messages[:-1], "max_tokens": 6, "seed": 1}
        expected = httpx.post(url + "/v1/chat/completions", json=body, timeout=LIMIT_S).json()

    assert [message["content"] for message in messages[::2]] == ["Who are you?", "Who is there?"]
    assert messages[-1]["content"] == expected["choices"][0]["message"]["content"]
