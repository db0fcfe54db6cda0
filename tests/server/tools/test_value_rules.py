"""Arguments that are written one by one: their grammar allows what their schemas do, and they are read as those say."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.compiler import Compiler
from gptserve.server.tools.formats import OWN_FORMATS
from gptserve.server.tools.values import kinds_of, to_json
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.server.tools.test_grammar import (
    allows,
    compiler,
    folder,
    reading_of,
    split,
    tokenizer,
    write_at_random,
)

__all__ = ["compiler", "folder", "tokenizer"]  # fixtures
BY_VALUE = [name for name, form in OWN_FORMATS.items() if form.arguments is not None]
DEFS = {"text": {"type": "string", "maxLength": 3}, "day": {"type": "integer", "minimum": 1, "maximum": 31}}
VALUES: dict[str, Any] = {
    "short": {"type": "string", "minLength": 1, "maxLength": 4},
    "enum": {"enum": ["a", "a b", "Å.*", ""]},
    "const": {"const": "x"},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}[0-9]$"},
    "inner": {"type": "string", "pattern": "b+", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "moment": {"type": "string", "format": "date-time"},
    "id": {"type": "string", "format": "uuid"},
    "ref": {"$ref": "#/$defs/text"},
    "optional": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
    "choice": {"type": ["string", "null"], "enum": ["a", None]},
    "day": {"$ref": "#/$defs/day"},
    "switch": {"type": "boolean"},
    "nothing": {"type": "null"},
    "mixed": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": ["all", "5"]}]},
    "list": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
    "object": {"type": "object", "properties": {"a": {"const": True}}, "additionalProperties": False},
}


def parameters(*required: str, names: tuple[str, ...] = tuple(VALUES), **more: Any) -> dict[str, Any]:
    properties = {name: VALUES[name] for name in names}
    return {"type": "object", "properties": properties, "required": list(required), "$defs": DEFS, **more}


def tools_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }


@pytest.mark.some(6)
@pytest.mark.parametrize("kind", BY_VALUE)
@pytest.mark.parametrize("name", VALUES)
def test_each_value_keeps_to_its_schema(compiler: Compiler, tokenizer: Tokenizer, kind: str, name: str) -> None:
    for seed in range(4):
        assert list(written(compiler, tokenizer, kind, parameters(name, names=(name,)), seed)) == [name]


def written(compiler: Compiler, tokenizer: Tokenizer, kind: str, schema: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of a call that is written at random; they match the schema."""
    reading = reading_of(tokenizer, kind, **tools_of(schema))
    assert reading.grammar is not None
    ids = write_at_random(compiler.compile(reading.grammar), random.Random(seed))
    assert ids is not None
    delta = split(reading, tokenizer, ids)
    [call] = delta.tool_calls
    assert delta.text.strip() == ""
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, schema)
    return dict(arguments)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", BY_VALUE)
def test_arguments_may_be_left_out_unless_they_are_required(
    compiler: Compiler, tokenizer: Tokenizer, kind: str
) -> None:
    names = ("enum", "const", "day", "switch")
    found = [written(compiler, tokenizer, kind, parameters("const", names=names), seed) for seed in range(12)]
    assert {len(arguments) for arguments in found} >= {2, 3}
    assert all("const" in arguments for arguments in found)
    assert all(list(arguments) == [name for name in names if name in arguments] for arguments in found)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", BY_VALUE)
@pytest.mark.parametrize("others", [VALUES["day"], {"type": "string", "maxLength": 2}, VALUES["mixed"]])
def test_other_arguments_keep_to_the_schema_of_others(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, others: dict[str, Any]
) -> None:
    schema = parameters("const", names=("const",), additionalProperties=others)
    lengths = {len(written(compiler, tokenizer, kind, schema, seed)) for seed in range(6)}
    assert max(lengths) > 1


QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        ({"type": "string"}, "a\n\nb </param <tool_call>", True),
        ({"type": "string"}, "", True),
        ({"type": "string"}, "a</parameter>", False),
        ({"type": "string", "maxLength": 2}, "abc", False),
        ({"type": "integer"}, "5", True),
        ({"type": "integer"}, '"5"', False),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"], "maxLength": 2}, "null", True),
        ({"type": ["string", "null"], "maxLength": 2}, "nulls", False),
        ({"type": "string", "format": "date"}, "2026-02-29", False),
        ({"type": "string", "format": "date"}, "2026-11-30", True),
        ({"enum": ["a.c"]}, "abc", False),
        ({"type": ["string", "integer"]}, '"x"', True),
    ],
)
def test_a_grammar_of_elements_allows_what_the_schema_does(
    compiler: Compiler, tokenizer: Tokenizer, schema: dict[str, Any], text: str, is_allowed: bool
) -> None:
    body = tools_of({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    reading = reading_of(tokenizer, "qwen-coder", **body)
    assert reading.grammar is not None
    ids = tokenizer.encode(QWEN.format(f"<parameter=a>\n{text}\n</parameter>\n"))
    assert allows(compiler.compile(reading.grammar), ids) is is_allowed
    if is_allowed:
        [call] = split(reading, tokenizer, ids).tool_calls
        jsonschema.validate(json.loads(call.arguments), body["tools"][0]["function"]["parameters"])


@pytest.mark.parametrize("line", ["\n", ""])
def test_a_model_of_glm_may_leave_the_line_ends_out(compiler: Compiler, tokenizer: Tokenizer, line: str) -> None:
    reading = reading_of(tokenizer, "glm", **tools_of(parameters("short", "day", names=("short", "day"))))
    assert reading.grammar is not None
    pair = f"<arg_key>{{}}</arg_key>{line}<arg_value>{{}}</arg_value>{line}"
    ids = tokenizer.encode_with_special(
        f"<tool_call>f{line}{pair.format('short', 'x')}{pair.format('day', 5)}</tool_call>"
    )
    assert allows(compiler.compile(reading.grammar), ids)
    [call] = split(reading, tokenizer, ids).tool_calls
    assert call.arguments == '{"short": "x", "day": 5}'


def test_a_strict_function_beside_others_may_have_any_argument_if_it_is_not_strict(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters()}}]
    reading = reading_of(tokenizer, "qwen-coder", tools=tools, parallel_tool_calls=False)
    assert reading.grammar is not None
    text = QWEN.format("<parameter=short>\nmuch longer\n</parameter>\n<parameter=other>\n5\n</parameter>\n")
    ids = tokenizer.encode(text)
    assert allows(compiler.compile(reading.grammar), ids)
    [call] = split(reading, tokenizer, ids).tool_calls
    assert call.arguments == '{"short": "much longer", "other": 5}'


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf is not supported for arguments that this model writes one by one"),
        ({"properties": {"a b": True}}, "the name 'a b' is not supported"),
        ({"properties": {"a": {"type": "string", "format": "ipv6"}}}, "the format ipv6 is not supported"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "a pattern with ^ or $ and |"),
        (
            {"properties": {"a": {"type": "string", "allOf": [{"minLength": 1}]}}},
            "allOf is not supported for a string",
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"const": "a"}]}}},
            "anyOf is not supported for a string",
        ),
    ],
)
def test_what_a_text_cannot_keep_to_is_refused_by_name(
    tokenizer: Tokenizer, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^the parameters of the function 'f' cannot be compiled: "
    ) as caught:
        reading_of(tokenizer, "qwen-coder", **tools_of({"type": "object", **schema}))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "text"),
        ({"enum": ["a", "b"]}, "text"),
        ({"const": None}, "json"),
        ({"type": ["null", "string"]}, "text or null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text or null"),
        ({"oneOf": [{"const": "a"}, {"$ref": "#/$defs/text"}]}, "text"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "text"),
        ({"type": ["string", "integer"]}, "json"),
        ({"type": "string", "enum": ["a", None]}, "text"),
        ({"$ref": "#/$defs/tree"}, "text"),
        ({"$ref": "#/$defs/a~1b"}, "text"),
        ({"$ref": "#/$defs/none"}, "json"),
        ({"$ref": "elsewhere"}, "json"),
        ({"$ref": "#/properties/x"}, "json"),
        ({}, "json"),
        (True, "json"),
        ({"type": 5, "enum": "a", "anyOf": {}}, "json"),
    ],
)
def test_the_schema_tells_how_a_value_is_written(schema: Any, kind: str) -> None:
    tree = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/tree"}]}
    root = {"properties": {"x": schema}, "$defs": {**DEFS, "tree": tree, "a/b": DEFS["text"]}}
    assert kinds_of(root) == {"x": kind}


def test_a_schema_that_refers_to_itself_in_many_ways_is_read_once() -> None:
    many = {"anyOf": [{"anyOf": [{"$ref": "#/$defs/a"}] * 9}] * 9}
    assert kinds_of({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": many}}) == {"x": "json"}
    assert kinds_of({"properties": ["x"]}) == kinds_of({}) == kinds_of({"$ref": "#/x"}) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 5\n", "5"),
        ('{"a": "1\n2"}', '{"a": "1\\u000a2"}'),
        ("[1, 'a', (True, None), {'k': -2.}]", '[1, "a", [true, null], {"k": -2.0}]'),
        ("{'a': b}", "\"{'a': b}\""),
        ("[" * 100, json.dumps("[" * 100)),
        ("{1: 2}", '"{1: 2}"'),
        ("NaN", '"NaN"'),
        ("True story", '"True story"'),
        ("é", '"é"'),
        ("['\\ud83d\\ude00\\N']", '["\\ud83d\\ude00\\\\N"]'),
    ],
)
def test_a_text_is_json_or_python_or_a_string(text: str, expected: str) -> None:
    assert to_json(text) == expected
    json.loads(expected)
