"""Random JSON Schemas whose values have a bounded length, and the check of what a model made of one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

Schema = dict[str, Any]

NAMES = ["a", "id", "name", "is it", "größe", 'quo"te', "back\\slash"]
PATTERNS = [r"^[a-c]{1,4}$", r"^\d{3}-[0-9a-f]{2}$", r"^(yes|no)$", r"^\w{2,5}$", r"^x?y+z$"]
FORMATS = ["date", "ipv4", "uuid"]


def small_integers() -> st.SearchStrategy[Schema]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 500))
    return bounds.map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]})


def small_strings() -> st.SearchStrategy[Schema]:
    lengths = st.tuples(st.integers(0, 5), st.integers(0, 8))
    return st.one_of(
        lengths.map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 12}),
        st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    )


def leaves() -> st.SearchStrategy[Schema]:
    constants = st.one_of(st.sampled_from([*NAMES, "", "ok\n"]), st.integers(-9, 99), st.none(), st.booleans())
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"$ref": "#/$defs/shared"}]),
        small_integers(),
        small_strings(),
        constants.map(lambda value: {"const": value}),
        st.lists(constants, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    )


def objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    @st.composite
    def made(draw: st.DrawFn) -> Schema:
        properties = draw(st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=3))
        required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return made()


def arrays(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(values, st.integers(0, 2), st.integers(0, 2)).map(
        lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[1] + parts[2]}
    )


def schemas() -> st.SearchStrategy[Schema]:
    """Return the strategy: nested objects and arrays, enums, references, patterns, formats and bounds."""
    nested = st.recursive(
        leaves(),
        lambda inner: st.one_of(
            objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda them: {"anyOf": them})
        ),
        max_leaves=6,
    )
    return st.tuples(objects(nested), small_integers() | objects(small_strings())).map(
        lambda pair: {**pair[0], "$defs": {"shared": pair[1]}}
    )


def assert_valid(text: str, schema: Schema) -> None:
    """Parse a text as JSON without spare whitespace, and validate it, formats too."""
    value = json.loads(text)
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
