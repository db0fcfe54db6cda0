"""The official client against the server: what it reads, streams, cancels and raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, LiveServer
from tests.server.fake_engine import FakeEngineClient, say

Serve = Callable[..., LiveServer]


def sync_client(server: LiveServer, **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, timeout=20, **options)  # type: ignore[arg-type]


def async_client(server: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, timeout=20)


def test_a_completion_is_read(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("Hi!", then_eos=True)))
    with sync_client(server) as client:
        completion = client.completions.create(model=MODEL, prompt="x", max_tokens=9, logprobs=1, seed=5)
        models = [model.id for model in client.models.list()]
        assert client.models.retrieve(MODEL).id == MODEL
    assert models == [MODEL]
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("Hi!", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["H", "i", "!", "<|endoftext|>"]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (1, 4)
    assert completion.system_fingerprint == "fake-1"
    assert completion._request_id


def test_a_stream_is_read(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("é✓")))
    with sync_client(server) as client:
        chunks = list(
            client.completions.create(
                model=MODEL, prompt=["x", "y"], max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
        )
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["é✓", "é✓"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_a_stream_is_read_asynchronously(serve: Serve) -> None:
    async def scenario() -> str:
        async with async_client(serve(FakeEngineClient())) as client:
            stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(scenario()) == "abcab"


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}


def test_a_chat_is_read(serve: Serve) -> None:
    with sync_client(serve(FakeEngineClient(say("Hi!", then_eos=True)))) as client:
        completion = client.chat.completions.create(
            **CHAT, max_completion_tokens=9, logprobs=True, top_logprobs=1, seed=5, response_format={"type": "text"}
        )
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hi!", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [score.token for score in choice.logprobs.content] == ["H", "i", "!", "<|endoftext|>"]
    assert choice.logprobs.content[0].bytes == [72]
    assert choice.logprobs.content[0].top_logprobs[0].logprob == 0.0
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4
    assert completion.system_fingerprint == "fake-1"


def test_a_chat_stream_is_read(serve: Serve) -> None:
    with sync_client(serve(FakeEngineClient(say("é✓")))) as client:
        stream = client.chat.completions.create(
            **CHAT, n=2, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    roles = [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks[:-1]]
    assert [index for index, role in roles if role == "assistant"] == [0, 1]
    assert texts == ["é✓", "é✓"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_a_chat_is_read_asynchronously_both_ways(serve: Serve) -> None:
    async def scenario() -> list[str | None]:
        async with async_client(serve(FakeEngineClient())) as client:
            whole = await client.chat.completions.create(**CHAT, max_tokens=5)
            stream = await client.chat.completions.create(**CHAT, max_tokens=5, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [whole.choices[0].message.content, "".join(parts)]

    assert asyncio.run(scenario()) == ["abcab", "abcab"]


def test_the_helper_for_chat_streams_adds_them_up(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("Hi!", then_eos=True)))
    with sync_client(server) as client, client.chat.completions.stream(**CHAT) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == "Hi!"
    assert completion.choices[0].finish_reason == "stop"


def test_a_chat_refusal_is_a_typed_error(serve: Serve) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with sync_client(serve(FakeEngineClient())) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[image])  # type: ignore[list-item]
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")


def test_a_stream_is_cancelled_midway(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    with sync_client(serve(engine)) as client:
        with client.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True) as stream:
            engine.from_outside(engine.step)
            assert next(iter(stream)).choices[0].text == "a"
            assert engine.aborted == []
        engine.wait_for(lambda: len(engine.aborted) == 1)
    assert engine.live_ids == []


def test_a_stream_is_cancelled_midway_asynchronously(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)

    async def scenario() -> None:
        async with async_client(serve(engine)) as client:
            stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True)
            engine.from_outside(engine.step)
            async for chunk in stream:
                assert chunk.choices[0].text == "a"
                break
            assert engine.aborted == []
            await stream.close()
            await asyncio.to_thread(engine.wait_for, lambda: len(engine.aborted) == 1)

    asyncio.run(scenario())
    assert engine.live_ids == []


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("arguments", "error", "code", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"extra_body": {"max_token": 1}}, openai.BadRequestError, "unknown_parameter", "max_token"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
    ],
)
def test_a_refusal_is_a_typed_error(
    serve: Serve, arguments: dict[str, object], error: type[openai.APIStatusError], code: str, param: str
) -> None:
    with sync_client(serve(FakeEngineClient())) as client, pytest.raises(error) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "x", **arguments})  # type: ignore[call-overload]
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(serve: Serve) -> None:
    server = serve(FakeEngineClient(), api_keys=("another",))
    with sync_client(server) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_full_queue_is_a_rate_limit_error(serve: Serve) -> None:
    engine = FakeEngineClient()
    engine.max_requests = 0
    with sync_client(serve(engine)) as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=MODEL, prompt="x")
    assert caught.value.response.headers["retry-after"] == "7"


def test_an_error_amid_a_stream_is_raised(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    with sync_client(serve(engine)) as client:
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
        chunks = iter(stream)
        engine.from_outside(engine.step)
        assert next(chunks).choices[0].text == "a"
        engine.from_outside(engine.die)
        with pytest.raises(openai.APIError, match="the engine has died") as caught:
            next(chunks)
        stream.close()
    assert caught.value.code == "engine_unavailable"


TOOL: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>\n'


def test_calls_of_tools_are_read_streamed_and_sent_back(serve: Serve) -> None:
    engine = FakeEngineClient(say(CALL % 1 + CALL % 2, then_eos=True))
    template = "{{ messages | length }}{# tools <tool_call> #}"
    with sync_client(serve(engine, template=template)) as client:
        chat: dict[str, Any] = {**CHAT, "tools": [TOOL], "max_tokens": 200}
        message = client.chat.completions.parse(**chat).choices[0].message
        assert message.content is None
        assert [call.function.parsed_arguments for call in message.tool_calls or ()] == [{"a": 1}, {"a": 2}]
        with client.chat.completions.stream(**chat) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        calls = final.message.tool_calls or []
        assert [call.function.name for call in calls] == ["f", "f"]
        assert [call.function.arguments for call in calls] == ['{"a": 1}', '{"a": 2}']
        done = [event.index for event in events if event.type == "tool_calls.function.arguments.done"]
        assert done == [0, 1]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
        again: Any = [*MESSAGES, final.message.to_dict(), *results]
        assert client.chat.completions.create(**{**chat, "messages": again, "max_tokens": 9}).choices
