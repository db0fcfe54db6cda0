"""The fields that ask for structured output: the grammar that reaches the engine, and what is refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gptserve.engine.grammar.grammar import ANY_WHITESPACE, Grammar
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

SCHEMA = {"type": "object", "properties": {"b": {"enum": [None, "é"]}, "a": {"default": None}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OBJECT = '{"type":"object"}'


def json_grammar(text: str, whitespace: str = "") -> Grammar:
    return Grammar("json", text, whitespace, unnamed_properties="refuse")


def of_format(schema: object, **fields: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **fields}}}


@pytest.mark.some(5)
@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_grammar(OBJECT)),
        (of_format(SCHEMA), json_grammar(TEXT)),
        (of_format(SCHEMA, strict=False, description="x"), json_grammar(TEXT)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, json_grammar(OBJECT)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_grammar(TEXT)),
        ({"response_format": {"type": "json_object", "schema": None}}, json_grammar(OBJECT)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, json_grammar(TEXT)),
        (of_format(True), json_grammar("true")),
        ({"structured_outputs": {"json": SCHEMA}}, json_grammar(TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_grammar(TEXT)),
        ({"structured_outputs": {"json_object": True}}, json_grammar(OBJECT)),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, json_grammar(TEXT, " ?")),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, json_grammar(TEXT)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
            json_grammar(TEXT, ANY_WHITESPACE),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": "start: /x/"}}, Grammar("lark", "start: /x/")),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, json_grammar(TEXT, " ")),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
        ({"guided_grammar": "start: /x/"}, Grammar("lark", "start: /x/")),
    ],
)
def test_every_way_to_ask_reaches_the_engine(api: Api, route: str, body: dict[str, Any], grammar: Grammar) -> None:
    given = {"prompt": "x"} if route == "complete" else {}
    assert getattr(api, route)(**given, **body).status_code == 200
    assert api.engine.submitted[0].params.grammar == grammar


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        (
            {"guided_grammar": "start: /x/", "structured_outputs": {"grammar": "start: /x/"}},
            Grammar("lark", "start: /x/"),
        ),
        ({"response_format": {"type": "json_object"}, "guided_json": OBJECT}, json_grammar(OBJECT)),
    ],
)
def test_two_fields_may_ask_for_the_same(api: Api, body: dict[str, Any], grammar: Grammar) -> None:
    assert api.chat(**body).status_code == 200
    assert api.engine.submitted[0].params.grammar == grammar


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_an_operator_may_allow_unnamed_properties(make_api: Callable[..., Api], route: str) -> None:
    api = make_api(FakeEngineClient(), unnamed_properties="allow")
    given = {"prompt": "x"} if route == "complete" else {}
    assert getattr(api, route)(**given, guided_json=SCHEMA).status_code == 200
    assert api.engine.submitted[0].params.grammar == Grammar("json", TEXT, unnamed_properties="allow")


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        (
            {"response_format": "text"},
            "response_format",
            "invalid_type",
            "response_format: input should be an object, got 'text'",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format",
            "invalid_value",
            "response_format.type: input should be 'text', 'json_object' or 'json_schema', got 'structural_tag'",
        ),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema",
            "invalid_value",
            "response_format.schema may be given only with the types json_object and json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": [1]}},
            "response_format.schema",
            "invalid_type",
            "response_format.schema must be a JSON Schema: an object, true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": True}}},
            "response_format.json_schema.schema",
            "invalid_value",
            "response_format.schema and response_format.json_schema.schema may not be given together",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "invalid_value",
            "response_format.json_schema.schema must be given with the type json_schema",
        ),
        (
            of_format([1]),
            "response_format.json_schema.schema",
            "invalid_type",
            "response_format.json_schema.schema must be a JSON Schema: an object, true or false",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "structured_outputs.json",
            "invalid_value",
            "structured_outputs.json is not valid JSON: ",
        ),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs",
            "invalid_value",
            "structured_outputs must have one of json, json_object, regex, choice and grammar",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "invalid_value",
            "structured_outputs.regex and structured_outputs.choice may not be given together",
        ),
        (
            {"guided_json": {"const": 1}, "structured_outputs": {"json": {"const": True}}},
            "guided_json",
            "invalid_value",
            "structured_outputs.json and guided_json may not be given together",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "invalid_value",
            "response_format and guided_regex may not be given together",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs",
            "invalid_value",
            "structured_outputs.choice: ",
        ),
        (
            {"guided_regex": "a" * 65537},
            "guided_regex",
            "invalid_value",
            "guided_regex may have at most 65536 characters, got 65537",
        ),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "unsupported_parameter",
            "a structural tag is not supported by this server; leave out structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "unsupported_parameter",
            "closing the objects of a schema is not supported by this server; leave out "
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"structured_outputs": {"regexp": "a"}},
            "structured_outputs.regexp",
            "unknown_parameter",
            "unknown field structured_outputs.regexp; did you mean structured_outputs.regex?",
        ),
        (
            {"ebnf": "root ::= x"},
            "ebnf",
            "unsupported_parameter",
            "this way to ask for structured output (response_format and structured_outputs are others) is not "
            "supported by this server; leave out ebnf",
        ),
    ],
)
def test_what_is_wrong_is_told(refusing_api: Api, body: dict[str, Any], param: str, code: str, message: str) -> None:
    response = refusing_api.complete(prompt="x", **body)
    error = response.json()["error"]
    # Where a library says what is wrong, ours ends with a colon.
    assert error["message"] == message or (message.endswith(": ") and error["message"].startswith(message))
    assert error == {"message": error["message"], "type": "invalid_request_error", "param": param, "code": code}
    assert response.status_code == 400
    assert refusing_api.engine.submitted == []
