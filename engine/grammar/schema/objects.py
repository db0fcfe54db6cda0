"""Which properties a schema names, and how it is said that there are no others.

A value is described by a schema and by all that applies to the same value: its allOf, anyOf, oneOf and $ref. These
together are one unit here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gptserve.engine.grammar.schema.document import Document, Node
from gptserve.engine.grammar.schema.keywords import count_of, listed, mapping, required_of

APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")


@dataclass
class Names:
    """What the schemas of a unit say of the properties of an object."""

    named: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    min_properties: int = 0
    speaks_of_others: bool = False
    """another keyword, such as additionalProperties, says which others there may be"""
    is_shut: bool = False
    """unevaluatedProperties is false"""
    has_choices: bool = False
    """anyOf or oneOf"""

    @property
    def allowed(self) -> dict[str, None]:
        """All properties that a closed object may have. What is only required is no reason to leave one unevaluated."""
        return self.named if self.is_shut else {**self.named, **self.required}

    @property
    def may_be_all(self) -> bool:
        """Whether properties are named, and an object can have as many as it must have."""
        return bool(self.named) and (bool(self.patterns) or self.min_properties <= len(self.allowed))


def names_of(document: Document, node: Node, base: Node) -> Names:
    """Return what a unit says of properties. Raises SchemaError."""
    names, seen, stack = Names(), set[int](), [(node, base)]
    while stack:
        node, base = stack.pop()
        base = document.base_of(node, base)
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        _add(names, node)
        for key in ("oneOf", "anyOf", "allOf"):
            stack += [(part, base) for part in reversed(listed(node, key))]
        if "$ref" in node:
            stack.append(document.resolve(node["$ref"], base))
    return names


def closed(schema: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a rewritten schema without applicators that allows the properties of `names` and no others."""
    properties = {**schema.get("properties", {})}
    for name in names.allowed:
        properties.setdefault(name, True)
    return {**schema, "properties": properties, "additionalProperties": False}


def closing(names: Names) -> dict[str, Any]:
    """Return a schema that does nothing but rule out other properties; it stands in an allOf."""
    schema: dict[str, Any] = {"properties": dict.fromkeys(names.allowed, True)}
    if names.patterns:
        schema["patternProperties"] = dict.fromkeys(names.patterns, True)
    return {**schema, "additionalProperties": False}


def _add(names: Names, node: Mapping[str, Any]) -> None:
    names.named.update(dict.fromkeys(mapping(node, "properties")))
    names.required.update(dict.fromkeys(required_of(node)))
    names.patterns.update(dict.fromkeys(mapping(node, "patternProperties")))
    names.min_properties = max(names.min_properties, count_of(node, "minProperties"))
    unevaluated = node.get("unevaluatedProperties")
    names.is_shut |= unevaluated is False
    names.speaks_of_others |= not {"additionalProperties", "propertyNames", "const", "enum"}.isdisjoint(node)
    names.speaks_of_others |= unevaluated not in (None, False)
    names.has_choices |= "anyOf" in node or "oneOf" in node
