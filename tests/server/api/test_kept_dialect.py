"""A kept answer is read as when it was begun, whatever template or format of calls a later server has."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.server.jobs.sqlite.rows import insert_completion, to_record
from tests.server.api.test_responses import get, post, read
from tests.server.api.test_tools import ANSWERS, TEMPLATES, TOOLS, USER, engine_of, tokenizer_of
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

Serve = Callable[..., LiveServer]
PLAIN = "{{ messages | tojson }}"
CHAT = "/v1/chat/completions"
OTHER: list[tuple[str, dict[str, Any]]] = [
    ("thinking", {"template": PLAIN}),
    ("thinking", {"template": TEMPLATES["mistral"]}),
    ("hermes", {"template": TEMPLATES["thinking"]}),
    ("hermes", {"unnamed_properties": "allow"}),
    ("mistral-v11", {"template": TEMPLATES["mistral-v11"], "tool_call_format": "hermes"}),
    ("llama", {"template": TEMPLATES["mistral"] + "</think>"}),
]


def options_of(kind: str, state_dir: Path, **more: Any) -> dict[str, Any]:
    return {"tokenizer": tokenizer_of(kind), "template": TEMPLATES[kind], "state_dir": state_dir, **more}


def events_of(server: LiveServer, completion_id: str) -> list[str]:
    return httpx.get(f"{server.url}{CHAT}/{completion_id}/events", timeout=20).text.split("\n\n")


@pytest.mark.some(3)
@pytest.mark.parametrize(("kind", "other"), OTHER)
def test_a_completed_chat_stays_as_it_was(serve: Serve, tmp_path: Path, kind: str, other: dict[str, Any]) -> None:
    first = LiveServer(engine_of(kind, ANSWERS[kind]), **options_of(kind, tmp_path))
    body, headers = {"messages": [USER], "tools": TOOLS, "background": True}, {"Idempotency-Key": "k"}
    with first.running():
        begun = httpx.post(first.url + CHAT, json=body, headers=headers, timeout=20).json()
        events = events_of(first, begun["id"])
        answer = httpx.get(f"{first.url}{CHAT}/{begun['id']}", timeout=20).json()
    assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == [
        "get_weather",
        "get_time",
    ]
    second = serve(engine_of(kind, "other"), **options_of(kind, tmp_path) | other)
    assert httpx.get(f"{second.url}{CHAT}/{begun['id']}", timeout=20).json() == answer
    assert events_of(second, begun["id"]) == events
    retried = httpx.post(second.url + CHAT, json=body, headers=headers, timeout=20).json()
    assert retried["id"] == begun["id"]


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "other"), OTHER)
def test_a_chat_that_was_under_way_goes_on_as_it_began(
    serve: Serve, tmp_path: Path, kind: str, other: dict[str, Any]
) -> None:
    engine = engine_of(kind, ANSWERS[kind])
    expected = serve(engine, **options_of(kind, tmp_path / "other"))
    body = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": True, "tool_choice": "required"}
    message = httpx.post(expected.url + CHAT, json=body, timeout=20).json()["choices"][0]["message"]
    first = LiveServer(FakeEngineClient(auto=False, info=engine.info), **options_of(kind, tmp_path))
    with first.running():
        begun = httpx.post(first.url + CHAT, json={**body, "background": True}, timeout=20).json()
    second = serve(engine_of(kind, ANSWERS[kind]), **options_of(kind, tmp_path) | other)
    events_of(second, begun["id"])
    resumed = httpx.get(f"{second.url}{CHAT}/{begun['id']}", timeout=20).json()["choices"][0]["message"]
    for call in (*message["tool_calls"], *resumed["tool_calls"]):
        del call["id"]
    assert resumed == message
    [before], [after] = first.engine.submitted, second.engine.submitted
    assert before.params.grammar is not None
    assert after.params.grammar == before.params.grammar


@pytest.mark.some(3)
@pytest.mark.parametrize(("kind", "other"), OTHER)
def test_a_response_has_the_same_events(serve: Serve, tmp_path: Path, kind: str, other: dict[str, Any]) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    first = LiveServer(engine_of(kind, ANSWERS[kind]), **options_of(kind, tmp_path))
    with first.running():
        events = read(post(first, tools=tools, stream=True))
    answer = events[-1]["response"]
    second = serve(engine_of(kind, "other"), **options_of(kind, tmp_path) | other)
    assert get(second, answer["id"]).json() == answer
    for after in (0, len(events) // 2, len(events) - 2):
        assert read(get(second, answer["id"], stream="true", starting_after=after)) == events[after + 1 :]


def test_a_record_without_a_dialect_is_read_by_that_of_the_server(serve: Serve, tmp_path: Path) -> None:
    """Servers of before wrote such records."""
    first = LiveServer(engine_of("thinking", ANSWERS["thinking"]), **options_of("thinking", tmp_path))
    with first.running():
        answer = post(first, input="hi").json()
    with sqlite3.connect(tmp_path / "gptserve.sqlite3") as database:
        record = to_record(database.execute("SELECT * FROM completions").fetchone())
        body = json.loads(record.body)
        assert body.pop("dialect") == {
            "format": "hermes",
            "think": ["<think>", "</think>"],
            "unnamed_properties": "refuse",
        }
        database.execute("DELETE FROM completions")
        database.execute(*insert_completion(replace(record, body=json.dumps(body))))
    database.close()
    second = serve(engine_of("thinking", "other"), **options_of("thinking", tmp_path))
    assert get(second, answer["id"]).json() == answer
