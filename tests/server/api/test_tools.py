"""Tools in POST /v1/chat/completions over a FakeEngineClient: calls in answers and messages, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.engine.grammar.grammar import Grammar
from gptserve.server.text.calls import call_id
from gptserve.server.tools.dialect import NO_FORMAT, NO_TOOLS
from gptserve.server.tools.harmony import MARKS
from tests.server.api.test_chat import parse_events
from tests.server.conftest import SAID, Api, LiveServer
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient, Reply, say
from tests.server.pydantic_says import NO_BOOLEAN, NO_STRING

MakeApi = Callable[..., Api]
SPECIAL = (*MARKS, "<|constrain|>", "<|call|>")
SHOWN = "{{ messages | tojson }}{{ tools | tojson }}"
TEMPLATES = {
    "hermes": SHOWN + "{# <tool_call> #}",
    "llama": SHOWN + '{# "parameters": dictionary #}',
    "mistral": SHOWN + "{# [TOOL_CALLS] #}",
    "mistral-v11": SHOWN + "{# [TOOL_CALLS] [ARGS] #}",
    "harmony": SHOWN + "<|start|>assistant",
    "thinking": SHOWN + "<|endoftext|>{# <tool_call> </think> #}{{ '<think>' if opens else '' }}",
}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "W", "parameters": PLACE}}
TOOLS = [TOOL, {"type": "function", "function": {"name": "get_time"}}]
USER = {"role": "user", "content": "hi"}
OSLO = '{"city": "Os\\u006co 🏔"}'
ANSWERS = {
    "hermes": f'Hm.<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
    "llama": f'{{"name": "get_weather", "parameters": {OSLO}}}; {{"name": "get_time", "parameters": {{}}}}',
    "mistral": f'Hm.[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "get_time"}}]',
    "mistral-v11": f"Hm.[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]get_time[ARGS]{{}}",
    "harmony": "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>Hm.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{OSLO}<|end|>"
    "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}",
    "thinking": "<think>\nSo.</think>\n\nHm.<tool_call>"
    f'{{"name": "get_weather", "arguments": {OSLO}}}<tool_call>{{"name": "get_time"}}',
}


def tokenizer_of(kind: str) -> ByteTokenizer:
    if kind == "harmony":
        return ByteTokenizer(*SPECIAL)
    return ByteTokenizer("[TOOL_CALLS]", "[ARGS]") if kind == "mistral-v11" else ByteTokenizer()


def engine_of(kind: str, answer: str) -> FakeEngineClient:
    reply: Reply = say(tokenizer_of(kind).encode_with_special(answer), then_eos=True)
    return FakeEngineClient(reply, info=replace(INFO, vocab_size=EOS + 1 + len(SPECIAL), max_model_len=4096))


def api_of(make_api: MakeApi, kind: str, answer: str | None = None, **options: Any) -> Api:
    return make_api(engine_of(kind, answer or ANSWERS[kind]), tokenizer_of(kind), TEMPLATES[kind], **options)


def function_calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in message["tool_calls"])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ANSWERS)
def test_calls_come_apart_from_the_text(make_api: MakeApi, kind: str) -> None:
    api = api_of(make_api, kind)
    body = api.chat(tools=TOOLS, n=2).json()
    for index, choice in enumerate(body["choices"]):
        message = choice["message"]
        assert (message["role"], message["content"]) == ("assistant", None if kind == "llama" else "Hm.")
        assert message.get("reasoning") == message.get("reasoning_content")
        assert message.get("reasoning") == ("So." if kind in ("harmony", "thinking") else None)
        assert function_calls(message) == [("get_weather", OSLO), ("get_time", "{}")]
        ids = [call["id"] for call in message["tool_calls"]]
        assert ids == [call_id(body["id"], index, i) for i in range(2)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert api.engine.submitted[0].params.grammar is None


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ANSWERS)
def test_calls_are_streamed_with_their_names_first(make_api: MakeApi, kind: str) -> None:
    chunks = parse_events(api_of(make_api, kind).chat(tools=TOOLS, stream=True).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert all(len(delta.get("tool_calls", [0])) == 1 for delta in deltas)
    for index, (name, arguments) in enumerate([("get_weather", OSLO), ("get_time", "{}")]):
        first, *more = [piece for piece in pieces if piece["index"] == index]
        made = call_id(chunks[0]["id"], 0, index)
        assert (first["id"], first["type"], first["function"]["name"]) == (made, "function", name)
        assert all(piece.keys() == {"index", "function"} for piece in more)
        assert "".join(piece["function"]["arguments"] for piece in (first, *more)) == arguments
    assert len([piece for piece in pieces if piece["index"] == 0]) > 5, "arguments come in pieces"
    assert "".join(delta.get("content", "") for delta in deltas) == ("" if kind == "llama" else "Hm.")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


CODER = """Hm.<tool_call>
<function=get_weather>
<parameter=city>
Oslo "5" 🏔
</parameter>
<parameter=days>
5
</parameter>
</function>
</tool_call>"""


def test_values_that_are_written_one_by_one_are_streamed_as_json(make_api: MakeApi) -> None:
    place = {**PLACE, "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": place}}]
    template = SHOWN + "{# <tool_call> <function= <parameter= #}"
    api = make_api(engine_of("hermes", CODER), template=template)
    [choice] = api.chat(tools=tools).json()["choices"]
    arguments = '{"city": "Oslo \\"5\\" 🏔", "days": 5}'
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hm.", "tool_calls")
    assert function_calls(choice["message"]) == [("get_weather", arguments)]
    chunks = parse_events(api.chat(tools=tools, stream=True).text)
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == arguments
    assert len(pieces) > 10
    again = api.chat(tools=tools, messages=[USER, choice["message"], {"role": "tool", "content": "x"}], max_tokens=1)
    assert again.status_code == 200


def test_an_answer_without_calls_is_as_without_tools(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes", "No <tool>, thanks.\n")
    given, without = api.chat(tools=TOOLS).json()["choices"], api.chat().json()["choices"]
    assert given == without
    assert given[0]["message"] == {**SAID, "content": "No <tool>, thanks.\n"}
    assert given[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "reason", "arguments"),
    [({"max_tokens": 72}, "length", '{"city": "Os'), ({"stop": "006"}, "stop", '{"city": "Os\\u')],
)
def test_a_call_that_is_cut_off_has_the_arguments_so_far(
    make_api: MakeApi, body: dict[str, Any], reason: str, arguments: str
) -> None:
    [choice] = api_of(make_api, "hermes").chat(tools=TOOLS, **body).json()["choices"]
    assert function_calls(choice["message"])[0][0] == "get_weather"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith(arguments[:12])
    assert choice["finish_reason"] == reason


@pytest.mark.parametrize(("choice", "content"), [("auto", '<tool_call>\n{"name"'), ("required", "")])
def test_a_forced_call_that_is_cut_off_before_its_name_is_no_text(make_api: MakeApi, choice: str, content: str) -> None:
    api = api_of(make_api, "hermes", ANSWERS["hermes"].removeprefix("Hm."))
    [cut] = api.chat(tools=TOOLS, tool_choice=choice, max_tokens=19).json()["choices"]
    assert (cut["message"], cut["finish_reason"]) == ({**SAID, "content": content}, "length")


def test_the_marks_of_calls_have_no_text_without_tools(make_api: MakeApi) -> None:
    [choice] = api_of(make_api, "mistral-v11").chat().json()["choices"]
    assert choice["message"] == {**SAID, "content": f"Hm.get_weather{OSLO}get_time{{}}"}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("answer", "opens", "thought", "content"),
    [
        ("<think>\nSo.\n</think>\n\nFour", False, "So.\n", "Four"),
        (" <think></think>Four", False, None, "Four"),
        ("\nSo.</think>Four <think>", True, "So.", "Four <think>"),
        ("So", True, "So", ""),
        ("  Four </think>", False, None, "  Four </think>"),
        ("<thin", False, None, "<thin"),
    ],
)
def test_reasoning_comes_apart_from_the_text(
    make_api: MakeApi, answer: str, opens: bool, thought: str | None, content: str
) -> None:
    api = api_of(make_api, "thinking", answer)
    body = {"chat_template_kwargs": {"opens": opens}, "logprobs": True}
    [choice] = api.chat("<think>", **body).json()["choices"]
    expected = {} if thought is None else {"reasoning": thought, "reasoning_content": thought}
    assert choice["message"] == {**SAID, "content": content, **expected}
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(answer) + 1
    deltas = [chunk["choices"][0]["delta"] for chunk in parse_events(api.chat("<think>", **body, stream=True).text)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (thought or "")
    assert "".join(delta.get("content", "") for delta in deltas) == content


def test_structured_output_comes_after_the_reasoning(make_api: MakeApi) -> None:
    api = api_of(make_api, "thinking", "So.</think>{}")
    body = {"chat_template_kwargs": {"opens": True}, "response_format": {"type": "json_object"}}
    message = {**SAID, "content": "{}", "reasoning": "So.", "reasoning_content": "So."}
    assert api.chat(**body).json()["choices"][0]["message"] == message


@pytest.mark.parametrize("special", [(), ("[THINK]", "[/THINK]")])
def test_reasoning_has_the_marks_of_the_template(make_api: MakeApi, special: tuple[str, ...]) -> None:
    tokenizer = ByteTokenizer(*special)
    answer = '[THINK]So.[/THINK]Hm.[TOOL_CALLS]get_time[ARGS]{"a": 1}'
    reply = say(tokenizer.encode_with_special(answer), then_eos=True)
    info = replace(INFO, vocab_size=EOS + 3, max_model_len=4096)
    template = SHOWN + "{# [TOOL_CALLS] [ARGS] [/THINK] #}"
    [choice] = make_api(FakeEngineClient(reply, info=info), tokenizer, template).chat(tools=TOOLS).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("So.", "Hm.")
    assert function_calls(choice["message"]) == [("get_time", '{"a": 1}')]


TEXT_WITH_A_CALL = json.dumps({"a": ANSWERS["hermes"]}, ensure_ascii=False)


@pytest.mark.some(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "answer", "content", "names"),
    [
        ("hermes", TEXT_WITH_A_CALL, TEXT_WITH_A_CALL, []),
        ("hermes", ANSWERS["hermes"].removeprefix("Hm."), None, ["get_weather", "get_time"]),
        ("llama", '{"name":"get_weather"', '{"name":"get_weather"', []),
        ("llama", ANSWERS["llama"], None, ["get_weather", "get_time"]),
        ("mistral-v11", "[TOOL_CALLS]get_time[ARGS]{}", None, ["get_time"]),
        ("harmony", '<|channel|>final<|message|>{"a": 1}', '{"a": 1}', []),
        ("harmony", "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}", None, ["get_time"]),
        ("thinking", "<think>So.</think>\n\n" + TEXT_WITH_A_CALL, TEXT_WITH_A_CALL, []),
    ],
)
def test_an_answer_beside_tools_is_calls_or_the_text_that_is_wanted(
    make_api: MakeApi, kind: str, answer: str, content: str | None, names: list[str], stream: bool
) -> None:
    api = api_of(make_api, kind, answer)
    response = api.chat(tools=TOOLS, response_format={"type": "json_object"}, stream=stream)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in parse_events(response.text)]
        said = "".join(delta.get("content") or "" for delta in deltas) or None
        calls = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    else:
        message = response.json()["choices"][0]["message"]
        said, calls = message["content"], message.get("tool_calls", [])
    assert (said, [call["function"]["name"] for call in calls]) == (content, names)
    grammar = api.engine.submitted[0].params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text), "get_time" in grammar.frame) == ("json", {"type": "object"}, True)


def prompt_of(api: Api) -> str:
    return b"".join(map(ByteTokenizer().token_bytes, api.engine.submitted[-1].prompt_token_ids)).decode()


def test_the_template_sees_tools_and_calls_with_their_arguments_as_objects(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes", "Fine.")
    calls = [
        {"id": "a", "index": 0, "type": "function", "function": {"name": "get_weather", "arguments": OSLO}},
        {"id": "b", "function": {"arguments": "", "name": "get_time"}},
    ]
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "Rain"},
    ]
    strict = {**TOOL, "function": {"strict": True, "parameters": PLACE, "description": "W", "name": "get_weather"}}
    assert api.chat(messages=messages, tools=[strict, TOOLS[1]], max_tokens=1).status_code == 200
    shown = [
        USER,
        {
            "thinking": "Hm",
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo 🏔"}}},
                {"id": "b", "type": "function", "function": {"name": "get_time", "arguments": {}}},
            ],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "a"},
    ]
    assert prompt_of(api) == json.dumps(shown, ensure_ascii=False) + json.dumps(TOOLS)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (None, {}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Os\nlo"}', {"city": "Os\nlo"}),
        ('["Oslo"]', '["Oslo"]'),
        ("Oslo", "Oslo"),
    ],
)
def test_arguments_of_a_call_may_be_any_text(make_api: MakeApi, arguments: str | None, shown: object) -> None:
    api = api_of(make_api, "hermes")
    assert api.chat(**of_call(arguments), max_tokens=1).status_code == 200
    [_, said] = json.JSONDecoder().raw_decode(prompt_of(api))[0]
    assert said["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": shown}}]


def test_an_empty_list_of_calls_is_none(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes")
    assert api.chat(messages=[USER, {"role": "assistant", "content": "Hm", "tool_calls": []}]).status_code == 200
    assert prompt_of(api) == json.dumps([USER, {"role": "assistant", "content": "Hm"}]) + "null"


@pytest.mark.parametrize("body", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}])
def test_tools_that_may_not_be_called_are_not_shown(make_api: MakeApi, body: dict[str, Any]) -> None:
    api = api_of(make_api, "hermes")
    assert api.chat(**body).json()["choices"][0]["message"] == {**SAID, "content": ANSWERS["hermes"]}
    assert prompt_of(api) == json.dumps([USER]) + "null"


def forced(**fields: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": "required", **fields}


NAMED = {"type": "function", "function": {"name": "get_time"}}
STRICT = [{"type": "function", "function": {**TOOL["function"], "strict": True}}]  # type: ignore[dict-item]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("body", "has_grammar"),
    [
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}, False),
        ({"tools": TOOLS, "parallel_tool_calls": False}, True),
        ({"tools": STRICT}, True),
        ({"tools": STRICT, "tool_choice": "none"}, False),
        (forced(), True),
        ({"tools": TOOLS, "tool_choice": NAMED}, True),
    ],
)
@pytest.mark.parametrize("kind", ["hermes", "harmony"])
def test_the_engine_gets_a_grammar_where_one_is_needed(
    make_api: MakeApi, kind: str, body: dict[str, Any], has_grammar: bool
) -> None:
    api = api_of(make_api, kind)
    assert api.chat(**body).status_code == 200
    grammar = api.engine.submitted[0].params.grammar
    assert (grammar is not None) == has_grammar
    if grammar is not None:
        assert grammar.kind == "lark"
        assert ("get_weather" in grammar.text) == (body.get("tool_choice") != NAMED)


@pytest.mark.some(1)
@pytest.mark.parametrize("fields", [forced(), {"tools": TOOLS, "response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("kind", ["hermes", "harmony"])
def test_a_restarted_server_goes_on_with_the_same_grammar_and_ids(
    serve: Callable[..., LiveServer], tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    options = {"tokenizer": tokenizer_of(kind), "template": TEMPLATES[kind], "state_dir": tmp_path}
    first = LiveServer(FakeEngineClient(auto=False, info=engine_of(kind, "").info), **options)
    with first.running():
        body = {"messages": [USER], "background": True, **fields}
        begun = httpx.post(first.url + "/v1/chat/completions", json=body, timeout=20).json()
        assert begun["status"] == "queued"
    [before] = first.engine.submitted
    second = serve(engine_of(kind, ANSWERS[kind].removeprefix("Hm.")), **options)
    url = f"{second.url}/v1/chat/completions/{begun['id']}"
    events = httpx.get(f"{url}/events", timeout=20).text.removesuffix("\n\n").split("\n\n")
    assert [request.params.grammar for request in second.engine.submitted] == [before.params.grammar]
    assert isinstance(before.params.grammar, Grammar)
    message = httpx.get(url, timeout=20).json()["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == [call_id(begun["id"], 0, i) for i in range(2)]
    for number, event in enumerate(events):
        if event.startswith("id: "):
            after = event.partition("\n")[0].removeprefix("id: ")
            rest = httpx.get(f"{url}/events", params={"starting_after": after}, timeout=20)
            assert rest.text.removesuffix("\n\n").split("\n\n") == events[number + 1 :] or rest.status_code == 204


def check(api: Api, body: dict[str, Any], code: str, param: str, message: str) -> None:
    response = api.chat(**body)
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert (response.status_code, response.json()) == (400, {"error": error})
    assert api.engine.submitted == []


def of_function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def of_call(arguments: object) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


CHOICES = 'input should be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


@pytest.mark.parametrize("kind", ["hermes", "llama", "harmony"])
def test_only_allowed_tools_are_called_and_all_are_seen(make_api: MakeApi, kind: str) -> None:
    api = api_of(make_api, kind)
    for body in ({"tools": TOOLS}, allowed("auto", "get_time"), allowed("auto", "get_time", "get_weather")):
        assert api.chat(**body).status_code == 200
    for body in (allowed("required", "get_time"), {"tools": TOOLS, "tool_choice": "required"}):
        assert api.chat(**body).status_code == 200
    assert len({request.prompt_token_ids for request in api.engine.submitted}) == 1
    _, some, all_, forced, any_ = [request.params.grammar for request in api.engine.submitted]

    assert all_ is None, "it asks for nothing"
    assert some is not None
    assert forced is not None
    assert any_ is not None
    assert ["get_weather" in grammar.text for grammar in (some, forced, any_)] == [False, False, True]
    assert ["get_time" in grammar.text for grammar in (some, forced, any_)] == [True] * 3
    assert some != forced, "text may come instead"


def test_where_no_tool_is_allowed_none_is_called(make_api: MakeApi) -> None:
    api = api_of(make_api, "hermes")
    [choice] = api.chat(**allowed("auto")).json()["choices"]
    assert choice["message"]["content"] == ANSWERS["hermes"]


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tools": {}}, "invalid_type", "tools", "tools: input should be an array, got {}"),
    ({"tools": ["f"]}, "invalid_type", "tools", "tools[0]: input should be an object, got 'f'"),
    ({"tools": [{}]}, "missing_required_parameter", "tools[0].type", "tools[0].type is required"),
    ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools",
     "tools[0].type: input should be 'function', got 'web_search'"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function",
     "tools[0].function is required"),
    (of_function(name="a b"), "invalid_value", "tools",
     "tools[0].function.name: string should match pattern '^[a-zA-Z0-9_.-]{1,128}$', got 'a b'"),
    (of_function(parameters=[]), "invalid_type", "tools",
     "tools[0].function.parameters: input should be an object, got []"),
    (of_function(parameters={"type": "array"}), "invalid_value", "tools",
     "tools[0].function.parameters.type must be \"object\", got 'array'"),
    ({"tools": [TOOL] * 1025}, "invalid_value", "tools", "tools may have at most 1024 entries, got 1025"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools",
     "tools[1].function.name must differ from the others, got 'get_weather' twice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "invalid_value", "tool_choice", f"tool_choice: {CHOICES}, got 'any'"),
    ({"tools": TOOLS, "tool_choice": []}, "invalid_value", "tool_choice", f"tool_choice: {CHOICES}, got []"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "invalid_value", "tool_choice",
     "tool_choice.type: input should be 'function', got 'custom'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "missing_required_parameter",
     "tool_choice.allowed_tools", "tool_choice.allowed_tools is required"),
    (allowed("any", "get_time"), "invalid_value", "tool_choice",
     "tool_choice.allowed_tools.mode: input should be 'auto' or 'required', got 'any'"),
    (allowed("auto", "get_time", "g"), "invalid_value", "tool_choice",
     "tool_choice.allowed_tools.tools[1].function.name must be that of a tool, got 'g'"),
    (allowed("required"), "invalid_value", "tool_choice",
     "tool_choice.allowed_tools.tools must name a tool with the mode required"),
    ({**allowed("auto"), "tools": None}, "invalid_value", "tool_choice",
     "tool_choice must be none or auto without tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "invalid_value", "tool_choice",
     "tool_choice.function.name must be that of a tool, got 'g'"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice", "tool_choice must be none or auto without tools"),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls",
     f"parallel_tool_calls: {NO_BOOLEAN}, got 1"),
    (of_call({}), "invalid_type", "messages",
     f"messages[1].tool_calls[0].function.arguments: {NO_STRING}, got {{}}"),
    ({"tools": TOOLS, "guided_regex": "a"}, "invalid_value", "guided_regex",
     "guided_regex may not be given together with tools that may be called, but JSON may be asked for"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}, "continue_final_message": True}, "invalid_value",
     "continue_final_message", "continue_final_message may not be given with response_format and tools"),
    (forced(continue_final_message=True), "invalid_value", "continue_final_message",
     "continue_final_message may not be given with tools whose calls are forced, strict or not parallel"),
    (forced(add_generation_prompt=False), "invalid_value", "add_generation_prompt",
     "add_generation_prompt may not be given with tools whose calls are forced, strict or not parallel"),
]  # fmt: skip


@pytest.mark.some(7)
@pytest.mark.parametrize(("body", "code", "param", "message"), REFUSED)
def test_what_is_wrong_with_tools_is_refused_in_words(
    make_api: MakeApi, body: dict[str, Any], code: str, param: str, message: str
) -> None:
    api = api_of(make_api, "hermes")
    check(api, body, code, param, message)


@pytest.mark.parametrize("odd", [{"format": {}}, {"minimum": 10**400}, {"$ref": "http://[x#/a"}, {"required": [[]]}])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_function_of_a_malformed_schema_is_refused(make_api: MakeApi, odd: dict[str, Any], choice: str) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": odd}}, "strict": choice == "auto"}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    response = api_of(make_api, "hermes").chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the parameters of the function 'f' cannot be compiled: ")


def test_many_functions_make_no_more_work_than_one_may(make_api: MakeApi) -> None:
    ranges = {"oneOf": [{"type": "integer", "minimum": 2 * i, "maximum": 2 * i} for i in range(40)]}
    functions = [{"name": f"f{i}", "parameters": {"properties": {"a": ranges}}} for i in range(20)]
    api = make_api(FakeEngineClient(), template="{# tools <tool_call> #}x")
    response = api.chat(**forced(tools=[{"type": "function", "function": function} for function in functions]))
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("a oneOf has too many options to compare")


def test_tools_that_make_too_long_a_grammar_are_refused(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template="{# tools <tool_call> #}x")
    body = forced(tools=of_function(parameters={"properties": {"x": {"const": "x" * 66_000}}})["tools"])
    length = int(api.chat(**body).json()["error"]["message"].rpartition(" ")[2])
    assert 66_000 < length < 67_000
    check(api, body, "invalid_value", "tools", f"tools may make a grammar of at most 65536 characters, got {length}")


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ messages }}", NO_TOOLS), ("{{ tools }}<function=", NO_FORMAT), ("{{ tools }}", NO_FORMAT)],
)
def test_a_model_that_cannot_call_tools_says_so(make_api: MakeApi, template: str, message: str) -> None:
    api = make_api(FakeEngineClient(), template=template)
    check(api, {"tools": TOOLS}, "unsupported_parameter", "tools", message)
    assert api.chat(tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


def test_an_operator_may_name_the_format(make_api: MakeApi) -> None:
    engine = engine_of("llama", ANSWERS["llama"])
    api = make_api(engine, template="{{ tools }}", tool_call_format="llama")
    [choice] = api.chat(tools=TOOLS).json()["choices"]
    assert [name for name, _ in function_calls(choice["message"])] == ["get_weather", "get_time"]
