"""What happens to fields that the models of schemas.py do not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest
from gptserve.server.schemas.fields import FOREIGN, MAX_IGNORED, UNREAD, ignored_names, take_fields
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

MESSAGES = [{"role": "user", "content": "hi"}]
SOMETHING = {"x": ["y"]}
"""A value that is neutral nowhere."""


def refusal(given: dict[str, Any], model: type = ChatRequest, **options: Any) -> tuple[str, str, str]:
    with pytest.raises(InvalidRequestError) as raised:
        take_fields(given, model, **options)
    return str(raised.value), raised.value.param, raised.value.code


def test_null_is_no_field_everywhere() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}], "name": None}
    given = {"messages": [message], "seed": None, "stream_options": {"include_usage": None}, "strange": None}
    assert take_fields(given, ChatRequest) == (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream_options": {}},
        [],
    )


@pytest.mark.parametrize("name", UNREAD)
def test_a_field_that_asks_for_nothing_is_taken_and_another_value_refused(name: str) -> None:
    rule = UNREAD[name]
    for value in rule.neutral:
        assert take_fields({name: value}, CompletionRequest) == ({}, [])
    if rule.lack:
        expected = f"{rule.lack} not supported by this server; leave out {name}", name, "unsupported_parameter"
        assert refusal({name: SOMETHING}, CompletionRequest) == expected
    else:
        assert take_fields({name: SOMETHING}, CompletionRequest) == ({}, [])


def test_a_number_without_a_fraction_is_an_integer() -> None:
    given = {"prompt": "x", "max_tokens": 100.0, "temperature": 1.0, "top_k": 1e300, "logit_bias": {"5": 1.0}}
    taken, _ = take_fields(given, CompletionRequest)

    assert json.dumps(taken) == (
        '{"prompt": "x", "max_tokens": 100, "temperature": 1, "top_k": 1e+300, "logit_bias": {"5": 1.0}}'
    )
    body = CompletionRequest.model_validate({**taken, "top_k": None})
    assert (body.max_tokens, body.temperature) == (100, 1.0)


def test_no_field_that_is_read_stands_in_the_table() -> None:
    assert not UNREAD.keys() & (CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys())


def test_what_clients_send_back_of_an_answer_is_taken() -> None:
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "provider_specific_fields": {"x": 1},
        "type": "message",
        "id": "1",
    }
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    taken, ignored = take_fields({"messages": [answer, {"role": "user", "content": [part]}]}, ChatRequest)
    assert taken["messages"] == [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert ignored == []


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_an_assistant_may_have_said_nothing(message: dict[str, object]) -> None:
    assert take_fields({"messages": [message]}, ChatRequest)[0] == {"messages": [{"role": "assistant", "content": ""}]}


def test_unknown_fields_of_tools_and_calls_are_let_through() -> None:
    function = {"name": "f", "returns": {}}
    given = {
        "tools": [{"type": "function", "function": function, "cache_control": {}}, "x"],
        "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}},
        "messages": [{"role": "assistant", "tool_calls": [{"index": 0, "y": 1, "function": {"name": "f", "z": 1}}]}],
    }
    assert take_fields(given, ChatRequest) == (
        {
            "tools": [{"type": "function", "function": {"name": "f"}}, "x"],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
        },
        [
            *("tools.cache_control", "tools.function.returns", "tool_choice.function.x"),
            *("messages.tool_calls.y", "messages.tool_calls.function.z"),
        ],
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"temperatre": 1}, "temperature"),
        ({"max_token": 1}, "max_tokens"),
        ({"strea": True}, "stream"),
        ({"Temperature": 1}, "temperature"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usage"),
    ],
)
def test_a_slip_of_the_pen_is_refused(given: dict[str, Any], meant: str) -> None:
    message, _, code = refusal(given)
    assert message.endswith(f"; did you mean {meant}?")
    assert code == "unknown_parameter"


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_field_of_another_api_is_let_through(name: str) -> None:
    assert take_fields({name: 1}, CompletionRequest) == ({}, [name])


def test_a_field_of_the_other_route_is_refused_unless_it_is_off() -> None:
    for value in (True, 0, "", []):
        assert refusal({"echo": value}) == ("echo is not a field of this route", "echo", "unknown_parameter")
    assert take_fields({"echo": False}, ChatRequest) == ({}, [])
    assert refusal({"messages": MESSAGES}, CompletionRequest)[0] == "messages is not a field of this route"


def test_unknown_fields_are_named_once_wherever_they_stand() -> None:
    messages = [{"role": "user", "content": "hi", "strange": 1}] * 3
    assert take_fields({"zzz": 1, "messages": messages}, ChatRequest)[1] == ["zzz", "messages.strange"]


def test_strict_refuses_the_first_unknown() -> None:
    expected = "unknown field zzz, got 1", "zzz", "unknown_parameter"
    assert refusal({"zzz": 1, "yyy": 2}, strict=True) == expected
    assert take_fields({"store": True}, ChatRequest, strict=True) == ({}, [])


def test_there_are_not_many_unknown_fields() -> None:
    some = {f"{'z' * i}_": 1 for i in range(MAX_IGNORED)}
    assert len(take_fields(some, ChatRequest)[1]) == MAX_IGNORED
    assert refusal({**some, "q": 1})[0] == f"the body may have at most {MAX_IGNORED} unknown fields"


def test_names_for_a_header_are_escaped_and_few() -> None:
    assert ignored_names(["a.b", "c\r\nx: y", "é" * 100]) == f"a.b, c%0D%0Ax%3A%20y, {'%C3%A9' * 60}"
    assert ignored_names(list("abcdefghijklmnopqrstuvwxyz")).endswith("s, t, and 6 more")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_the_fields_that_nobody_read(api: Api, stream: bool) -> None:
    response = api.complete(prompt="x", zzz=1, repeat_penalty=1.1, stream=stream)
    assert response.status_code == 200
    assert response.headers["x-gptserve-ignored"] == "zzz, repeat_penalty"
    assert "x-gptserve-ignored" not in api.complete(prompt="x", store=True).headers


def test_strict_fields_refuses_what_nobody_reads(make_api: Callable[..., Api]) -> None:
    response = make_api(FakeEngineClient(), strict_fields=True).complete(prompt="x", zzz=1)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")


def test_the_docs_have_the_table() -> None:
    lines = (Path(__file__).parents[3] / "docs/api.md").read_text(encoding="utf-8").splitlines()
    fields_by_values: dict[str, list[str]] = {}
    for name, rule in UNREAD.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral) or "-"
        fields_by_values.setdefault(values if rule.lack else "any", []).append(f"`{name}`")

    assert [v for v, names in fields_by_values.items() if f"| {', '.join(names)} | {v} |" not in lines] == []
