"""Which properties a schema names, and how it is said that there are no others.

A value is described by a schema and by all that applies to the same value: its allOf, anyOf, oneOf and $ref. These
together are one unit here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gptserve.engine.grammar.schema.document import Document, Node, SchemaError
from gptserve.engine.grammar.schema.effort import Effort
from gptserve.engine.grammar.schema.keywords import count_of, listed, mapping, required_of

MAX_LOOKS = 20_000  # at schemas, for all units of a request
NAMES_PER_LOOK = 10  # which take about as long as one schema
MAX_WRITTEN = 200_000  # characters of names that rule out others; a grammar of tools has fewer altogether
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

    def add(self, other: Names) -> int:
        """Add what other schemas of the unit say, and return how many names they have."""
        self.named.update(other.named)
        self.required.update(other.required)
        self.patterns.update(other.patterns)
        self.min_properties = max(self.min_properties, other.min_properties)
        self.speaks_of_others |= other.speaks_of_others
        self.is_shut |= other.is_shut
        self.has_choices |= other.has_choices
        return len(other.named) + len(other.required) + len(other.patterns)

    @property
    def allowed(self) -> dict[str, None]:
        """All properties that a closed object may have. What is only required is no reason to leave one unevaluated."""
        return self.named if self.is_shut else {**self.named, **self.required}

    @property
    def may_be_all(self) -> bool:
        """Whether properties are named, and an object can have as many as it must have."""
        return bool(self.named) and (bool(self.patterns) or self.min_properties <= len(self.allowed))


class Units:
    """Reads the units of one document; gives up after MAX_LOOKS and before it writes more than MAX_WRITTEN."""

    def __init__(self, document: Document, effort: Effort) -> None:
        self._document = document
        self._known: dict[tuple[int, int], tuple[Node, Node, Names]] = {}  # with the schemas, so that ids stay theirs
        self._open: set[tuple[int, int]] = set()
        self._effort = effort

    def names_of(self, node: Node, base: Node) -> Names:
        """Return what a unit says of properties. Raises SchemaError."""
        names, seen, stack = Names(), set[int](), [(node, base)]
        while stack:
            node, base = stack.pop()
            base = self._document.base_of(node, base)
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self._look(_add(names, node))
            for key in ("oneOf", "anyOf", "allOf"):
                stack += [(part, base) for part in reversed(listed(node, key))]
            if "$ref" in node:
                target = self._document.resolve(node["$ref"], base)
                known = self._known_of(*target)
                if known is None:  # a circle: as a part like others
                    stack.append(target)
                else:
                    self._look(names.add(known))
        return names

    def closing(self, names: Names) -> dict[str, Any]:
        """Return a schema that does nothing but rule out other properties, for an allOf. Raises SchemaError."""
        self._effort.num_written += sum(len(name) + len(': true, ""') for name in (*names.allowed, *names.patterns))
        if self._effort.num_written > MAX_WRITTEN:
            raise SchemaError("too many properties come through $ref or allOf, anyOf and oneOf")
        schema: dict[str, Any] = {"properties": dict.fromkeys(names.allowed, True)}
        if names.patterns:
            schema["patternProperties"] = dict.fromkeys(names.patterns, True)
        return {**schema, "additionalProperties": False}

    def _known_of(self, node: Node, base: Node) -> Names | None:
        """Return what the target of a $ref names, found once; None while it is being looked for."""
        key = id(node), id(base)
        if key in self._open:
            return None
        if key not in self._known:
            self._open.add(key)
            self._known[key] = node, base, self.names_of(node, base)
            self._open.remove(key)
        return self._known[key][2]

    def _look(self, num_names: int) -> None:
        self._effort.num_read += 1 + num_names // NAMES_PER_LOOK
        if self._effort.num_read > MAX_LOOKS:
            raise SchemaError("$ref, allOf, anyOf and oneOf bring too many schemas together")


def closed(schema: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a rewritten schema without applicators that allows the properties of `names` and no others."""
    properties = {**schema.get("properties", {})}
    for name in names.allowed:
        properties.setdefault(name, True)
    return {**schema, "properties": properties, "additionalProperties": False}


def _add(names: Names, node: Mapping[str, Any]) -> int:
    """Add what one schema says, and return how many names it has."""
    names.named.update(dict.fromkeys(mapping(node, "properties")))
    names.required.update(dict.fromkeys(required_of(node)))
    names.patterns.update(dict.fromkeys(mapping(node, "patternProperties")))
    names.min_properties = max(names.min_properties, count_of(node, "minProperties"))
    unevaluated = node.get("unevaluatedProperties")
    names.is_shut |= unevaluated is False
    names.speaks_of_others |= not {"additionalProperties", "propertyNames", "const", "enum"}.isdisjoint(node)
    names.speaks_of_others |= unevaluated not in (None, False)
    names.has_choices |= "anyOf" in node or "oneOf" in node
    return sum(len(node.get(key, ())) for key in ("properties", "required", "patternProperties"))
