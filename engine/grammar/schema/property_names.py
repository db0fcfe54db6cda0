"""propertyNames in the keywords that llguidance has: which names, and the schemas of what they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptserve.engine.grammar.schema.document import Document, Node, SchemaError
from gptserve.engine.grammar.schema.keywords import count_of, listed, mapping, text_of

_OF_NAMES = frozenset({"pattern", "minLength", "maxLength"})


def without_property_names(document: Document, node: Mapping[str, Any], base: Node) -> Mapping[str, Any]:
    """Return a schema that says what its propertyNames do in other words. Raises SchemaError."""
    if "propertyNames" not in node:
        return node
    rest = {key: value for key, value in node.items() if key != "propertyNames"}
    names, _ = document.follow(node["propertyNames"], base)
    if not isinstance(names, bool | dict):
        raise SchemaError(f"propertyNames must be a schema, got {names!r}")
    if names is False:
        return {**rest, "maxProperties": 0}
    rules = (
        {}
        if not isinstance(names, dict)
        else {key: names[key] for key in names if key in (*_OF_NAMES, "const", "enum")}
    )
    if not rules:
        others = {"allOf", "anyOf", "oneOf", "not", "$ref"} & (names.keys() if isinstance(names, dict) else set())
        if others:
            raise _unsupported(f"with {min(others)}")
        return rest
    if "const" in rules or "enum" in rules:
        return _listed_names(rest, [rules["const"]] if "const" in rules else listed(rules, "enum"))
    if "properties" in node or "patternProperties" in node:
        raise _unsupported("with a pattern or a length beside properties")
    return {
        **rest,
        "patternProperties": {_pattern(rules): rest.get("additionalProperties", True)},
        "additionalProperties": False,
    }


def _listed_names(node: Mapping[str, Any], values: list[Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the names listed."""
    if "patternProperties" in node:
        raise _unsupported("with a list beside patternProperties")
    own, others = mapping(node, "properties"), node.get("additionalProperties", True)
    names = [value for value in values if isinstance(value, str)]
    kept = {name: own[name] for name in own if name in names}
    named = {**kept, **{name: others for name in names if name not in kept}}
    return {**node, "properties": named, "additionalProperties": False}


def _pattern(rules: Mapping[str, Any]) -> str:
    if "pattern" in rules and len(rules) == 1:
        return text_of(rules, "pattern")
    if "pattern" in rules:
        raise _unsupported("with a pattern and a length")
    most = count_of(rules, "maxLength") if "maxLength" in rules else ""
    return f"^(?s:.{{{count_of(rules, 'minLength')},{most}}})$"


def _unsupported(what: str) -> SchemaError:
    return SchemaError(f"propertyNames {what} is not supported")
