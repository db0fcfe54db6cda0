"""Anthropic's client for JavaScript: messages, its helper for streams, a loop of tools, the class of each error."""

from __future__ import annotations

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import TOOLS, post, scripted
from tests.server.conftest import MODEL, LiveServer

CLIENT = "anthropic-js"
pytestmark = pytest.mark.clients
MESSAGE = {"model": "tiny", "messages": [{"role": "user", "content": "The cat sat on the mat"}], "max_tokens": 12}
WEATHER = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_messages(client: Environment, chats: str) -> None:
    asked = {**MESSAGE, "temperature": 0}
    answer = post(chats, "chat/completions", **asked)
    found = client.call_js("anthropic.mjs", "messages", chats.removesuffix("/v1"), asked)

    assert found["texts"] == [answer["choices"][0]["message"]["content"]] * 3
    assert found["usage"] == [[found["counted"], answer["usage"]["completion_tokens"]]] * 2
    assert found["counted"] == answer["usage"]["prompt_tokens"]


def test_a_loop_of_tools(client: Environment) -> None:
    engine = scripted('<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>', "It rains.")
    with LiveServer(engine, template=TOOLS).running() as server:
        found = client.call_js("anthropic.mjs", "loop", server.url, MODEL, WEATHER)

    assert found == {"inputs": [{"city": "Oslo"}], "texts": ["It rains."], "deltas": '{"city": "Oslo"}'}
    assert "tool: Rain" in bytes(engine.submitted[1].prompt_token_ids).decode()


def test_the_class_of_each_error(client: Environment, strict: str) -> None:
    assert client.call_js("anthropic.mjs", "classes", strict.removesuffix("/v1"), MESSAGE) == [
        ["AuthenticationError", 401, "authentication_error"],
        ["NotFoundError", 404, "not_found_error"],
        ["BadRequestError", 400, "invalid_request_error"],
    ]
