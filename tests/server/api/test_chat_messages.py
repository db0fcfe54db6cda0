"""What messages of a chat may be beside texts of the usual roles: other roles, refusals, older spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Api
from tests.server.fake_engine import EOS, FakeEngineClient

MakeApi = Callable[..., Api]
USER = {"role": "user", "content": "hi"}
TOOLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
DROPS = "{% for m in messages %}{% if m.role in ('user', 'critic') %}{{ m.content }}{% endif %}{% endfor %}"


def prompt_of(api: Api, *messages: dict[str, Any]) -> str:
    response = api.chat(messages=list(messages), add_generation_prompt=False)
    assert response.status_code == 200, response.json()
    return bytes(id_ for id_ in api.engine.submitted[-1].prompt_token_ids if id_ != EOS).decode()


def error_of(api: Api, *messages: dict[str, Any]) -> tuple[str, str, str]:
    response = api.chat(messages=list(messages))
    assert response.status_code == 400
    assert api.engine.submitted == []
    error = response.json()["error"]
    return error["param"], error["code"], error["message"]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_texts_may_have_the_names_of_responses(api: Api, kind: str) -> None:
    parts = [{"type": kind, "text": "a", "annotations": []}, {"type": kind, "text": "b"}]
    assert prompt_of(api, {"role": "user", "content": parts}) == "[user]a\nb"


@pytest.mark.parametrize(
    "refused",
    [
        {"content": [{"type": "text", "text": "Well:"}, {"type": "refusal", "refusal": "no"}]},
        {"content": "Well:", "refusal": "no"},
        {"content": [{"type": "output_text", "text": "Well:"}], "refusal": "no"},
    ],
)
def test_a_refusal_is_something_that_the_assistant_said(api: Api, refused: dict[str, Any]) -> None:
    assert prompt_of(api, USER, {"role": "assistant", **refused}) == "[user]hi[assistant]Well:\nno"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_refusal_may_be_all_that_was_said(api: Api, content: dict[str, Any]) -> None:
    assert prompt_of(api, USER, {"role": "assistant", "refusal": "no", **content}) == "[user]hi[assistant]no"


def test_a_refusal_has_a_text(api: Api) -> None:
    part = {"type": "refusal", "text": "no"}
    where = "messages[0].content[0].refusal"
    expected = (where, "missing_required_parameter", f"{where} is required")
    assert error_of(api, {"role": "assistant", "content": [part]}) == expected


def test_older_spellings_of_calls_and_their_results(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template=TOOLS)
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    result = {"role": "function", "name": "f", "content": "ok"}
    shown = '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]'
    assert prompt_of(api, USER, call, result) == f"[user]hi[assistant]{shown}[tool]ok"
    assert prompt_of(api, USER, {**call, "function_call": {}}) == "[user]hi[assistant]"


def test_an_older_call_stands_after_the_newer_ones(make_api: MakeApi) -> None:
    template = "{% for call in messages[0].tool_calls %}{{ call.function.name }}{% endfor %}"
    api = make_api(FakeEngineClient(), template=template)
    calls = {name: {"name": name, "arguments": "{}"} for name in ("f", "g")}
    asked = {"role": "assistant", "tool_calls": [{"id": "1", "function": calls["f"]}], "function_call": calls["g"]}
    assert prompt_of(api, asked) == "fg"


@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_result_may_be_empty(api: Api, role: str) -> None:
    assert prompt_of(api, USER, {"role": role, "name": "f", "content": None}) == "[user]hi[tool]"


def test_a_template_may_have_any_role(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template=DROPS)
    assert prompt_of(api, USER, {"role": "critic", "content": "bad"}) == "hibad"
    assert prompt_of(api, USER, {"role": "critic", "content": [{"type": "text", "text": "bad"}]}) == "hibad"


def test_a_role_that_the_template_leaves_out_is_refused(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template=DROPS)
    message = "messages[1].role: the chat template leaves out messages of the role 'poet'"
    found = error_of(api, USER, {"role": "poet", "content": "h"}, {"role": "critic", "content": "h"})
    assert found == ("messages", "invalid_chat_template_input", message)


@pytest.mark.parametrize(
    ("role", "meant"), [("assistants", "assistant"), ("User", "user"), ("SYSTEM", "system"), ("functions", "function")]
)
def test_a_role_that_resembles_a_usual_one_is_refused(api: Api, role: str, meant: str) -> None:
    message = f"messages[1].role: unknown role '{role}'; did you mean {meant}?"
    assert error_of(api, USER, {"role": role, "content": "x"}) == ("messages", "invalid_value", message)


@pytest.mark.parametrize(
    ("role", "rule"),
    [
        ("", "string should have at least 1 character, got ''"),
        ("r" * 65, f"string should have at most 64 characters, got '{'r' * 27}...{'r' * 28}'"),
    ],
)
def test_a_role_has_a_name(api: Api, role: str, rule: str) -> None:
    assert error_of(api, {"role": role, "content": "x"}) == ("messages", "invalid_value", f"messages[0].role: {rule}")
