"""Haystack: chats, whole and streamed; a call of a tool and its result; an answer of a type."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "haystack"
pytestmark = pytest.mark.clients
FIELDS = {"max_tokens": 12, "temperature": 0, "seed": 1}


def chat(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    def made(**more: Any) -> OpenAIChatGenerator:
        key = Secret.from_token("none")
        return OpenAIChatGenerator(api_key=key, model="tiny", api_base_url=url, generation_kwargs=fields, **more)

    asked = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("The cat sat")]
    [first] = made().run(asked)["replies"]
    chunks: list[str] = []
    [streamed] = made(streaming_callback=lambda chunk: chunks.append(chunk.content)).run(asked)["replies"]
    [second] = made().run([*asked, first, ChatMessage.from_user("and then?")])["replies"]
    return {"texts": [first.text, streamed.text, "".join(chunks)], "second": second.text}


def test_chats(client: Environment, chats: str) -> None:
    found = client.call(chat, chats, FIELDS)

    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat"}]
    first = text_of(chats, messages=asked, **FIELDS)
    assert found["texts"] == [first] * 3
    more = [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert found["second"] == text_of(chats, messages=more, **FIELDS)


def call(url: str) -> dict[str, Any]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = Tool("get_weather", "the weather of a city", city, lambda city: f"Rain in {city}")

    def made(**more: Any) -> OpenAIChatGenerator:
        return OpenAIChatGenerator(api_key=Secret.from_token("none"), model="test-model", api_base_url=url, **more)

    asked = [ChatMessage.from_user("Is it raining?")]
    [first] = made(tools=[tool]).run(asked)["replies"]
    [streamed] = made(tools=[tool], streaming_callback=lambda _: None).run(asked)["replies"]
    [asked_for] = first.tool_calls
    results = [ChatMessage.from_tool(tool.invoke(**asked_for.arguments), origin=asked_for)]
    [last] = made(tools=[tool]).run([*asked, first, *results])["replies"]
    [typed] = made(generation_kwargs={"response_format": Weather}).run(asked)["replies"]
    calls = [[made_call.tool_name, made_call.arguments] for made_call in (*first.tool_calls, *streamed.tool_calls)]
    return {"calls": calls, "last": last.text, "typed": Weather.model_validate_json(typed.text).model_dump()}


def test_a_tool_is_called_and_an_answer_has_its_type(client: Environment, caller: str) -> None:
    found = client.call(call, caller)

    assert found == {
        "calls": [["get_weather", {"city": "Oslo"}]] * 2,
        "last": "It rains.",
        "typed": {"city": "Oslo"},
    }
