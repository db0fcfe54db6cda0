"""Functions in the Responses API over a FakeEngineClient: calls as items and events, their results, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptserve.server.schemas.responses import ResponseObject
from gptserve.server.text.calls import call_id
from gptserve.server.tools.dialect import NO_TOOLS
from tests.server.api.test_responses import Serve, get, post, prompt_of, read, respond
from tests.server.api.test_tools import ANSWERS, OSLO, PLACE, TEMPLATES, api_of, engine_of, tokenizer_of
from tests.server.api.test_tools import TOOLS as OF_CHAT
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import FakeEngineClient
from tests.server.pydantic_says import NO_BOOLEAN, NO_STRING

MakeApi = Callable[..., Api]
WEATHER = {"type": "function", "name": "get_weather", "description": "W", "parameters": PLACE}
TOOLS = [WEATHER, {"type": "function", "name": "get_time"}]
ASKED = {"type": "message", "role": "user", "content": "hi"}
CUT = OSLO.partition("o 🏔")[0]
NAMED = {"type": "function", "name": "get_time"}


def serve_kind(serve: Serve, kind: str, answer: str | None = None, **options: Any) -> LiveServer:
    engine = engine_of(kind, ANSWERS[kind] if answer is None else answer)
    return serve(engine, tokenizer=tokenizer_of(kind), template=TEMPLATES[kind], **options)


def call_item(response_id: str, place: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"fc_{response_id.removeprefix('resp_')}_{place}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id(response_id, 0, index),
        "name": name,
        "arguments": arguments,
    }


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["hermes", "harmony"])
def test_calls_are_items_with_events_that_every_reader_gets(serve: Serve, kind: str) -> None:
    server = serve_kind(serve, kind)
    events = read(post(server, tools=TOOLS, stream=True))
    answer = events[-1]["response"]

    ResponseObject.model_validate(answer, strict=True, extra="forbid")
    assert (events[-1]["type"], answer["status"]) == ("response.completed", "completed")
    *before, first, second = answer["output"]
    assert [item["type"] for item in before] == (["reasoning"] if kind == "harmony" else []) + ["message"]
    place = len(before)
    assert first == call_item(answer["id"], place, 0, "get_weather", OSLO)
    assert second == call_item(answer["id"], place + 1, 1, "get_time", "{}")
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == answer["output"]

    of_call = [event for event in events if event.get("output_index") == place]
    added, *deltas, arguments_done, item_done = of_call
    assert len(deltas) > 5
    assert added["type"] == "response.output_item.added"
    assert added["item"] == {**first, "status": "in_progress", "arguments": ""}
    assert {delta["type"] for delta in deltas} == {"response.function_call_arguments.delta"}
    assert "".join(delta["delta"] for delta in deltas) == OSLO
    assert arguments_done == {
        "type": "response.function_call_arguments.done",
        "sequence_number": arguments_done["sequence_number"],
        "output_index": place,
        "item_id": first["id"],
        "name": "get_weather",
        "arguments": OSLO,
    }
    assert (item_done["type"], item_done["item"]) == ("response.output_item.done", first)
    assert {event["item_id"] for event in (*deltas, arguments_done)} == {first["id"]}

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert get(server, answer["id"]).json() == answer
    for last in range(len(events)):
        assert read(get(server, answer["id"], stream="true", starting_after=last)) == events[last + 1 :]
    plain = post(server, tools=TOOLS, store=False).json()["output"]
    assert [(item["type"], item.get("arguments")) for item in plain] == [
        (item["type"], item.get("arguments")) for item in answer["output"]
    ]


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [('{"a": "<tool_call>"}', ["message"]), (ANSWERS["hermes"].removeprefix("Hm."), ["function_call"] * 2)],
)
def test_beside_functions_a_text_keeps_to_its_format(serve: Serve, answer: str, kinds: list[str]) -> None:
    server = serve_kind(serve, "hermes", answer)
    made = post(server, tools=TOOLS, text={"format": {"type": "json_object"}}).json()
    assert [item["type"] for item in made["output"]] == kinds
    if kinds == ["message"]:
        assert made["output"][0]["content"][0]["text"] == answer
    grammar = server.engine.submitted[0].params.grammar
    assert grammar is not None
    assert (grammar.kind, "get_time" in grammar.frame) == ("json", True)


def test_text_that_follows_a_call_is_a_message_after_it(serve: Serve) -> None:
    server = serve_kind(serve, "hermes", '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>Bye')
    answer = read(post(server, tools=TOOLS, stream=True, tool_choice="auto"))[-1]["response"]

    call, message = answer["output"]
    assert call == call_item(answer["id"], 0, 0, "get_time", "{}")
    assert message["content"][0]["text"] == "Bye"
    post(server, input="And?", previous_response_id=answer["id"], max_output_tokens=1)
    function = {"name": "get_time", "arguments": {}}
    call_of_chat = {"id": call["call_id"], "type": "function", "function": function}
    said = {"role": "assistant", "content": "Bye", "tool_calls": [call_of_chat]}
    assert conversation_of(server) == [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "And?"}]


def conversation_of(server: LiveServer) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.JSONDecoder().raw_decode(prompt_of(server))[0]
    return messages


def test_calls_come_back_with_their_results(serve: Serve) -> None:
    server = serve_kind(serve, "thinking")
    answer = post(server, tools=TOOLS).json()
    ids = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    parts = [{"type": "input_text", "text": text} for text in ("Rain", "and wind")]
    results = [
        {"type": "function_call_output", "id": "fco_1", "status": "completed", "call_id": ids[0], "output": parts},
        {"type": "function_call_output", "call_id": ids[1], "output": "Noon"},
    ]
    again = post(server, input=results, previous_response_id=answer["id"], tools=TOOLS).json()
    functions = [{"name": "get_weather", "arguments": json.loads(OSLO)}, {"name": "get_time", "arguments": {}}]
    calls = [
        {"id": made, "type": "function", "function": function} for made, function in zip(ids, functions, strict=True)
    ]
    expected = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls, "reasoning_content": "So."},
        {"role": "tool", "content": "Rain\nand wind", "tool_call_id": ids[0]},
        {"role": "tool", "content": "Noon", "tool_call_id": ids[1]},
    ]
    expected[1]["thinking"] = "So."
    assert conversation_of(server) == expected
    shown = prompt_of(server)
    assert shown.endswith(json.dumps(OF_CHAT) + "<|endoftext|>"), "in the shape of chats"

    post(server, input=[ASKED, *answer["output"], *results], tools=TOOLS, store=False)
    assert prompt_of(server) == shown
    post(server, input="Thanks", previous_response_id=again["id"], max_output_tokens=1)
    assert [message["role"] for message in conversation_of(server)][-3:] == ["tool", "assistant", "user"]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
    ],
)
def test_what_is_asked_of_the_tools_is_as_in_a_chat_and_comes_back(make_api: MakeApi, asked: dict[str, Any]) -> None:
    api = api_of(make_api, "hermes")
    answer = respond(api, tools=TOOLS, **asked).json()
    named = {"tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    api.chat("hi", tools=OF_CHAT, **(named if asked.get("tool_choice") == NAMED else asked))
    response, chat = api.engine.submitted

    assert response.prompt_token_ids == chat.prompt_token_ids
    assert response.params.grammar == chat.params.grammar
    assert (chat.params.grammar is None) == (asked in ({}, {"tool_choice": "none"}))
    assert answer["tool_choice"] == asked.get("tool_choice", "auto")
    assert answer["parallel_tool_calls"] == asked.get("parallel_tool_calls", True)
    lacking = {"description": None, "parameters": None, "strict": None}
    assert answer["tools"] == [{**lacking, **tool} for tool in TOOLS]


def test_a_restarted_server_goes_on_with_the_same_grammar_and_ids(serve: Serve, tmp_path: Path) -> None:
    options = {"tokenizer": tokenizer_of("hermes"), "template": TEMPLATES["hermes"], "state_dir": tmp_path}
    first = LiveServer(FakeEngineClient(auto=False, info=engine_of("hermes", "").info), **options)
    with first.running():
        begun = post(first, background=True, tools=TOOLS, tool_choice=NAMED).json()
    [before] = first.engine.submitted
    second = serve_kind(serve, "hermes", ANSWERS["hermes"].partition("Hm.")[2], state_dir=tmp_path)
    events = read(get(second, begun["id"], stream="true"))

    [after] = second.engine.submitted
    assert before.params.grammar is not None
    assert (after.params.grammar, after.prompt_token_ids) == (before.params.grammar, before.prompt_token_ids)
    answer = events[-1]["response"]
    assert answer["output"][0] == call_item(begun["id"], 0, 0, "get_weather", OSLO)
    assert (answer["tools"], answer["tool_choice"]) == (begun["tools"], NAMED)


def test_a_call_that_is_cut_is_incomplete_and_can_be_continued(serve: Serve) -> None:
    server = serve_kind(serve, "hermes")
    *_, item_done, last = read(post(server, tools=TOOLS, stream=True, max_output_tokens=70))
    answer = last["response"]

    assert (last["type"], item_done["item"]) == ("response.incomplete", answer["output"][-1])
    call = answer["output"][-1]
    assert (call["status"], call["name"], call["arguments"]) == ("incomplete", "get_weather", CUT)
    assert post(server, input="And?", previous_response_id=answer["id"], max_output_tokens=1).status_code == 200
    [_, said, _] = conversation_of(server)
    assert [made["function"]["arguments"] for made in said["tool_calls"]] == [json.loads(CUT + '"}')]
    sent = [ASKED, *answer["output"], {"role": "user", "content": "And?"}]
    again = post(server, input=sent, max_output_tokens=1).json()
    assert conversation_of(server)[1] == said
    listed = get(server, f"{again['id']}/input_items", order="asc").json()["data"]
    assert [item["arguments"] for item in listed if item["type"] == "function_call"] == [CUT]


def of_call(**fields: Any) -> dict[str, Any]:
    given = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", **fields}
    return {"input": [ASKED, {name: value for name, value in given.items() if value is not None}]}


def of_result(**fields: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call_output", **fields}]}


CHOICES = 'input should be "none", "auto", "required" or {"type": "function", "name": …}'
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tools": {}}, "invalid_type", "tools", "tools: input should be an array, got {}"),
    ({"tools": ["f"]}, "invalid_type", "tools", "tools[0]: input should be an object, got 'f'"),
    ({"tools": [{"name": "f"}]}, "missing_required_parameter", "tools[0].type", "tools[0].type is required"),
    ({"tools": OF_CHAT}, "missing_required_parameter", "tools[0].name", "tools[0].name is required"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "invalid_value", "tools",
     "tools[0].name: string should match pattern '^[a-zA-Z0-9_.-]{1,128}$', got 'a b'"),
    ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "invalid_value", "tools",
     "tools[0].parameters.type must be \"object\", got 'array'"),
    ({"tools": [WEATHER] * 1025}, "invalid_value", "tools", "tools may have at most 1024 entries, got 1025"),
    ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools",
     "tools[1].name must differ from the others, got 'get_weather' twice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "invalid_value", "tool_choice", f"tool_choice: {CHOICES}, got 'any'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.name",
     "tool_choice.name is required"),
    ({"tools": TOOLS, "tool_choice": {**NAMED, "name": "g"}}, "invalid_value", "tool_choice",
     "tool_choice.name must be that of a tool, got 'g'"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice", "tool_choice must be none or auto without tools"),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls",
     f"parallel_tool_calls: {NO_BOOLEAN}, got 1"),
    (of_call(call_id=None), "missing_required_parameter", "input[1].call_id", "input[1].call_id is required"),
    (of_call(name=None), "missing_required_parameter", "input[1].name", "input[1].name is required"),
    (of_call(arguments={}), "invalid_type", "input", f"input[1].arguments: {NO_STRING}, got {{}}"),
    (of_result(output="x"), "missing_required_parameter", "input[0].call_id", "input[0].call_id is required"),
    (of_result(call_id="a"), "missing_required_parameter", "input[0].output", "input[0].output is required"),
    (of_result(call_id="a", output=3), "invalid_type", "input",
     "input[0].output: input should be a string or a list of parts, got 3"),
    (of_result(call_id="a", output=[{"type": "input_text"}]), "missing_required_parameter", "input[0].output[0].text",
     "input[0].output[0].text is required"),
    (of_result(call_id="a", output=[{"type": "input_image"}]), "unsupported_parameter", "input[0].output[0]",
     "input[0].output[0]: a part of the type 'input_image' is not supported by this server"),
]  # fmt: skip


@pytest.mark.some(6)
@pytest.mark.parametrize(("body", "code", "param", "message"), REFUSED)
def test_what_is_wrong_with_tools_is_refused_in_words(
    make_api: MakeApi, body: dict[str, Any], code: str, param: str, message: str
) -> None:
    api = api_of(make_api, "hermes")
    refused = respond(api, **body)
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert (refused.status_code, refused.json()) == (400, {"error": error})
    assert api.engine.submitted == []


def test_a_model_that_cannot_call_tools_says_so(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template="{{ messages }}")
    error = respond(api, tools=TOOLS).json()["error"]
    assert (error["message"], error["param"], error["code"]) == (NO_TOOLS, "tools", "unsupported_parameter")
