"""Grammars are compiled in a worker before a request is queued; what is wrong with them is a 400 with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.grammar.grammar import Grammar
from gptserve.server.completions import grammar_checker
from gptserve.server.completions.grammar_checker import LIMITS, GrammarChecker
from gptserve.server.tools.harmony import MARKS
from gptserve.weights.workers import Workers
from tests.server.conftest import Api
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient

ENDLESS = "no JSON of finite length matches the schema: its $ref lead back to themselves"
TYPE_RULE = "type must be one of null, boolean, number, string, array, object and integer, or a list of them, got "
STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(STORYTELLER)
    yield made
    made.close()


@pytest.fixture
def checking(checker: GrammarChecker) -> Iterator[Api]:
    made = Api(FakeEngineClient(), grammar_checker=checker)
    yield made
    made.close()


@pytest.mark.some(2)
@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (
            {"guided_regex": "(x"},
            "guided_regex",
            'invalid regex "(x" (in regex): regex parse error: (x ^ error: unclosed group',
        ),
        ({"guided_json": {"type": "words"}}, "guided_json", TYPE_RULE + "'words'"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", ENDLESS),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format.json_schema.schema",
            'Unimplemented keys: ["uniqueItems"]',
        ),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", 'at 1(8): unknown name: "x"'),
    ],
)
def test_a_grammar_that_does_not_compile_is_a_400(
    checking: Api, route: str, body: dict[str, Any], param: str, reason: str
) -> None:
    response = getattr(checking, route)(**body, **({"prompt": "x"} if route == "complete" else {}))
    assert response.json()["error"] == {
        "message": f"{param} cannot be compiled: {reason}",
        "type": "invalid_request_error",
        "param": param,
        "code": "invalid_value",
    }
    assert checking.engine.submitted == []


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
def test_a_function_whose_parameters_do_not_compile_is_named(checker: GrammarChecker, fields: dict[str, Any]) -> None:
    functions = [{"name": "get_time"}, {"name": "get_weather", "parameters": {"uniqueItems": True}, "strict": True}]
    api = Api(FakeEngineClient(), template="{# tools <tool_call> #}", grammar_checker=checker)
    refused = api.chat(tools=[{"type": "function", "function": function} for function in functions], **fields)
    api.close()
    assert refused.json()["error"] == {
        "message": "the parameters of the function 'get_weather' cannot be compiled: Unimplemented keys: "
        '["uniqueItems"]',
        "type": "invalid_request_error",
        "param": "tools",
        "code": "invalid_value",
    }


def test_a_good_grammar_is_compiled_once(checking: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checking.complete(prompt="x", guided_regex="only once").status_code == 200
    monkeypatch.setattr(Workers, "call", None)
    assert checking.complete(prompt="x", guided_regex="only once").status_code == 200


@pytest.mark.slow
def test_what_takes_too_long_ends_its_worker_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes memory, too; a fast CPU would reach that limit first."""
    monkeypatch.setattr(grammar_checker, "LIMITS", replace(LIMITS, cpu_s=1, memory_bytes=2**40))
    checker = GrammarChecker(STORYTELLER)
    slow = Grammar("json", '{"type":"integer","multipleOf":999983}')
    assert checker.fault_of(slow) == "it took more than 1 s of CPU time"
    assert checker.fault_of(Grammar("regex", "a")) == ""
    checker.close()


def test_a_model_without_an_end_of_text_refuses_grammars() -> None:
    api = Api(FakeEngineClient(info=replace(INFO, eos_token_ids=())))
    response = api.complete(prompt="x", guided_regex="a")
    api.close()
    message = "guided_regex may not be given: this model has no end of text, by which the answer would end"
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_the_grammar_of_a_chat_with_channels_is_that_of_its_last_message() -> None:
    api = Api(FakeEngineClient(), tokenizer=ByteTokenizer(*MARKS))
    api.chat(guided_regex="a")
    api.complete(prompt="x", guided_regex="a")
    refused = api.chat(guided_regex="a", add_generation_prompt=False)
    api.close()
    of_chat, of_text = (request.params.grammar for request in api.engine.submitted)
    assert of_chat is not None
    assert (of_text, "analysis" in of_chat.frame) == (replace(of_chat, frame=""), True)
    message = "add_generation_prompt may not be given with guided_regex and a model that marks its reasoning"
    assert refused.json()["error"]["message"] == message
