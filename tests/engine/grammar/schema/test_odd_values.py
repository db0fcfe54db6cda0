"""Schemas that are none: any JSON may stand at any keyword, and each is refused in words."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.engine.grammar.grammar import UnnamedProperties
from gptserve.engine.grammar.schema import rewrite as rewriting
from gptserve.engine.grammar.schema.document import SchemaError
from gptserve.engine.grammar.schema.rewrite import rewrite

SELF = {"x": {"$ref": "#"}}
COUNT = "must be a whole number that is not negative, got"


def options(*schemas: Any) -> dict[str, Any]:
    return {"oneOf": [{"type": "object", **schema} for schema in schemas]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"format": {}}, "format must be a string, got {}"),
        ({"minimum": 10**400}, "numbers beyond 9e18 are not supported together with bounds"),
        ({"type": "integer", "minimum": 10**400}, "integers beyond 2^63 are not supported"),
        ({"multipleOf": 10**400}, "multipleOf must be greater than 0 and have few digits, got 1000"),
        ({"minimum": float("inf")}, "minimum must be a number, got inf"),
        ({"$ref": "http://[x#/a"}, "$ref must be a URI, got 'http://[x'"),
        ({"$id": "http://["}, "$id must be a URI, got 'http://['"),
        ({"anyOf": [{}], "items": {"$ref": f"#/anyOf/{'9' * 5000}"}}, "$ref points to nothing, got '#/anyOf/999"),
        ({"minItems": "a"}, f"minItems {COUNT} 'a'"),
        ({"minItems": "a", "prefixItems": [{"$ref": "#"}]}, f"minItems {COUNT} 'a'"),
        ({"maxLength": -1}, f"maxLength {COUNT} -1"),
        ({"minProperties": 1.5}, f"minProperties {COUNT} 1.5"),
        ({"maxItems": True}, f"maxItems {COUNT} True"),
        ({"required": [[]]}, "required must be a list of strings, got [[]]"),
        ({"required": [[]], "properties": SELF}, "required must be a list of strings, got [[]]"),
        ({"required": ["x"], "properties": [], "items": {"$ref": "#"}}, "properties must be an object, got []"),
        (options({"required": [{}]}, {"required": ["a"]}), "required must be a list of strings, got [{}]"),
        (options({"required": 1}, {"required": ["a"]}), "required must be a list, got 1"),
        (options({"properties": [1]}, {}), "properties must be an object, got [1]"),
        (options({"properties": {"a": {}}}, {"properties": 2}), "properties must be an object, got 2"),
        ({"propertyNames": {"pattern": {}}}, "pattern must be a string, got {}"),
        ({"propertyNames": {"minLength": {}}}, f"minLength {COUNT} {{}}"),
        ({"propertyNames": 1}, "propertyNames must be a schema, got 1"),
    ],
)
def test_an_odd_value_is_refused_in_words(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        rewrite(schema, "refuse")
    assert str(caught.value).startswith(message)


def test_a_bound_beyond_all_doubles_is_none() -> None:
    assert rewrite({"type": "number", "maximum": 10**400}, "allow") == {"type": "number", "maximum": 9e18}


def test_a_whole_float_counts() -> None:
    array = {"type": "array", "minItems": 2.0, "prefixItems": [{}, {"type": "null"}, {"$ref": "#"}]}
    assert rewrite(array, "allow")["minItems"] == 2


@pytest.mark.parametrize("error", [AttributeError, KeyError, OverflowError, TypeError, ValueError])
def test_what_no_check_foresaw_is_malformed(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rewriting, "types_of", fail)
    with pytest.raises(SchemaError, match=r"^the schema is malformed$"):
        rewrite({}, "allow")


KEYS = [
    *("type", "properties", "required", "items", "prefixItems", "minItems", "maxItems", "anyOf", "oneOf", "allOf"),
    *("$ref", "$defs", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("format", "pattern", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "$id"),
    *("unevaluatedProperties", "$anchor", "if", "then", "not", "minLength", "uniqueItems", "dependentRequired"),
    *("dependentSchemas", "contains", "minContains", "$schema", "title", "discriminator"),
]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        2.0,
        10**400,
        2**70,
        float("inf"),
        "",
        "a",
        "object",
        "string",
        "number",
        "date",
    ),
    *("#", "#/$defs/a", "#/properties/a", "http://[", f"#/anyOf/{'9' * 5000}", [], {}, [1], ["a"], [[]], [{}], [None]),
    *({"a": 1}, {"a": {}}, {"a": {"type": "string"}}, [True, False], ["object", "null"], {"$ref": "#"}),
    [{"$ref": "#"}, {"type": "object", "properties": []}],
]
MAPPINGS = ("properties", "patternProperties", "$defs")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def drawn(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or (depth and rng.random() < 0.15):
        return rng.choice(ODD)
    schema = {}
    for key in rng.sample(KEYS, rng.randint(1, 4)):
        if rng.random() < 0.45:
            schema[key] = rng.choice(ODD)
        elif key in MAPPINGS:
            schema[key] = {name: drawn(rng, depth + 1) for name in "ab"}
        elif key in LISTS:
            schema[key] = [drawn(rng, depth + 1) for _ in range(2)]
        else:
            schema[key] = drawn(rng, depth + 1)
    return schema


@pytest.mark.some(40)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("beside", [{}, {"not": {"$ref": "#"}}, {"oneOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}])
def test_any_value_at_a_keyword_is_followed_or_refused(key: str, beside: dict[str, Any]) -> None:
    for value in ODD:
        with suppress(SchemaError):
            rewrite({"$defs": {"a": {"type": "object", key: value}}, **beside, key: value}, "refuse")


@given(st.integers(0, 2**32), st.sampled_from(["allow", "refuse"]))
def test_odd_values_at_many_keywords_are_followed_or_refused(seed: int, unnamed: UnnamedProperties) -> None:
    rng = random.Random(seed)
    with suppress(SchemaError):
        rewrite({**drawn(rng), "$defs": {"a": drawn(rng, 2), "b": drawn(rng, 2)}}, unnamed)
