"""Tools of namespaces, custom tools and hosted ones in the Responses API, over a FakeEngineClient."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ToolParam

from gptserve.server.core.errors import show
from gptserve.server.schemas.responses import InputItemList, ResponseObject
from gptserve.server.text.calls import call_id
from tests.server.api.test_response_tools import ASKED, conversation_of, serve_kind
from tests.server.api.test_responses import Serve, get, input_items, post, prompt_of, read, respond, text_of
from tests.server.api.test_tools import PLACE, TEMPLATES, api_of, engine_of, tokenizer_of
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import FakeEngineClient, say

MakeApi = Callable[..., Api]
CLOSE = {"type": "function", "name": "close", "description": "Close it", "parameters": PLACE}
PATCH = {"type": "custom", "name": "patch", "description": "Change files"}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+|x"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
AGENTS = {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [CLOSE, PATCH]}
TOOLS = [CLOSE, {"type": "web_search", "external_web_access": False}, AGENTS, {**PATCH, "format": REGEX}]
TEXT = '*** "é"\n🏔\\'
WRITTEN = json.dumps({"input": TEXT})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


WRITINGS = {"close": '{"city": "a"}', "agents__close": "{}", "agents__patch": WRITTEN, "patch": WRITTEN}
CALLS = "".join(call(name, arguments) for name, arguments in WRITINGS.items())
ITEMS: list[dict[str, Any]] = [
    {"type": "function_call", "name": "close", "arguments": '{"city": "a"}'},
    {"type": "function_call", "namespace": "agents", "name": "close", "arguments": "{}"},
    {"type": "custom_tool_call", "namespace": "agents", "name": "patch", "input": TEXT},
    {"type": "custom_tool_call", "name": "patch", "input": TEXT},
]
MARK = "<|endoftext|>"


def made(response_id: str, items: list[dict[str, Any]], suffix: str = "") -> list[dict[str, Any]]:
    """Return items with the ids and states that those of a response have."""
    prefixes = {"function_call": "fc", "custom_tool_call": "ctc"}
    rest = response_id.removeprefix("resp_")
    return [
        {
            "id": f"{prefixes[item['type']]}_{rest}{suffix}_{i}",
            "status": "completed",
            "call_id": call_id(response_id, 0, i),
            **item,
        }
        for i, item in enumerate(items)
    ]


def test_a_call_is_an_item_with_the_names_of_its_tool(serve: Serve, tmp_path: Path) -> None:
    server = serve_kind(serve, "hermes", CALLS, state_dir=tmp_path)
    events = read(post(server, tools=TOOLS, stream=True))
    answer = events[-1]["response"]

    ResponseObject.model_validate(answer, strict=True, extra="forbid")
    assert answer["output"] == made(answer["id"], ITEMS)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == answer["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [
        {**item, "status": "in_progress", "input" if "input" in item else "arguments": ""} for item in answer["output"]
    ]
    *deltas, done, _ = [event for event in events if event.get("output_index") == 2][1:]
    assert {delta["type"] for delta in deltas} == {"response.custom_tool_call_input.delta"}
    assert len(deltas) > 5, "it comes in pieces"
    assert "".join(delta["delta"] for delta in deltas) == TEXT
    assert {event["item_id"] for event in (*deltas, done)} == {answer["output"][2]["id"]}
    assert done == {
        "type": "response.custom_tool_call_input.done",
        "sequence_number": done["sequence_number"],
        "output_index": 2,
        "item_id": answer["output"][2]["id"],
        "input": TEXT,
    }
    [named] = [event for event in events if event["type"].endswith("arguments.done") and event["output_index"] == 1]
    assert (named["name"], named["arguments"]) == ("close", "{}")

    assert get(server, answer["id"]).json() == answer
    for last in range(len(events)):
        assert read(get(server, answer["id"], stream="true", starting_after=last)) == events[last + 1 :]
    whole = post(server, tools=TOOLS, store=False).json()
    assert whole["output"] == made(whole["id"], ITEMS)


def test_calls_of_all_kinds_come_back_before_and_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    options = {"tokenizer": tokenizer_of("hermes"), "template": TEMPLATES["hermes"], "state_dir": tmp_path}
    with LiveServer(engine_of("hermes", CALLS), **options).running() as first:
        answer = post(first, tools=TOOLS).json()
    server = serve_kind(serve, "hermes", "Yes.", state_dir=tmp_path)
    assert get(server, answer["id"]).json() == answer

    ids = [item["call_id"] for item in answer["output"]]
    kinds = ["function_call_output", "function_call_output", "custom_tool_call_output", "custom_tool_call_output"]
    results = [{"type": kind, "call_id": made, "output": "ok"} for kind, made in zip(kinds, ids, strict=True)]
    again = post(server, input=results, previous_response_id=answer["id"], tools=TOOLS).json()
    arguments = [{"city": "a"}, {}, {"input": TEXT}, {"input": TEXT}]
    names = ["close", "agents__close", "agents__patch", "patch"]
    functions = [{"name": name, "arguments": given} for name, given in zip(names, arguments, strict=True)]
    calls = [{"id": made, "type": "function", "function": of} for made, of in zip(ids, functions, strict=True)]
    _, said, *told = conversation_of(server)
    assert (said["role"], said["tool_calls"]) == ("assistant", calls)
    assert told == [{"role": "tool", "content": "ok", "tool_call_id": made} for made in ids]

    shown = prompt_of(server)
    extra = {"caller": {"type": "direct"}, "async": False}
    back = [{**item, **extra} for item in (*answer["output"], *results)]
    stateless = post(server, input=[ASKED, *back], tools=TOOLS, store=False)
    assert (prompt_of(server), stateless.headers["x-gptserve-ignored"]) == (shown, "tools.web_search")

    listed = input_items(server, again["id"], order="asc").json()
    InputItemList.model_validate(listed, strict=True, extra="forbid")
    suffix = again["id"].removeprefix("resp_")
    assert [item["id"].partition("_")[0] for item in listed["data"]] == [
        *("msg", "fc", "fc", "ctc", "ctc", "fco", "fco", "ctco", "ctco")
    ]
    own = [{name: item[name] for name in item if name not in ("id", "status")} for item in listed["data"]]
    assert own[1:] == [{**item, "call_id": made} for item, made in zip(ITEMS, ids, strict=True)] + results
    assert all(item["id"].endswith(f"_{suffix}_in_{i}") for i, item in enumerate(listed["data"]))


def functions_of(api: Api) -> list[dict[str, Any]]:
    shown = prompt_of(api).removesuffix(MARK)
    tools: list[dict[str, Any]] = json.loads(shown[json.JSONDecoder().raw_decode(shown)[1] :])
    assert all(tool["type"] == "function" for tool in tools)
    return [tool["function"] for tool in tools]


def test_the_model_sees_functions_and_no_hosted_tool(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes")
    answer = respond(api, tools=TOOLS)

    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    text["additionalProperties"] = False
    exact = {**text, "properties": {"input": {"type": "string", "pattern": "^(?:[a-z]+|x)$"}}}
    assert functions_of(api) == [
        {"name": "close", "description": "Close it", "parameters": PLACE},
        {
            "name": "agents__close",
            "description": "Close it\n\nAbout all tools agents__…: Of agents.",
            "parameters": PLACE,
        },
        {"name": "agents__patch", "description": "Change files", "parameters": text},
        {
            "name": "patch",
            "description": "Change files\n\nThe input must match this regex:\n[a-z]+|x",
            "parameters": exact,
        },
    ]
    assert answer.headers["x-gptserve-ignored"] == "tools.web_search"
    echoed = answer.json()["tools"]
    assert [tool["type"] for tool in echoed] == ["function", "namespace", "custom"]
    grammar = api.engine.submitted[0].params.grammar
    assert grammar is not None
    assert "[a-z]+|x" in grammar.text, "custom tools get the input that they take"


def test_a_namespace_without_a_description_is_repeated_as_openais_client_reads_it(make_api: MakeApi) -> None:
    answer = respond(api_of(make_api, "hermes"), tools=[{"type": "namespace", "name": "agents", "tools": [CLOSE]}])
    Response.model_validate(answer.json())
    assert answer.json()["tools"][0]["description"] == ""


def types_of_tools() -> set[str]:
    """Return the types of tools that OpenAI's client knows."""
    kinds = [typing.get_type_hints(tool)["type"] for tool in typing.get_args(ToolParam)]
    return {value for kind in kinds for value in typing.get_args(kind)}


