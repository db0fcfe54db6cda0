"""LiteLLM with each prefix that leads here; the class of its errors, on which its fallbacks rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "litellm"
pytestmark = pytest.mark.clients
PREFIXES = ["openai", "hosted_vllm", "text-completion-openai"]
CHAT = {"messages": [{"role": "user", "content": "The cat sat"}], "max_tokens": 12, "temperature": 0, "seed": 1}
TEXT = {"prompt": "The cat sat", "max_tokens": 12, "temperature": 0, "seed": 1}
LONG = "the cat sat on the mat and " * 400


def chat(url: str, model: str, fields: dict[str, Any]) -> list[Any]:
    import asyncio

    import litellm

    where = {"model": model, "api_base": url, "api_key": "none", "num_retries": 0}
    whole = litellm.completion(**where, **fields)
    chunks = list(litellm.completion(**where, **fields, stream=True, stream_options={"include_usage": True}))
    later = asyncio.run(litellm.acompletion(**where, **fields))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usages = [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)]
    texts = [whole.choices[0].message.content, streamed, later.choices[0].message.content]
    return [*texts, [whole.usage.completion_tokens], usages]


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_chats(client: Environment, chats: str, prefix: str) -> None:
    *texts, usage, streamed_usage = client.call(chat, chats, f"{prefix}/tiny", CHAT)

    assert texts == [text_of(chats, **CHAT)] * 3
    assert usage == streamed_usage


def complete(url: str, fields: dict[str, Any]) -> list[str]:
    import litellm

    where = {"model": "text-completion-openai/tiny", "api_base": url, "api_key": "none", "num_retries": 0}
    whole = litellm.text_completion(**where, **fields)
    streamed = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**where, **fields, stream=True)]
    return [whole.choices[0].text, "".join(streamed)]


def test_texts(client: Environment, chats: str) -> None:
    assert client.call(complete, chats, TEXT) == [text_of(chats, **TEXT)] * 2


def feed_back(url: str, model: str, fields: dict[str, Any], is_dumped: bool) -> list[str]:
    import litellm

    where = {"model": model, "api_base": url, "api_key": "none", "num_retries": 0}
    first = litellm.completion(**where, **fields).choices[0].message
    message = first.model_dump() if is_dumped else first
    messages = [*fields["messages"], message, {"role": "user", "content": "and then?"}]
    second = litellm.completion(**where, **{**fields, "messages": messages})
    return [first.content, second.choices[0].message.content]


@pytest.mark.parametrize("is_dumped", [False, True])
@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_an_answer_is_fed_back(client: Environment, chats: str, prefix: str, is_dumped: bool) -> None:
    first = text_of(chats, **CHAT)
    asked = [*CHAT["messages"], {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]

    found = client.call(feed_back, chats, f"{prefix}/tiny", CHAT, is_dumped)

    assert found == [first, text_of(chats, **{**CHAT, "messages": asked})]


def errors_of(url: str, cases: list[Any]) -> list[str]:
    import litellm

    found = []
    for model, fields, key in cases:
        ask = litellm.completion if "messages" in fields else litellm.text_completion
        try:
            ask(model=model, api_base=url, api_key=key, num_retries=0, **fields)
            found.append("none")
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_overflow_is_known_as_one(client: Environment, chats: str, prefix: str) -> None:
    fields = {"prompt": LONG} if prefix.startswith("text") else {"messages": [{"role": "user", "content": LONG}]}

    assert client.call(errors_of, chats, [[f"{prefix}/tiny", fields, "none"]]) == ["ContextWindowExceededError"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_each_error_has_its_class(client: Environment, strict: str, full: str, prefix: str) -> None:
    fields = TEXT if prefix.startswith("text") else CHAT
    cases = [[f"{prefix}/tiny", {**fields, "temperature": 9}, "secret"], [f"{prefix}/other", fields, "secret"]]

    assert client.call(errors_of, strict, cases) == ["BadRequestError", "NotFoundError"]
    assert client.call(errors_of, full, [[f"{prefix}/tiny", fields, "none"]]) == ["RateLimitError"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_wrong_key_is_known_as_one(client: Environment, strict: str, prefix: str) -> None:
    fields = TEXT if prefix.startswith("text") else CHAT

    assert client.call(errors_of, strict, [[f"{prefix}/tiny", fields, "wrong"]]) == ["AuthenticationError"]


def call(url: str, model: str, tool: dict[str, Any]) -> list[Any]:
    import litellm

    where = {"model": model, "api_base": url, "api_key": "none", "num_retries": 0, "max_tokens": 200, "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "Is it raining?"}]
    forced = {**where, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    first = litellm.completion(**forced, messages=messages).choices[0]
    chunks = list(litellm.completion(**forced, messages=messages, stream=True))
    streamed = litellm.stream_chunk_builder(chunks, messages=messages).choices[0]
    [made] = first.message.tool_calls
    messages += [first.message, {"role": "tool", "tool_call_id": made.id, "content": "Rain"}]
    back = litellm.completion(**where, tools=[tool], tool_choice="none", messages=messages).choices[0]
    calls = [made.function, streamed.message.tool_calls[0].function]
    found = [[function.name, function.arguments] for function in calls]
    return [*found, [first.finish_reason, streamed.finish_reason], back.message.content]


def test_tools_are_called(client: Environment, tools: str) -> None:
    city = {"city": {"type": "string", "maxLength": 8}}
    parameters = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}

    whole, streamed, reasons, back = client.call(call, tools, "openai/storyteller", tool)

    assert whole == streamed
    assert (whole[0], set(json.loads(whole[1]))) == ("get_weather", {"city"})
    assert reasons == ["tool_calls"] * 2
    assert back


def ask_by_messages(url: str, model: str) -> dict[str, Any]:
    import litellm

    where = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    asked: list[Any] = [{"role": "system", "content": [cached]}, {"role": "user", "content": "Is it raining?"}]
    called = litellm.completion(messages=asked, tools=tools, **where).choices[0].message
    [call] = called.tool_calls
    asked += [called.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
    chunks = litellm.completion(messages=asked, tools=tools, stream=True, **where)
    wanted = {"type": "json_schema", "json_schema": {"name": "Place", "schema": parameters}}
    typed = litellm.completion(messages=asked[:2], response_format=wanted, **where)
    try:
        litellm.completion(messages=[{"role": "user", "content": "x" * 10_000}], **where)
    except litellm.ContextWindowExceededError as error:
        told = type(error).__name__
    return {
        "arguments": json.loads(call.function.arguments),
        "answer": litellm.completion(messages=asked, tools=tools, **where).choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "typed": json.loads(typed.choices[0].message.content),
        "told": told,
    }


def test_messages(client: Environment, caller: str) -> None:
    assert client.call(ask_by_messages, caller.removesuffix("/v1"), "claude-sonnet-4-5") == {
        "arguments": {"city": "Oslo"},
        "answer": "It rains.",
        "streamed": "It rains.",
        "typed": {"city": "Oslo"},
        "told": "ContextWindowExceededError",
    }
