"""openai for Python: sync, async, its helpers, messages fed back, the class of each error, and a batch."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.clients.environments import Environment
from tests.clients.servers import post, text_of, until_stopped
from tests.server.serving import LIMIT_S

CLIENT = "openai"
pytestmark = pytest.mark.clients
TEXT = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0.8, "seed": 1}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat on the mat"}]
CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0, "seed": 1}


def ask(url: str, text: dict[str, Any] | None, chat: dict[str, Any] | None) -> dict[str, Any]:
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        if text:
            whole = client.completions.create(**text)
            chunks = list(client.completions.create(**text, stream=True, stream_options={"include_usage": True}))
            parts = [chunk.choices[0].text for chunk in chunks[:-1]]
            answer = whole.choices[0].text
        else:
            whole = client.chat.completions.create(**chat)
            chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
            parts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
            answer = whole.choices[0].message.content
        models = [model.id for model in client.models.list()]
        assert client.models.retrieve(models[0]).id == models[0]
        raw = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine"})
    return {
        "whole": answer,
        "streamed": "".join(parts),
        "usage": whole.usage.completion_tokens,
        "usage streamed": chunks[-1].usage.completion_tokens,
        "finish reason": whole.choices[0].finish_reason,
        "finish reason streamed": chunks[-2].choices[0].finish_reason,
        "models": models,
        "request id": raw.headers["x-request-id"],
    }


def test_texts_whole_and_streamed(client: Environment, stories: str) -> None:
    text, found = text_of(stories, **TEXT), client.call(ask, stories, TEXT, None)

    assert (found["whole"], found["streamed"]) == (text, text)
    assert (found["usage"], found["usage streamed"]) == (20, 20)
    assert (found["finish reason"], found["finish reason streamed"]) == ("length", "length")
    assert (found["models"], found["request id"]) == (["storyteller"], "mine")


def test_chats_whole_and_streamed(client: Environment, chats: str) -> None:
    text, found = text_of(chats, **CHAT), client.call(ask, chats, None, CHAT)

    assert (found["whole"], found["streamed"]) == (text, text)
    assert found["usage"] == found["usage streamed"]
    assert found["finish reason"] == found["finish reason streamed"]


def ask_at_once(url: str, text: dict[str, Any], number: int) -> list[list[str]]:
    import asyncio

    import openai

    async def one(client: openai.AsyncOpenAI, seed: int) -> list[str]:
        whole = await client.completions.create(**{**text, "seed": seed})
        stream = await client.completions.create(**{**text, "seed": seed}, stream=True)
        return [whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])]

    async def all_of_them() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(number)))

    return asyncio.run(all_of_them())


def test_many_at_once(client: Environment, stories: str) -> None:
    texts = [text_of(stories, **{**TEXT, "seed": seed}) for seed in range(8)]

    assert client.call(ask_at_once, stories, TEXT, 8) == [[text, text] for text in texts]
    assert len(set(texts)) == 8


def use_helper(url: str, chat: dict[str, Any]) -> dict[str, Any]:
    import asyncio

    import openai

    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.chat.completions.stream(**chat, stream_options={"include_usage": True}) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion()

    async def in_async() -> str | None:
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            client.chat.completions.stream(**chat) as stream,
        ):
            return (await stream.get_final_completion()).choices[0].message.content

    return {
        "deltas": "".join(event.delta for event in events if event.type == "content.delta"),
        "done": [event.content for event in events if event.type == "content.done"],
        "final": final.choices[0].message.content,
        "usage": final.usage.completion_tokens,
        "async": asyncio.run(in_async()),
    }


def test_the_helper_for_streams(client: Environment, chats: str) -> None:
    fields = until_stopped(chats, **CHAT)
    answer = post(chats, "chat/completions", **fields)
    text = answer["choices"][0]["message"]["content"]

    found = client.call(use_helper, chats, fields)

    assert found["usage"] == answer["usage"]["completion_tokens"]
    assert [found["deltas"], *found["done"], found["final"], found["async"]] == [text] * 4


def feed_back(url: str, chat: dict[str, Any], how: str) -> list[str | None]:
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        if how == "helper":
            with client.chat.completions.stream(**chat) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**chat).choices[0].message
        again = {"role": "user", "content": "and then?"}
        messages = [*chat["messages"], message.model_dump() if how == "dumped" else message, again]
        second = client.chat.completions.create(**{**chat, "messages": messages})
    return [message.content, second.choices[0].message.content]


@pytest.mark.parametrize("how", ["object", "dumped", "helper"])
def test_an_answer_is_fed_back(client: Environment, chats: str, how: str) -> None:
    fields = until_stopped(chats, **CHAT)
    first = text_of(chats, **fields)
    asked = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]

    assert client.call(feed_back, chats, fields, how) == [first, text_of(chats, **{**fields, "messages": asked})]


def parse_beside_tools(url: str, bias: dict[str, int]) -> dict[str, Any]:
    import openai
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        city: str = Field(max_length=8)

    class Forecast(BaseModel):
        rain: bool
        days: int = Field(ge=0, le=99)

    asked = {
        "model": "storyteller",
        "messages": [{"role": "user", "content": "Is it raining in Oslo?"}],
        "tools": [openai.pydantic_function_tool(Weather, name="get_weather")],
        "response_format": Forecast,
        "max_tokens": 200,
        "logit_bias": bias,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.chat.completions.parse(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    found = {}
    for name, choice in (("whole", whole), ("streamed", streamed)):
        calls = [call.function.parsed_arguments.model_dump() for call in choice.message.tool_calls or []]
        parsed = choice.message.parsed
        found[name] = [choice.finish_reason, None if parsed is None else parsed.model_dump(), calls]
    return found


@pytest.mark.parametrize("begin", ["<", "{"])
def test_an_answer_beside_tools_is_parsed_calls_or_a_parsed_text(client: Environment, tools: str, begin: str) -> None:
    """The bias is towards the beginning of a call, or of the text: the model alone would choose at random."""
    ids = httpx.post(f"{tools.removesuffix('/v1')}/tokenize", json={"prompt": begin}, timeout=LIMIT_S).json()["tokens"]

    found = client.call(parse_beside_tools, tools, {str(ids[-1]): 30})

    assert found["whole"] == found["streamed"]
    reason, parsed, calls = found["whole"]
    if begin == "<":
        assert (reason, parsed, {tuple(call) for call in calls}) == ("tool_calls", None, {("city",)})
    else:
        assert (reason, set(parsed), calls) == ("stop", {"rain", "days"}, [])


def errors_of(url: str, cases: list[Any], retries: int = 0) -> list[dict[str, Any]]:
    import openai

    sent: list[str] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: sent.append(str(request.url))]})
    found = []
    for fields, options in cases:
        sent.clear()
        defaults = {"base_url": url, "api_key": "secret", "max_retries": retries, "http_client": http}
        client = openai.OpenAI(**{**defaults, **options})
        try:
            client.completions.create(**{"model": "tiny", "prompt": "The cat", "max_tokens": 5, **fields})
            found.append({"class": "none"})
        except openai.APIStatusError as error:
            headers = {name: error.response.headers.get(name) for name in ("retry-after", "x-request-id")}
            fields = {"status": error.status_code, "code": error.code, "param": error.param, "message": error.message}
            found.append({"class": type(error).__name__, "sent": len(sent), **fields, **headers})
        except openai.APIError as error:
            found.append({"class": type(error).__name__})
    return found


def essence(error: dict[str, Any]) -> tuple[Any, ...]:
    return error["class"], error["status"], error["code"], error["param"]


def test_each_error_has_its_class(client: Environment, strict: str) -> None:
    cases = [
        [{}, {"api_key": "wrong"}],
        [{"temperature": 9}, {}],
        [{"max_tokens": 10**6}, {}],
        [{"model": "gpt-9"}, {}],
        [{"prompt": "x" * 6000}, {}],
    ]
    found = client.call(errors_of, strict, cases)

    assert [essence(error) for error in found] == [
        ("AuthenticationError", 401, "invalid_api_key", None),
        ("BadRequestError", 400, "invalid_value", "temperature"),
        ("BadRequestError", 400, "context_length_exceeded", "max_tokens"),
        ("NotFoundError", 404, "model_not_found", "model"),
        ("APIStatusError", 413, "body_too_large", None),
    ]
    assert all(error["message"] and error["x-request-id"] for error in found)


def test_a_full_server_is_a_rate_limit(client: Environment, full: str) -> None:
    [found] = client.call(errors_of, full, [[{}, {}]])

    assert essence(found) == ("RateLimitError", 429, "queue_full", None)
    assert float(found["retry-after"]) > 0


KEY = {"extra_headers": {"idempotency-key": "once"}}


def test_a_key_that_was_used_is_a_conflict(client: Environment, chats: str) -> None:
    first, second = client.call(errors_of, chats, [[KEY, {}], [{**KEY, "max_tokens": 6}, {}]])

    assert first == {"class": "none"}
    assert essence(second)[:3] == ("ConflictError", 409, "idempotency_key_reused")


def test_a_conflict_is_not_sent_again(client: Environment, chats: str) -> None:
    _, second = client.call(errors_of, chats, [[KEY, {}], [{**KEY, "max_tokens": 7}, {}]], 2)

    assert (second["class"], second["sent"]) == ("ConflictError", 1)


def test_no_server_and_no_patience(client: Environment, stories: str) -> None:
    nowhere, at_once = client.call(
        errors_of,
        stories,
        [[{}, {"base_url": "http://127.0.0.1:1/v1"}], [{**TEXT, "max_tokens": 900}, {"timeout": 0.001}]],
    )

    assert (nowhere["class"], at_once["class"]) == ("APIConnectionError", "APITimeoutError")


def run_batch(url: str, lines: list[Any]) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="secret", max_retries=0)
    data = "\n".join(json.dumps(line) for line in lines)
    file = client.files.create(file=("in.jsonl", data.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=lines[0]["url"], completion_window="24h")
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    output = client.files.content(batch.output_file_id).text
    return {
        "texts": [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in output.splitlines()],
        "counts": [batch.request_counts.total, batch.request_counts.completed],
        "are_listed": {file.id, batch.output_file_id, batch.id}
        <= {one.id for listed in (client.files.list(), client.batches.list()) for one in listed},
        "deleted": client.files.delete(file.id).deleted,
    }


def test_a_batch(client: Environment, stories: str) -> None:
    bodies = [{**TEXT, "seed": seed} for seed in range(3)]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)
    ]
    found = client.call(run_batch, stories, lines)

    texts = [text_of(stories, **body) for body in bodies]
    assert found == {"texts": texts, "counts": [3, 3], "are_listed": True, "deleted": True}