def test_every_tool_of_openai_is_offered_or_left_out(make_api: MakeApi) -> None:
    hosted = types_of_tools() - {"function", "custom", "namespace"}
    assert {"web_search", "mcp", "local_shell", "code_interpreter", "image_generation", "tool_search"} <= hosted
    api = api_of(make_api, "hermes")
    answer = respond(api, tools=[CLOSE, *({"type": kind, "x": 1} for kind in sorted(hosted))])

    assert answer.status_code == 200
    left_out = answer.headers["x-gptserve-ignored"]
    assert set(left_out.split(", ")) == {f"tools.{kind}" for kind in hosted}
    assert [function["name"] for function in functions_of(api)] == ["close"]


def test_tools_of_which_none_is_left_are_as_none(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(say("Yes.", then_eos=True)), template="{{ messages }}")
    answer = respond(api, tools=[{"type": "web_search"}], tool_choice="auto")
    assert (answer.status_code, answer.json()["tools"], text_of(answer.json())) == (200, [], "Yes.")


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({"type": "function", "name": "close"}, "close"),
        ({"type": "function", "name": "agents__close"}, "agents__close"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "custom", "name": "agents__patch"}, "agents__patch"),
    ],
)
def test_a_tool_of_any_kind_is_forced_by_its_name(make_api: MakeApi, named: dict[str, str], name: str) -> None:
    api = api_of(make_api, "hermes")
    answer = respond(api, tools=TOOLS, tool_choice=named)

    assert (answer.status_code, answer.json()["tool_choice"]) == (200, named)
    grammar = api.engine.submitted[0].params.grammar
    assert grammar is not None
    names = ["close", "agents__close", "agents__patch", "patch"]
    assert [one for one in names if f'\\"name\\": \\"{one}\\"' in grammar.text] == [name]


