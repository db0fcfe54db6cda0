"""Schemas as llguidance gets them: what they still say, and which are refused. `test_numbers.py` has the bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.grammar.compiler import Compiler, GrammarError
from gptserve.engine.grammar.grammar import Grammar, UnnamedProperties
from gptserve.engine.grammar.schema.document import Document, SchemaError
from gptserve.engine.grammar.schema.rewrite import rewrite
from tests.engine.grammar.schema.test_numbers import writes

COMPILER = Compiler(Path(__file__).parents[4] / "weights" / "storyteller")
NULL = {"type": "null"}
CLOSED = {"additionalProperties": False}


def language(schema: Any, unnamed: UnnamedProperties, values: list[Any]) -> list[Any]:
    """Return those of the values that the grammar of a schema can write."""
    matcher = COMPILER.compile(Grammar("json", json.dumps(schema), unnamed_properties=unnamed))
    return [
        value
        for value in values
        if writes(matcher.copy(), json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    ]


A, AB, AZ, Z = {"a": None}, {"a": None, "b": None}, {"a": None, "z": 1}, {"z": 1}
OF_A = {"type": "object", "properties": {"a": NULL}}
OF_B = {"properties": {"b": NULL}}


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("schema", "refused", "allowed"),
    [
        (OF_A, [{}, A], [{}, A, AZ, Z]),
        ({"type": "object", "properties": {}}, [{}, A, AB, AZ, Z], None),
        ({"type": "object"}, [{}, A, AB, AZ, Z], None),
        ({**OF_A, "additionalProperties": True}, [{}, A, AB, AZ, Z], None),
        ({**OF_A, "additionalProperties": {"type": "integer"}}, [{}, A, AZ, Z], None),
        ({**OF_A, "unevaluatedProperties": True}, [{}, A, AB, AZ, Z], None),
        ({**OF_A, "unevaluatedProperties": False}, [{}, A], [{}, A]),
        ({**OF_A, "patternProperties": {"^z": {"type": "integer"}}}, [{}, A, AZ, Z], None),
        ({**OF_A, "required": ["z"]}, [AZ, Z], [AZ, Z]),
        ({**OF_A, "propertyNames": {"enum": ["a", "z"]}}, [{}, A, AZ, Z], None),
        ({**OF_A, "minProperties": 2}, None, None),
        ({"allOf": [OF_A, OF_B]}, [{}, A, AB], [{}, A, AB, AZ, Z]),
        ({"$ref": "#/$defs/x", **OF_B, "$defs": {"x": OF_A}}, [{}, A, AB], [{}, A, AB, AZ, Z]),
        ({"anyOf": [OF_A, {"type": "integer"}]}, [{}, A], [{}, A, AZ, Z]),
        ({**OF_A, "anyOf": [{"required": ["a"]}, {**OF_B, "required": ["b"]}]}, [A, AB], None),
        ({"type": "object", "required": ["b"], "anyOf": [OF_A, OF_B]}, [AB], None),
        ({"type": "object", "properties": {"o": OF_A}}, [{}], [{}, A, AZ, Z]),
        ({"const": A, "properties": {"b": NULL}}, [A], [A]),
    ],
)
def test_an_object_that_names_properties_has_no_others_unless_it_says_so(
    schema: Any, refused: list[Any] | None, allowed: list[Any] | None
) -> None:
    values = [{}, A, AB, AZ, Z]
    if refused is not None:
        assert language(schema, "refuse", values) == [v for v in values if v in refused]
    if allowed is not None:
        assert [v for v in allowed if v in language(schema, "allow", values)] == allowed


def test_more_properties_than_are_named_may_be_asked_for() -> None:
    assert "additionalProperties" not in rewrite({**OF_A, "minProperties": 2}, "refuse")
    merged = {"type": "object", "allOf": [{**OF_A, "minProperties": 3}, {**OF_B, "minProperties": 1}]}
    assert "additionalProperties" not in json.dumps(rewrite(merged, "refuse"))


def test_recursive_objects_are_closed_at_every_level() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}, "a": NULL}}
    values = [{"next": {"next": A}}, {"next": {"next": Z}}, {"next": AZ}, {}]
    assert language({"$ref": "#/$defs/n", "$defs": {"n": node}}, "refuse", values) == [values[0], {}]


def test_a_base_of_others_stays_open_where_it_is_one() -> None:
    defs = {"base": OF_A, "child": {"allOf": [{"$ref": "#/$defs/base"}, OF_B]}}
    schema = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/child"}]}, "$defs": defs}
    assert language(schema, "refuse", [[AB], [A], [AZ]]) == [[AB], [A]]
    assert language({"$ref": "#/$defs/base", "$defs": defs}, "refuse", [A, AB]) == [A]


TAGGED = [
    {"type": "object", "properties": {"t": {"const": tag}, "a": NULL}, "required": ["t"]} for tag in ("cat", "dog")
]
UNTAGGED = [{key: option[key] for key in ("type", "properties")} for option in TAGGED]
REFERRED = {"$defs": {"cat": UNTAGGED[0], "dog": UNTAGGED[1]}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [NULL, {"type": "integer"}]}, [None, 1], ["x"]),
        ({"oneOf": [NULL, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "string"}}}, [None, "x"], [1]),
        ({"oneOf": TAGGED}, [{"t": "cat", "a": None}, {"t": "dog"}], [{}, {"t": "cow"}]),
        ({"oneOf": UNTAGGED}, [{"t": "cat", "a": None}, {"t": "dog"}], [{}, {"a": None}]),
        (
            {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], **REFERRED},
            [{"t": "cat", "a": None}, {"t": "dog"}],
            [{}, {"a": None}],
        ),
        ({"oneOf": [{"enum": [1, "a"]}, {"enum": ["b", 2.5]}]}, [1, "a", "b", 2.5], ["c"]),
        ({"oneOf": [{"const": True}, {"const": 1}]}, [True, 1], [False]),
        ({"oneOf": [{"type": "integer", "maximum": 1}, {"type": "number", "minimum": 2}]}, [0, 2.5], [1.5]),
        ({"anyOf": [{"type": "string"}], "oneOf": [NULL, {"type": ["string", "boolean"]}]}, ["x"], [None, True]),
        ({"oneOf": [{"type": "integer"}]}, [1], ["x"]),
        (
            {"type": "object", "required": ["t"], "oneOf": [{"properties": {"t": {"const": n}}} for n in (1, 2)]},
            [{"t": 1}, {"t": 2}],
            [{}, {"t": 3}],
        ),
    ],
)
def test_options_that_cannot_both_match_are_taken(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert language(schema, "refuse", [*good, *bad]) == good


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "string"}, {"enum": ["a"]}],
        [OF_A, {"type": "object", **OF_B}],
        [{}, NULL],
        [{"$ref": "#"}, NULL],
    ],
)
def test_options_that_may_both_match_are_refused(options: list[Any]) -> None:
    with pytest.raises(SchemaError, match=r"^oneOf is supported only where no value can match two of its options, "):
        rewrite({"oneOf": options}, "refuse")


LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": LOOP},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    ],
)
def test_what_leads_back_to_itself_for_ever_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="no JSON of finite length matches the schema"):
        rewrite(schema, "refuse")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}, "a": NULL}, "$defs": LOOP}, [{}, A], [{"x": 1}]),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": LOOP}, [[]], [[1]]),
        ({"anyOf": [{"$ref": "#/$defs/a"}, NULL], "$defs": LOOP}, [None], [1]),
        ({"anyOf": [{"$ref": "#"}, NULL]}, [None], [1]),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[]]], [[1]]),
        ({"properties": {"type": {"$ref": "#/$defs/$ref"}}, "$defs": {"$ref": NULL}}, [{"type": None}], [{"type": 1}]),
        ({"$id": "http://x/y", "$ref": "y#/$defs/a%20b", "$defs": {"a b": NULL}}, [None], [1]),
        ({"$ref": "#at", "$defs": {"x": {"$anchor": "at", "type": "null"}}}, [None], [1]),
        ({"$ref": "item", "$defs": {"x": {"$id": "item", "$ref": "#/$defs/y", "$defs": {"y": NULL}}}}, [None], [1]),
        ({"prefixItems": [NULL], "items": {"$ref": "#/prefixItems/0"}, "minItems": 1}, [[None, None]], [[], [1]]),
        ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {"type": "integer"}}}, [3], [2, "x"]),
    ],
)
def test_references_are_followed(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert language(schema, "allow", [*good, *bad]) == good


@pytest.mark.parametrize(
    "schema",
    [
        {**OF_A, "required": ["z"], "unevaluatedProperties": False},
        {**OF_A, "required": ["z"], "propertyNames": {"enum": ["a"]}},
    ],
)
def test_what_is_required_and_not_allowed_never_comes(schema: Any) -> None:
    with pytest.raises(GrammarError, match="required property 'z' is unsatisfiable"):
        COMPILER.compile(Grammar("json", json.dumps(schema), unnamed_properties="refuse"))


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("https://example.com/x", "$ref must point into the schema itself, got 'https://example.com/x'"),
        ("#/$defs/none", "$ref points to nothing, got '#/$defs/none'"),
        ("#nowhere", "$ref points to nothing, got '#nowhere'"),
        (7, "$ref must be a string, got 7"),
    ],
)
def test_references_to_nothing_are_refused(ref: object, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        rewrite({"type": "array", "items": {"$ref": ref}}, "refuse")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": NULL}, [A, AB], [Z]),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NULL}, [{}, A, AB], [AZ]),
        ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "z"}}}, [{}, Z], [A]),
        ({"propertyNames": {"enum": ["a"]}, "properties": {"a": NULL, "z": {}}}, [{}, A], [Z]),
        ({"propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": NULL}, [{}, A, AB], [Z]),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{}, {"aé\n": 1}], [A, {"abcd": 1}]),
        ({"propertyNames": False}, [{}], [A]),
        ({"propertyNames": {"format": "uuid"}}, [{}, A], []),
    ],
)
def test_names_of_properties_may_have_rules(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert language({"type": "object", **schema}, "allow", [*good, *bad]) == good


@pytest.mark.parametrize("name", ["byte", "binary", "password", "uri-reference", "int32", "float", "nope"])
def test_unknown_formats_are_annotations(name: str) -> None:
    assert rewrite({"type": "string", "format": name}, "refuse") == {"type": "string"}
    assert rewrite({"type": "string", "format": "date"}, "refuse") == {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    "idle",
    [
        *({"uniqueItems": False}, {"not": False}, {"then": False}, {"if": {}}, {"minContains": 2}),
        *({"unevaluatedItems": True}, {"title": "x"}, {"default": 1}, {"discriminator": {"propertyName": "t"}}),
    ],
)
def test_keywords_that_ask_for_nothing_are_left_out(idle: dict[str, Any]) -> None:
    assert rewrite({"type": "array", **idle}, "refuse") == {"type": "array"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"items": {"const": 2**60 + 1}}}}, "properties.a.items.const: an integer beyond 2^53 "),
        ({"properties": {"a": 1}}, "properties.a: a schema must be an object, true or false, got 1"),
        ({"type": []}, "type must be one of null, boolean, "),
        ({"required": "a"}, "required must be a list, got 'a'"),
        ({"properties": []}, "properties must be an object, got []"),
        ({"unevaluatedProperties": NULL}, "unevaluatedProperties must be true or false"),
        ({"anyOf": [OF_A], **CLOSED, "unevaluatedProperties": False}, "unevaluatedProperties: false is not supported "),
        ({"propertyNames": {"not": {}}}, "propertyNames with not is not supported"),
        ({"propertyNames": {"pattern": "a"}, **OF_A}, "propertyNames with a pattern or a length beside properties is "),
        ({"propertyNames": {"pattern": "a", "maxLength": 1}}, "propertyNames with a pattern and a length is not "),
        (
            {"propertyNames": {"enum": []}, "patternProperties": {}},
            "propertyNames with a list beside patternProperties",
        ),
        ({"oneOf": [{"type": "string", "title": str(i)} for i in range(9)]}, "oneOf is supported only where "),
        (
            {"oneOf": [{"type": "integer", "minimum": i, "maximum": i} for i in range(300)]},
            "a oneOf has too many options to compare",
        ),
        (nested(2000), "the schema is nested too deep"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        rewrite(schema, "refuse")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("unnamed", ["allow", "refuse"])
def test_a_rewritten_schema_says_the_same_again(unnamed: UnnamedProperties) -> None:
    schema = {**OF_A, "properties": {"a": {"oneOf": [NULL, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}]}}}
    once = rewrite(schema, unnamed)
    assert rewrite(once, unnamed) == once


@pytest.mark.parametrize("order", [1, -1, 7], ids=["forwards", "backwards", "mixed"])
@pytest.mark.parametrize("last", [{"type": "string"}, {"$ref": "#/$defs/0"}], ids=["ends", "leads back"])
def test_a_long_chain_of_references_is_looked_at_twice_in_any_order(
    order: int, last: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, num_looks = 300, 0
    explains = Document._explains

    def counted(*arguments: Any) -> bool:
        nonlocal num_looks
        num_looks += 1
        return explains(*arguments)

    monkeypatch.setattr(Document, "_explains", counted)
    chain = {
        str(i): {"type": "object", "required": ["x"], "properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}}
        for i in (place * order % num for place in range(num))
    }
    document = Document({"$ref": "#/$defs/0", "$defs": {**chain, str(num): last}})
    assert document.is_finite(document.root) is ("type" in last)
    assert num_looks <= 2 * (2 * num + 2)
