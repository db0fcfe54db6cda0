"""anthropic for Python: sync, async, its helper for streams, tools, thinking, counts, and the class of each error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import TOOLS, post, scripted
from tests.server.conftest import MODEL, LiveServer

CLIENT = "anthropic"
pytestmark = pytest.mark.clients
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "The cat sat on the mat"}],
    "max_tokens": 40,
    "extra_body": {"temperature": 0},  # for which the client has no parameter any more
}
WEATHER = {
    "name": "get_weather",
    "description": "Tell the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def text_of(url: str) -> str:
    """Return the answer to MESSAGE as a chat has it."""
    messages = [{"role": "system", "content": MESSAGE["system"]}, *MESSAGE["messages"]]
    fields = {"model": MESSAGE["model"], "max_tokens": MESSAGE["max_tokens"], **MESSAGE["extra_body"]}
    text: str = post(url, "chat/completions", messages=messages, **fields)["choices"][0]["message"]["content"]
    return text


def ask(url: str, message: dict[str, Any]) -> dict[str, Any]:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**message)
        events = list(client.messages.create(**message, stream=True))
        with client.messages.stream(**message) as stream:
            texts = "".join(stream.text_stream)
            final = stream.get_final_message()
        fields = {name: message[name] for name in ("model", "system", "messages")}
        counted = client.messages.count_tokens(**fields)
        beta = client.beta.messages.create(**message, betas=["context-management-2025-06-27"])
    return {
        "whole": whole.content[0].text,
        "type": whole.content[0].type,
        "request id": whole._request_id,
        "streamed": "".join(e.delta.text for e in events if e.type == "content_block_delta"),
        "types": [event.type for event in events if event.type != "content_block_delta"],
        "helper": [texts, final.content[0].text],
        "beta": beta.content[0].text,
        "stop reasons": [whole.stop_reason, final.stop_reason],
        "tokens": [whole.usage.output_tokens, final.usage.output_tokens],
        "input": [usage.input_tokens + usage.cache_read_input_tokens for usage in (whole.usage, final.usage)],
        "counted": counted.input_tokens,
    }


def test_messages_whole_streamed_and_by_the_helper(client: Environment, chats: str) -> None:
    text, found = text_of(chats), client.call(ask, chats.removesuffix("/v1"), MESSAGE)

    assert [found["whole"], found["streamed"], *found["helper"], found["beta"]] == [text] * 5
    assert (found["type"], found["stop reasons"], found["tokens"]) == ("text", ["max_tokens"] * 2, [40, 40])
    assert found["input"] == [found["counted"]] * 2
    block = ["content_block_start", "content_block_stop"]
    assert found["types"] == ["message_start", *block, "message_delta", "message_stop"]
    assert found["request id"]


def models_of(url: str) -> list[list[str]]:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        listed = [*client.models.list(limit=20), client.models.retrieve("tiny")]
        return [[model.id, model.display_name, model.type, model.created_at.isoformat()] for model in listed]


def test_models(client: Environment, chats: str) -> None:
    listed, retrieved = client.call(models_of, chats.removesuffix("/v1"))

    assert listed == retrieved
    assert listed[:3] == ["tiny", "tiny", "model"]


def ask_many(url: str, message: dict[str, Any]) -> list[list[str]]:
    import asyncio

    import anthropic

    async def whole(client: Any) -> str:
        return str((await client.messages.create(**message)).content[0].text)

    async def streamed(client: Any) -> str:
        async with client.messages.stream(**message) as stream:
            return "".join([text async for text in stream.text_stream])

    async def run() -> list[list[str]]:
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="none", max_retries=0) as client:
            return [list(await asyncio.gather(*(ask(client) for _ in range(4)))) for ask in (whole, streamed)]

    return asyncio.run(run())


def test_many_at_once_by_the_async_client(client: Environment, chats: str) -> None:
    assert client.call(ask_many, chats.removesuffix("/v1"), MESSAGE) == [[text_of(chats)] * 4] * 2


def loop(url: str, model: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Answer the call that the model makes with what the city is, whole and by the helper for streams."""
    import anthropic

    found: dict[str, Any] = {"texts": [], "inputs": [], "thoughts": [], "reasons": [], "deltas": ""}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for is_streamed in (False, True):
            messages: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
            for _ in range(2):
                asked: dict[str, Any] = {
                    "model": model,
                    "max_tokens": 500,
                    "messages": messages,
                    "tools": [tool],
                    "thinking": {"type": "adaptive"},
                }
                if is_streamed:
                    with client.messages.stream(**asked) as stream:
                        for event in stream:
                            if event.type == "input_json":
                                found["deltas"] += event.partial_json
                        answer = stream.get_final_message()
                else:
                    answer = client.messages.create(**asked)
                found["reasons"].append(answer.stop_reason)
                messages.append({"role": "assistant", "content": answer.content})
                results = []
                for block in answer.content:
                    if block.type == "tool_use":
                        found["inputs"].append(block.input)
                        results.append({"type": "tool_result", "tool_use_id": block.id, "content": "Rain"})
                    elif block.type == "thinking":
                        found["thoughts"].append(block.thinking)
                    else:
                        found["texts"].append(block.text)
                messages.append({"role": "user", "content": results})
    return found


