"""The AI SDK with @ai-sdk/openai-compatible: chats, texts, streams, a conversation, objects, tools, an error."""

from __future__ import annotations

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "ai"
pytestmark = pytest.mark.clients
FIELDS = {"maxOutputTokens": 12, "temperature": 0, "seed": 1}
WIRE = {"max_tokens": 12, "temperature": 0, "seed": 1}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat"}]


def test_chats(client: Environment, chats: str) -> None:
    found = client.call_js("ai.mjs", "chats", chats, FIELDS)

    first = text_of(chats, messages=ASKED, **WIRE)
    asked = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert found["texts"] == [first] * 2
    assert found["second"] == text_of(chats, messages=asked, **WIRE)
    assert found["usage"][0] == found["usage"][1] > 0
    assert found["reasons"][0] == found["reasons"][1]


def test_texts(client: Environment, stories: str) -> None:
    found = client.call_js("ai.mjs", "texts", stories, FIELDS)

    assert len(set(found)) == 1
    assert found[0]


def test_an_error_is_one_of_the_sdk(client: Environment, chats: str) -> None:
    is_known, status, is_retryable, message = client.call_js("ai.mjs", "errorOf", chats, "other")

    assert (is_known, status, is_retryable) == (True, 404, False)
    assert "other" in message


def test_an_object_has_its_schema_and_tools_are_called(client: Environment, tools: str) -> None:
    found = client.call_js("ai.mjs", "objects", tools, {"maxOutputTokens": 200, "temperature": 0})

    assert set(found["object"]) == {"city"}
    assert [set(made) for made in found["inputs"]] == [{"city"}] * 2
    assert found["inputs"][0] == found["inputs"][1]
    assert found["reasons"] == ["tool-calls"] * 2
