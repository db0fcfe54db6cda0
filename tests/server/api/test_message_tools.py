"""Tools and thinking on /v1/messages over a FakeEngineClient: blocks, events, loops, and what is refused."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gptserve.server.schemas.messages import MessageObject
from gptserve.server.text.calls import call_id
from gptserve.server.tools.dialect import NO_TOOLS
from tests.server.api.test_messages import USER, error_of, events_of, invalid, joined, prompt_of, saying
from tests.server.api.test_messages import post as post_message
from tests.server.api.test_tools import ANSWERS, OSLO, PLACE, TEMPLATES, engine_of, tokenizer_of
from tests.server.conftest import Api
from tests.server.fake_engine import ByteTokenizer

MakeApi = Callable[..., Api]
WEATHER = {"name": "get_weather", "description": "W", "input_schema": PLACE}
TIME = {"type": "custom", "name": "get_time", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, TIME]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def post(api: Api, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return post_message(api, path, **{"max_tokens": 400, **body})


def answer_of(api: Api, **body: Any) -> dict[str, Any]:
    response = post(api, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    MessageObject.model_validate(answer, strict=True, extra="forbid")
    return answer


def stream_of(api: Api, **body: Any) -> list[dict[str, Any]]:
    return events_of(post(api, **body, stream=True).text)


def api_for(make_api: MakeApi, kind: str, answer: str | None = None, **options: Any) -> Api:
    engine = engine_of(kind, ANSWERS[kind] if answer is None else answer)
    return make_api(engine, tokenizer=tokenizer_of(kind), template=TEMPLATES[kind], **options)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_calls_are_blocks_and_the_events_make_the_same(make_api: MakeApi, kind: str) -> None:
    api = api_for(make_api, kind)
    answer = answer_of(api, tools=TOOLS, seed=1)
    assert answer["stop_reason"] == "tool_use"
    first, second = (block for block in answer["content"] if block["type"] == "tool_use")
    assert first == {
        "type": "tool_use",
        "id": call_id(answer["id"], 0, 0),
        "name": "get_weather",
        "input": json.loads(OSLO),
    }
    assert second == {"type": "tool_use", "id": call_id(answer["id"], 0, 1), "name": "get_time", "input": {}}
    streamed = joined(stream_of(api, tools=TOOLS, seed=1))
    for message in (answer, streamed):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == answer


def test_the_events_of_thinking_a_text_and_a_call(make_api: MakeApi) -> None:
    text = '<think>So.</think>A<tool_call>{"name": "get_time", "arguments": {"a": 1}}</tool_call>'
    events = stream_of(api_for(make_api, "thinking", text), tools=TOOLS)
    called = joined(events)["content"][2]
    merged: list[dict[str, Any]] = []
    for event in events[1:-2]:
        if merged and event["type"] == "content_block_delta" == merged[-1]["type"]:
            (_, kind), (name, added) = event["delta"].items()
            if kind == merged[-1]["delta"]["type"]:
                merged[-1]["delta"][name] += added
                continue
        merged.append(event)
    thinking, said = {"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}
    call = {"type": "tool_use", "id": called["id"], "name": "get_time", "input": {}}
    assert merged == [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "So."}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "unsigned"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": said},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "A"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": call},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
        {"type": "content_block_stop", "index": 2},
    ]
    told = events[-2]
    assert told["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert 0 < told["usage"]["output_tokens_details"]["thinking_tokens"] < told["usage"]["output_tokens"]


def conversation_of(api: Api) -> list[dict[str, Any]]:
    """Return the messages that the template saw; it writes them as JSON."""
    messages: list[dict[str, Any]] = json.JSONDecoder().raw_decode(prompt_of(api))[0]
    return messages


@pytest.mark.some(2)
@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_a_loop_of_tools_goes_on_with_what_was_thought_and_called(make_api: MakeApi, display: str | None) -> None:
    api = api_for(make_api, "thinking")
    thinking = {"type": "adaptive", "display": display}
    asked = {"tools": TOOLS, "thinking": thinking}
    answer, streamed = answer_of(api, **asked), joined(stream_of(api, **asked))
    thought = answer["content"][0]
    is_omitted = display == "omitted"
    signature = b64encode(b"So.").decode() if is_omitted else "unsigned"
    expected = {"type": "thinking", "thinking": "" if is_omitted else "So.", "signature": signature}
    assert thought == streamed["content"][0] == expected
    ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "text", "text": "And now?"},  # results come before it: they belong to the calls
        {
            "type": "tool_result",
            "tool_use_id": ids[0],
            "content": [{"type": "text", "text": t} for t in ("Rain", "wind")],
        },
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no clock", "is_error": True},
    ]
    history = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    answer_of(api, messages=history, tools=TOOLS)
    functions = [{"name": "get_weather", "arguments": json.loads(OSLO)}, {"name": "get_time", "arguments": {}}]
    calls = [{"id": i, "type": "function", "function": of} for i, of in zip(ids, functions, strict=True)]
    said = conversation_of(api)
    reasoning = said[1].pop("reasoning_content")
    said[1].pop("thinking", None)
    assert reasoning == "So."
    assert said == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "Rain\nwind", "tool_call_id": ids[0]},
        {"role": "tool", "content": "Error:\nno clock", "tool_call_id": ids[1]},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize("signature", [None, "unsigned", "EqQBCkYIARgC", "!", "//8="])
def test_thinking_that_cannot_be_read_is_none(make_api: MakeApi, signature: str | None) -> None:
    api = api_for(make_api, "thinking")
    block = {"type": "thinking", "thinking": "", **({} if signature is None else {"signature": signature})}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    content = [block, redacted, {"type": "text", "text": "a"}]
    response = post(api, messages=[USER, {"role": "assistant", "content": content}, USER], tools=TOOLS)
    assert response.headers["x-gptserve-ignored"] == "messages.content.redacted_thinking"
    assert "reasoning_content" not in conversation_of(api)[1]


def test_a_result_may_have_nothing_or_name_tools(make_api: MakeApi) -> None:
    api = api_for(make_api, "thinking")
    calls = [{"type": "tool_use", "id": i, "name": "get_time", "input": {}, "caller": {"type": "direct"}} for i in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "tool_reference", "tool_name": "get_time"}]},
    ]
    messages = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    response = post(
        api, messages=messages, tools=[{**TIME, "defer_loading": True, "cache_control": {"type": "ephemeral"}}]
    )
    assert (response.status_code, "x-gptserve-ignored" in response.headers) == (200, False), response.text
    assert [message["content"] for message in conversation_of(api)[2:]] == ["", "get_time"]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("choice", "must_call", "is_single"),
    [
        (None, False, False),
        ({"type": "auto"}, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, True),
        ({"type": "any"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "get_time"}, True, True),
    ],
)
def test_the_choice_of_a_tool_is_that_of_a_chat(
    make_api: MakeApi, choice: Any, *, must_call: bool, is_single: bool
) -> None:
    api = api_for(make_api, "hermes")
    assert post(api, tools=TOOLS, tool_choice=choice).status_code == 200
    of_chat: dict[str, Any] = {"parallel_tool_calls": not is_single}
    if must_call:
        named = {"type": "function", "function": {"name": "get_time"}}
        of_chat["tool_choice"] = named if choice["type"] == "tool" else "required"
    functions = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS
    ]
    assert api.chat(tools=functions, **of_chat).status_code == 200
    ours, theirs = (request.params.grammar for request in api.engine.submitted)
    assert ours == theirs
    assert (ours is not None) == (must_call or is_single)


def test_tools_that_may_not_be_called_are_not_shown(make_api: MakeApi) -> None:
    api = api_for(make_api, "hermes")
    assert answer_of(api, tools=TOOLS, tool_choice={"type": "none"})["stop_reason"] == "end_turn"
    assert "get_weather" not in prompt_of(api)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "kind", ["web_search_20250305", "code_execution_20250522", "computer_20250124", "bash_20250124"]
)
def test_tools_of_the_server_are_left_out_and_reported(make_api: MakeApi, kind: str) -> None:
    tool = {"type": kind, "name": "own", "display_width_px": 1}
    api = api_for(make_api, "hermes")
    response = post(api, tools=[tool, WEATHER, tool])
    assert (response.status_code, response.headers["x-gptserve-ignored"]) == (200, f"tools.{kind}")
    assert "own" not in prompt_of(api)
    message = f"tools[0]: a tool of the type '{kind}' is not supported by this server"
    assert error_of(post(api_for(make_api, "hermes", strict_fields=True), tools=[tool])) == invalid(message)


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is required"),
        ({"tools": [5]}, "tools[0]: input should be an object, got 5"),
        (
            {"tools": [SEARCH, {**TIME, "name": "a b"}]},
            "tools[1].name: string should match pattern '^[a-zA-Z0-9_.-]{1,128}$', got 'a b'",
        ),
        ({"tools": [SEARCH, TIME, SEARCH, TIME]}, "tools[3].name must differ from the others, got 'get_time' twice"),
        (
            {"tools": [SEARCH, {**TIME, "input_schema": {"type": "string"}}]},
            "tools[1].input_schema.type must be \"object\", got 'string'",
        ),
        ({"tools": [{**TIME, "type": "kustom"}]}, "tools[0].type: unknown type 'kustom'; did you mean custom?"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice: input should be an object, got 'auto'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "required"}},
            "tool_choice: input should be 'auto', 'any', 'tool' or 'none', got 'required'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name must be given with the type tool"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any", "name": "get_time"}},
            "tool_choice.name may be given only with the type tool",
        ),
        (
            {"tools": [SEARCH, TIME], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name must be that of a tool, got 'web_search'",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice must be none or auto without tools"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
                ]
            },
            "messages[1]: each tool_use must have a tool_result in the next message",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "{}"}]}
                ]
            },
            "messages[0].content[0].input: input should be an object, got '{}'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]: a block of the type 'image' is not supported by this server",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "x"}], "tools": TOOLS, "tool_choice": {"type": "any"}},
            "a last message of the assistant may not be given with "
            "tools whose calls are forced, strict or not parallel",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_breaks_a_rule_of_tools_is_refused(make_api: MakeApi, path: str, fields: Any, message: str) -> None:
    api = api_for(make_api, "hermes")
    assert error_of(post(api, path, **fields)) == invalid(message)
    assert api.engine.submitted == []


def test_a_template_that_knows_no_tools_is_told_so(make_api: MakeApi) -> None:
    assert error_of(post(make_api(saying("a")), tools=TOOLS)) == invalid(NO_TOOLS)


@pytest.mark.parametrize(
    ("thinking", "effort", "variables"),
    [
        (None, None, {}),
        ({"type": "disabled"}, None, {"enable_thinking": False}),
        ({"type": "adaptive"}, "high", {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"type": "disabled"}, "max", {"enable_thinking": False, "reasoning_effort": "max"}),
        ({"type": "enabled", "budget_tokens": 7}, None, {"enable_thinking": True}),
    ],
)
def test_thinking_is_a_variable_of_the_template(make_api: MakeApi, thinking: Any, effort: Any, variables: Any) -> None:
    shown = "".join(
        f"{{% if {name} is defined %}}{name[0]}={{{{ {name} }}}};{{% endif %}}"
        for name in ("enable_thinking", "reasoning_effort")
    )
    api = make_api(saying("a"), template=shown + "{% for m in messages %}{{ m.content }}{% endfor %}")
    answer_of(api, thinking=thinking, output_config={"effort": effort})
    expected = "".join(f"{name[0]}={value};" for name, value in variables.items())
    assert prompt_of(api) == f"{expected}hi"
    answer_of(api, thinking=thinking, chat_template_kwargs={"enable_thinking": "mine"})
    assert prompt_of(api).startswith("e=mine;")


def test_a_budget_limits_the_thinking_of_a_model_that_marks_it_by_tokens(make_api: MakeApi) -> None:
    tokenizer = ByteTokenizer("<think>", "</think>")
    api = make_api(engine_of("thinking", "a"), tokenizer=tokenizer, template=TEMPLATES["thinking"])
    budget = {"type": "enabled", "budget_tokens": 7}
    response = post(api, thinking=budget)
    assert (response.status_code, "x-gptserve-ignored" in response.headers) == (200, False), response.text
    assert api.chat(thinking_token_budget=7).status_code == 200
    ours, theirs = (request.params.grammar for request in api.engine.submitted)
    assert ours == theirs
    assert ours is not None
    refused = post(api, thinking=budget, messages=[USER, {"role": "assistant", "content": "x"}])
    assert error_of(refused) == invalid("a last message of the assistant may not be given with thinking.budget_tokens")


def test_a_budget_that_cannot_be_kept_is_reported_and_one_without_thinking_is_kept(make_api: MakeApi) -> None:
    budget = {"type": "enabled", "budget_tokens": 7}
    plain = post(make_api(saying("a")), thinking=budget)
    assert (plain.status_code, "x-gptserve-ignored" in plain.headers) == (200, False)
    response = post(api_for(make_api, "harmony"), thinking=budget, zzz=1)
    assert (response.status_code, response.headers["x-gptserve-ignored"]) == (200, "zzz, thinking.budget_tokens")
    message = "thinking.budget_tokens: the thinking of this model cannot be limited"
    assert error_of(post(api_for(make_api, "harmony", strict_fields=True), thinking=budget)) == invalid(message)


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_json_may_be_asked_for(make_api: MakeApi, name: str) -> None:
    api = make_api(saying("{}"))
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    answer_of(api, **{name: wanted if name == "output_format" else {"format": wanted}})
    grammar = api.engine.submitted[0].params.grammar
    assert grammar is not None
    assert grammar.kind == "json"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", {}),
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('"x"', {"INVALID_JSON": '"x"'}),
    ],
)
def test_the_input_of_a_call_is_an_object(make_api: MakeApi, arguments: str, expected: Any) -> None:
    text = f'<tool_call>{{"name": "get_time", "arguments": {arguments}}}</tool_call>'
    answer = answer_of(api_for(make_api, "hermes", text), tools=TOOLS)
    assert [block["input"] for block in answer["content"] if block["type"] == "tool_use"] == [expected]


def test_a_call_that_was_cut_off_says_so(make_api: MakeApi) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Os'
    answer = answer_of(api_for(make_api, "hermes", text), tools=TOOLS, max_tokens=len(text))
    [block] = answer["content"]
    assert (answer["stop_reason"], block["input"]) == ("max_tokens", {"INVALID_JSON": '{"city": "Os'})
    MessageObject.model_validate(answer, strict=True)
