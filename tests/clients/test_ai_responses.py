"""The AI SDK with @ai-sdk/openai in its defaults: a conversation by item_reference, an agent with tools, an object."""

from __future__ import annotations

import json

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import TOOLS, scripted, text_of
from tests.server.conftest import MODEL, LiveServer

CLIENT = "ai"
pytestmark = pytest.mark.clients
FIELDS = {"maxOutputTokens": 12, "temperature": 0}
WIRE = {"max_tokens": 12, "temperature": 0}


def test_a_conversation_goes_on_by_references(client: Environment, chats: str) -> None:
    asked = {"model": "tiny", "prompt": "The cat sat", "fields": FIELDS}
    found = client.call_js("ai_responses.mjs", "conversation", chats, asked)

    messages = [{"role": "user", "content": "The cat sat"}]
    first = text_of(chats, messages=messages, **WIRE)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert found["texts"] == [first] * 2
    assert found["types"] == ["user", "item_reference", "user"]
    assert found["second"] == text_of(chats, messages=messages, **WIRE)
    assert found["usage"][0] == found["usage"][1] > 0
    assert found["reasons"][0] == found["reasons"][1]
    assert found["warnings"] == []


def test_an_agent_calls_tools_to_the_end(client: Environment) -> None:
    call = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': {'city': 'Oslo'}})}\n</tool_call>"
    engine = scripted(call, "It rains.", call, "It rains.")
    with LiveServer(engine, template=TOOLS).running() as server:
        found = client.call_js("ai_responses.mjs", "agent", f"{server.url}/v1", {"model": MODEL})

    assert found["texts"] == ["It rains."] * 2
    assert found["inputs"] == [{"city": "Oslo"}] * 2
    assert found["results"] == ["Rain in Oslo"] * 2
    assert [bytes(request.prompt_token_ids).decode().count("Rain in Oslo") for request in engine.submitted] == [
        0,
        1,
    ] * 2


def test_an_object_has_its_schema(client: Environment, tools: str) -> None:
    asked = {"model": "storyteller", "fields": {"maxOutputTokens": 200, "temperature": 0}}
    assert set(client.call_js("ai_responses.mjs", "object", tools, asked)) == {"city"}
