"""openai's responses: whole, streamed, with its helpers, and resumed through dead engines and a killed server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environments import Environment
from tests.clients.servers import post, served
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.serving import LIMIT_S, MORTAL, Process

CLIENT = "openai"
pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
ASKED = {"model": "tiny", "input": "The cat sat on the mat", "max_output_tokens": 40, "temperature": 0}


def ask(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked, instructions="Be brief", metadata={"a": "b"})
        events = list(client.responses.create(**asked, instructions="Be brief", stream=True))
        with client.responses.stream(**asked, instructions="Be brief") as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        with client.responses.stream(response_id=whole.id) as stream:
            again = [event.sequence_number for event in stream]
        second = client.responses.create(**{**asked, "input": "and then?"}, previous_response_id=whole.id)
        back = [{"role": "user", "content": asked["input"]}, *whole.output, {"role": "user", "content": "and then?"}]
        stateless = client.responses.create(**{**asked, "input": back}, store=False)
        retrieved = client.responses.retrieve(whole.id, include=["reasoning.encrypted_content"])
        items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))
        begun = client.responses.create(**asked, background=True)
        cancelled = client.responses.cancel(begun.id)
        client.responses.delete(whole.id)
        try:
            client.responses.retrieve(whole.id)
        except openai.NotFoundError as error:
            gone = error.code
    return {
        "whole": whole.output_text,
        "metadata": whole.metadata,
        "same": retrieved.output_text == whole.output_text and retrieved.usage == whole.usage,
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "numbers": [event.sequence_number for event in events],
        "last": events[-1].response.output_text,
        "helper": "".join(deltas),
        "again": again,
        "second": second.output_text,
        "stateless": stateless.output_text,
        "items": [[item.role, item.content[0].text] for item in items],
        "distinct": len({item.id for item in items}),
        "ended": cancelled.status in ("cancelled", "incomplete", "completed"),
        "gone": gone,
    }


def test_responses_whole_streamed_continued_and_deleted(client: Environment, chats: str) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": ASKED["input"]}]
    chat = {"model": "tiny", "max_tokens": 40, "temperature": 0}
    first = post(chats, "chat/completions", **chat, messages=messages)["choices"][0]["message"]["content"]
    messages = [*messages[1:], {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    second = post(chats, "chat/completions", **chat, messages=messages)["choices"][0]["message"]["content"]

    found = client.call(ask, chats, ASKED)

    assert [found[name] for name in ("whole", "streamed", "last", "helper")] == [first] * 4
    assert found["numbers"] == found["again"] == list(range(len(found["numbers"])))
    assert (found["second"], found["stateless"]) == (second, second)
    assert found["items"] == [["user", ASKED["input"]], ["assistant", first], ["user", "and then?"]]
    assert found["distinct"] == 3
    assert (found["metadata"], found["gone"]) == ({"a": "b"}, "completion_not_found")
    assert found["same"]
    assert found["ended"]


def parse(url: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    import openai
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        alive: bool

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        parsed = client.responses.parse(**asked, text_format=Person).output_parsed
        with client.responses.stream(**asked, text_format=Person) as stream:
            streamed = stream.get_final_response().output_parsed
    return [parsed.model_dump(), streamed.model_dump()]


def test_an_answer_is_parsed(client: Environment) -> None:
    with served("--chat-template", "plain") as url:
        parsed, streamed = client.call(parse, url, {**ASKED, "model": "storyteller", "max_output_tokens": 200})

    assert parsed == streamed
    assert set(parsed) == {"name", "alive"}


def call(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    import openai
    import pydantic

    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=8)

    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        forced = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        first = client.responses.parse(**forced)
        with client.responses.stream(**forced) as stream:
            pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            streamed = stream.get_final_response()
        [made] = first.output
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "Rain"}
        second = client.responses.create(**{**asked, "input": [result]}, previous_response_id=first.id)
        back = [{"role": "user", "content": asked["input"]}, made, result]
        stateless = client.responses.create(**{**asked, "input": back})
    return {
        "types": [item.type for item in streamed.output],
        "names": [made.name, streamed.output[0].name],
        "city": made.parsed_arguments.city,
        "arguments": [made.arguments, streamed.output[0].arguments, "".join(pieces)],
        "second": second.output_text,
        "stateless": stateless.output_text,
    }


def test_functions_are_called_and_their_results_come_back(client: Environment, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# tools <tool_call> #}")
    with served("--chat-template", str(template)) as url:
        found = client.call(call, url, {**ASKED, "model": "storyteller", "max_output_tokens": 200})

    assert (found["types"], found["names"]) == (["function_call"], ["get_weather"] * 2)
    assert found["arguments"] == [found["arguments"][0]] * 3
    assert json.loads(found["arguments"][0]) == {"city": found["city"]}
    assert found["second"] == found["stateless"] != ""


def follow(url: str, asked: dict[str, Any], response_id: str, after: int, number: int) -> list[list[Any]]:
    """Begin a response in the background, or go on with one; return number, type, text and id of up to `number` events.

    What ends the connection ends the list.
    """
    import openai

    found = []
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        if response_id:
            stream = client.responses.retrieve(response_id, stream=True, starting_after=after)
        else:
            stream = client.responses.create(**asked, background=True, stream=True)
        for event in stream:
            id_of_response = event.response.id if hasattr(event, "response") else ""
            found.append([event.sequence_number, event.type, getattr(event, "delta", ""), id_of_response])
            if len(found) == number:
                break
        stream.close()
    return found


def test_a_stream_is_resumed_after_the_death_of_the_engine_and_of_the_server(
    client: Environment, tmp_path: Path
) -> None:
    gate = EngineGate(tmp_path)
    flags = ("--chat-template", "plain", "--state-dir", str(tmp_path / "state"))
    extra = {"extra_body": {"seed": 3, "ignore_eos": True}}
    asked = {"model": "storyteller", "input": "Tell me a story.", "max_output_tokens": 60, **extra}
    gate.shut(after_steps=20)
    process = Process(*flags, main=MORTAL, **{VARIABLE: str(tmp_path)})
    try:
        with process.wait_until_ready() as http:
            url = f"{str(http.base_url).rstrip('/')}/v1"
            events = client.call(follow, url, asked, "", 0, 15)
            response_id = events[0][3]
            process.engine().send_signal(signal.SIGKILL)
            process.wait_for_line("the engine is ready again")
            events += client.call(follow, url, asked, response_id, events[-1][0], 15)
            os.killpg(process.popen.pid, signal.SIGKILL)
    finally:
        process.kill()

    gate.open()
    process = Process(*flags, main=MORTAL, **{VARIABLE: str(tmp_path)})
    try:
        with process.wait_until_ready() as http:
            url = f"{str(http.base_url).rstrip('/')}/v1"
            events += client.call(follow, url, asked, response_id, events[-1][0], 10**6)
            whole = httpx.get(f"{url}/responses/{response_id}", timeout=LIMIT_S).json()
        process.popen.terminate()
        assert process.wait()[0] == 0
    finally:
        process.kill()
    assert [number for number, *_ in events] == list(range(len(events)))
    assert "".join(delta for _, _, delta, _ in events) == whole["output"][0]["content"][0]["text"]
    assert (events[0][1], events[-1][1], whole["usage"]["output_tokens"]) == (
        "response.created",
        "response.incomplete",
        60,
    )