def test_a_loop_of_tools_with_thinking(client: Environment) -> None:
    call = '<think>Hm.</think>I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    engine = scripted(*[call, "<think>So.</think>It rains."] * 2)
    with LiveServer(engine, template=TOOLS + "{# </think> #}").running() as server:
        found = client.call(loop, server.url, MODEL, WEATHER)

    assert found["reasons"] == ["tool_use", "end_turn"] * 2
    assert (found["texts"], found["thoughts"]) == (["I look.", "It rains."] * 2, ["Hm.", "So."] * 2)
    assert found["inputs"] == [{"city": "Oslo"}] * 2
    assert found["deltas"] == '{"city": "Oslo"}'
    _, second, _, fourth = (bytes(request.prompt_token_ids).decode() for request in engine.submitted)
    assert second == fourth
    assert 'I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>' in second
    assert second.endswith("tool: Rainassistant:")


def run_tools(url: str, model: str) -> list[str]:
    import anthropic

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """
        return f"Rain in {city}"

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model=model, max_tokens=500, tools=[get_weather], messages=[{"role": "user", "content": "Weather?"}]
        )
        return [block.text for answer in runner for block in answer.content if block.type == "text"]


def test_its_own_loop_of_tools(client: Environment) -> None:
    engine = scripted('<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>', "It rains.")
    with LiveServer(engine, template=TOOLS).running() as server:
        texts = client.call(run_tools, server.url, MODEL)

    assert texts[-1] == "It rains."
    assert "tool: Rain in Oslo" in bytes(engine.submitted[1].prompt_token_ids).decode()


def classes(url: str, message: dict[str, Any]) -> list[list[Any]]:
    import anthropic

    found = []

    def note(**fields: Any) -> None:
        key = fields.pop("key", "secret")
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
            try:
                client.messages.create(**{**message, **fields})
            except anthropic.APIStatusError as error:
                found.append([type(error).__name__, error.status_code, error.body["error"]["type"], error.request_id])

    note(key="wrong")
    note(model="claude-opus-5")
    note(extra_body={"temperature": 9})
    note(system="x" * 6000)
    note(messages=[{"role": "user", "content": "x " * 2000}])
    return found


def test_the_class_of_each_error(client: Environment, strict: str) -> None:
    *named, ids = zip(*client.call(classes, strict.removesuffix("/v1"), MESSAGE), strict=True)
    assert all(ids)
    assert list(zip(*named, strict=True)) == [
        ("AuthenticationError", 401, "authentication_error"),
        ("NotFoundError", 404, "not_found_error"),
        ("BadRequestError", 400, "invalid_request_error"),
        ("ContentTooLargeError", 413, "request_too_large"),
        ("BadRequestError", 400, "invalid_request_error"),
    ]


def ask_full(url: str, message: dict[str, Any]) -> list[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        try:
            client.messages.create(**message)
        except anthropic.RateLimitError as error:
            return [error.status_code, error.body["error"]["type"], error.response.headers["retry-after"]]
    return []


def test_a_full_server(client: Environment, full: str) -> None:
    status, kind, retry_after = client.call(ask_full, full.removesuffix("/v1"), MESSAGE)
    assert (status, kind, int(retry_after) > 0) == (429, "rate_limit_error", True)