def allowed(mode: str, *named: tuple[str, str]) -> dict[str, Any]:
    tools = [{"type": kind, "name": name} for kind, name in named]
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_of_a_chat(make_api: MakeApi, mode: str) -> None:
    api = api_of(make_api, "hermes")
    asked = allowed(mode, ("function", "agents__close"), ("custom", "patch"))
    answer = respond(api, **asked)
    shown = functions_of(api)
    names = [{"type": "function", "function": {"name": name}} for name in ("agents__close", "patch")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    tools = [{"type": "function", "function": {**of, "strict": "patch" in of["name"]}} for of in shown]
    assert api.chat(tools=tools, tool_choice=choice).status_code == 200
    response, chat = api.engine.submitted

    assert response.params.grammar == chat.params.grammar
    assert response.prompt_token_ids == chat.prompt_token_ids
    assert answer.json()["tool_choice"] == asked["tool_choice"]


def test_hosted_tools_are_left_out_of_those_that_are_allowed(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes")
    answer = respond(api, **allowed("required", ("mcp", "x"), ("custom", "patch"), ("image_generation", "y")))
    left_out = ["tools.web_search", "tool_choice.tools.mcp", "tool_choice.tools.image_generation"]
    assert answer.headers["x-gptserve-ignored"] == ", ".join(left_out)
    assert answer.json()["tool_choice"]["tools"] == [{"type": "custom", "name": "patch"}]
    assert "agents__close" not in api.engine.submitted[0].params.grammar.text


def test_a_grammar_in_lark_is_shown_and_named_as_ignored(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes")
    answer = respond(api, tools=[{**PATCH, "format": LARK}, {**PATCH, "name": "say", "format": {"type": "text"}}])

    assert answer.headers["x-gptserve-ignored"] == "tools.format"
    first, second = functions_of(api)
    assert first["description"] == 'Change files\n\nThe input must match this Lark grammar:\nstart: "a"'
    assert (second["name"], second["description"]) == ("say", "Change files")
    assert first["parameters"] == second["parameters"]


def test_what_a_function_has_for_other_servers_is_taken(make_api: MakeApi) -> None:
    extra = {"output_schema": {}, "allowed_callers": ["direct"], "defer_loading": True, "async": False}
    tools = [{**CLOSE, **extra}, {**AGENTS, "tools": [{**CLOSE, **extra}, {**PATCH, **extra}]}]
    answer = respond(api_of(make_api, "hermes"), tools=tools)
    assert (answer.status_code, answer.headers.get("x-gptserve-ignored")) == (200, None)


def test_strict_fields_refuse_hosted_tools(make_api: MakeApi) -> None:
    refused = respond(api_of(make_api, "hermes", strict_fields=True), tools=TOOLS)
    error = {"message": lack("tools[1]", "web_search"), "type": "invalid_request_error"}
    error |= {"param": "tools.web_search", "code": "unsupported_parameter"}
    assert (refused.status_code, refused.json()) == (400, {"error": error})


def lack(where: str, kind: str) -> str:
    return f"{where}: a tool of the type {kind!r} is not supported by this server"


LONG = {**AGENTS, "name": "n" * 123}
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "unsupported_parameter", "tool_choice",
     lack("tool_choice", "web_search_preview")),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp", "server_label": "x"}}, "unsupported_parameter", "tool_choice",
     lack("tool_choice", "mcp")),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "invalid_value", "tool_choice",
     "tool_choice must be none or auto without tools"),
    ({"tools": [{"type": "functions", "name": "f"}]}, "invalid_value", "tools[0]",
     "tools[0].type: unknown type 'functions'; did you mean function?"),
    ({"tools": [{**AGENTS, "tools": [CLOSE, {"type": "mcp"}]}]}, "unsupported_parameter", "tools[0].tools[1]",
     lack("tools[0].tools[1]", "mcp")),
    ({"tools": [{**AGENTS, "tools": [{**CLOSE, "name": "a b"}]}]}, "invalid_value", "tools",
     "tools[0].tools[0].name: string should match pattern '^[a-zA-Z0-9_.-]{1,128}$', got 'a b'"),
    ({"tools": [{**AGENTS, "tools": None}]}, "missing_required_parameter", "tools[0].tools",
     "tools[0].tools is required"),
    ({"tools": [*TOOLS, {**CLOSE, "name": "agents__close"}]}, "invalid_value", "tools",
     "tools[4].name must differ from the others, got 'agents__close' twice"),
    ({"tools": [TOOLS[1], {**AGENTS, "tools": [{**CLOSE, "parameters": {"type": "array"}}]}]}, "invalid_value",
     "tools", "tools[1].tools[0].parameters.type must be \"object\", got 'array'"),
    ({"tools": [{**CLOSE, "parameters": {"type": "tools[9]"}}]}, "invalid_value", "tools",
     "tools[0].parameters.type must be \"object\", got 'tools[9]'"),
    ({"tools": [{"type": f"kind_{i}"} for i in range(65)]}, "unknown_parameter", "tools.kind_64",
     "the body may have at most 64 unknown fields"),
    ({"tools": [{"type": {}, "name": "x"}]}, "invalid_value", "tools",
     "tools[0].type: input should be 'function', got {}"),
    ({"tools": [{**AGENTS, "tools": [{"type": [], "name": "x"}]}]}, "invalid_value", "tools",
     "tools[0].tools[0].type: input should be 'function', got []"),
    ({"tools": TOOLS, "tool_choice": {"type": []}}, "invalid_value", "tool_choice",
     "tool_choice.type: input should be 'function' or 'custom', got []"),
    ({"tools": [LONG]}, "invalid_value", "tools",
     "tools[0].tools[0].name and the name of its namespace must have at most 128 characters together, "
     f"got {show('n' * 123 + '__close')}"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]}, "invalid_value",
     "tools", "tools[0].format.syntax: input should be 'lark' or 'regex', got 'ebnf'"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "invalid_value", "tools",
     "tools[0].format: a grammar should have syntax and definition, got {'syntax': 'lark', 'type': 'grammar'}"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "close"}}, "invalid_value", "tool_choice",
     "tool_choice.name must be that of a custom tool, got 'close'"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "missing_required_parameter", "tool_choice.name",
     "tool_choice.name is required"),
    (allowed("auto", ("function", "close"), ("function", "patch")), "invalid_value", "tool_choice",
     "tool_choice.tools[1].name must be that of a function tool, got 'patch'"),
    (allowed("required", ("mcp", "x")), "invalid_value", "tool_choice",
     "tool_choice.tools must name a tool with the mode required"),
    ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "missing_required_parameter",
     "input[0].input", "input[0].input is required"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "a"}]}, "missing_required_parameter",
     "input[0].output", "input[0].output is required"),
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
