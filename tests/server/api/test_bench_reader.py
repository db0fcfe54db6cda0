"""Streams read by the rule of `vllm bench serve`, whose own package is too large to install here.

It is stricter than server-sent events are: it takes white space off both ends of each piece that it receives, cuts at
blank lines, passes by what begins with a colon, and takes the rest after `data: ` for JSON. What is left at the end of
a piece counts if it is whole; otherwise the next piece is added to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest

from gptserve.server.completions.sse import AFTER_KEEP_ALIVE, KEEP_ALIVE
from tests.server.conftest import MODEL, LiveServer
from tests.server.fake_engine import FakeEngineClient, say

Serve = Callable[..., LiveServer]
STREAM = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
TEXT = {**STREAM, "prompt": "x", "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": None}
CONTENT = [{"type": "text", "text": "x"}]
CHAT = {**STREAM, "messages": [{"role": "user", "content": CONTENT}], "max_completion_tokens": 9}
REPLY = "a\n\n b ✓"


def chunks(pieces: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the chunks that the client finds in these pieces of a body."""
    rest = ""
    for piece in pieces:
        *blocks, rest = (rest + piece.strip().decode()).split("\n\n")
        if is_whole(rest):
            blocks, rest = [*blocks, rest], ""
        for block in filter(None, map(str.strip, blocks)):
            if not block.startswith(":") and (data := block.removeprefix("data: ")) != "[DONE]":
                yield json.loads(data)


def is_whole(rest: str) -> bool:
    data = rest.removeprefix("data: ").strip()
    try:
        return rest.startswith("data: ") and (data == "[DONE]" or json.loads(data) is not None)
    except json.JSONDecodeError:
        return False


def said(found: Iterable[dict[str, Any]]) -> tuple[str, list[int]]:
    """Return text and usage, as the client adds them up; it takes a stream without a choice for failed."""
    choices, usages = [], []
    for chunk in found:
        if chunk["choices"]:
            choices.append(chunk["choices"][0])
        elif chunk["usage"]:
            usages.append(chunk["usage"]["completion_tokens"])
    assert choices
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    return "".join(texts), usages


def pieces_of(server: LiveServer, path: str, body: dict[str, Any]) -> list[bytes]:
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=20) as response:
        assert response.status_code == 200
        return list(response.iter_raw())


@pytest.mark.some(2)
@pytest.mark.parametrize(("path", "body"), [("completions", TEXT), ("chat/completions", CHAT)])
@pytest.mark.parametrize("cut", ["as it came", "each event alone", "in one"])
def test_a_stream_is_read_whole(serve: Serve, path: str, body: dict[str, Any], cut: str) -> None:
    pieces = pieces_of(serve(FakeEngineClient(say(REPLY))), path, body)
    if cut != "as it came":
        pieces = [b"".join(pieces)]
    if cut == "each event alone":
        pieces = [event + b"\n\n" for event in pieces[0].split(b"\n\n")[:-1]]

    assert said(chunks(pieces)) == (REPLY, [9])


def test_a_stream_with_ids_is_not(serve: Serve) -> None:
    pieces = pieces_of(serve(FakeEngineClient(say(REPLY))), "completions", {**TEXT, "background": True})

    with pytest.raises(json.JSONDecodeError):
        said(chunks(pieces))


def test_an_event_right_after_a_comment_is_lost_and_not_after_two() -> None:
    event = b'data: {"n": 1}\n\n'

    assert list(chunks([KEEP_ALIVE, event])) == []
    assert list(chunks([KEEP_ALIVE, AFTER_KEEP_ALIVE + event])) == [{"n": 1}]
    assert list(chunks([KEEP_ALIVE, AFTER_KEEP_ALIVE + KEEP_ALIVE, AFTER_KEEP_ALIVE + event])) == [{"n": 1}]


def test_no_event_is_lost_of_a_stream_with_comments_before_each(serve: Serve) -> None:
    engine = FakeEngineClient(say(REPLY), auto=False)
    server = serve(engine, sse_keep_alive_interval_s=0.02)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=TEXT, timeout=20) as response:
        pieces = []
        for piece in response.iter_raw():
            pieces.append(piece)
            if piece.endswith(KEEP_ALIVE):
                engine.from_outside(engine.step)

    assert sum(piece.endswith(KEEP_ALIVE) for piece in pieces) >= 9
    assert said(chunks(pieces)) == (REPLY, [9])
