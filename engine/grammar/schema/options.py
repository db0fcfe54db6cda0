"""The options of a oneOf: may two of them match one value? Where none may, a oneOf is an anyOf.

`rewrite.py` asks. The answer is "they cannot" only where the schemas show it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from gptserve.engine.grammar.schema.document import Document, Node, SchemaError, list_of, types_of
from gptserve.engine.grammar.schema.effort import Effort
from gptserve.engine.grammar.schema.keywords import mapping, required_of

MAX_LOOKS = 20_000
VALUES_PER_LOOK = 20
MAX_DEPTH = 12

Placed = tuple[Node, Node]
"""A schema and the base of its references."""


class Options:
    """Compares options of one document; its request gives up after MAX_LOOKS."""

    def __init__(self, document: Document, effort: Effort) -> None:
        self._document = document
        self._effort = effort
        self._texts: dict[int, tuple[Node, list[str] | None, set[str]]] = {}  # with the schemas of the ids

    def are_apart(self, options: Sequence[Placed]) -> bool:
        """Whether no value can match two of the options."""
        if self._tag(options, must_have=True) is not None:
            return True
        lists = [self._literals(option) for option in options]
        values = [value for literals in lists for value in literals or ()]
        if None not in lists and len(values) == len({*values}):
            return True
        return all(self._apart(one, other) for one, other in combinations(options, 2))

    def common_tag(self, options: Sequence[Placed]) -> str | None:
        """Return a property that tells the options apart wherever it is given; None without one."""
        return self._tag(options, must_have=False)

    def _tag(self, options: Sequence[Placed], *, must_have: bool) -> str | None:
        """Return a property whose values are listed in each option, and in one only."""
        found = [self._document.follow(*option) for option in options]
        if len(found) < 2 or not all(isinstance(node, dict) and types_of(node) == ("object",) for node, _ in found):
            return None
        for name in mapping(found[0][0], "properties"):
            values: list[str] = []
            num_given = 0
            for node, base in found:
                if must_have and name not in required_of(node):
                    break
                literals = self._literals((mapping(node, "properties").get(name, True), base))
                self._look(len(node.get("required", ())) + len(literals or ()))
                if literals is None:
                    break
                values += literals
                num_given += 1
            if num_given == len(found) and len(values) == len({*values}):
                return name
        return None

    def _literals(self, placed: Placed) -> list[str] | None:
        """Return the values of a const or an enum, as text; None for a schema with others."""
        node, _ = self._document.follow(*placed)
        if not isinstance(node, dict) or not {"const", "enum"} & node.keys():
            return None
        if id(node) not in self._texts:
            values = [node["const"]] if "const" in node else node["enum"]
            texts = sorted({_text(value) for value in values}) if isinstance(values, list) else None
            self._texts[id(node)] = node, texts, {_kind(value) for value in values} if texts is not None else set()
        return self._texts[id(node)][1]

    def _look(self, num_values: int = 0) -> None:
        self._effort.num_compared += 1 + num_values // VALUES_PER_LOOK
        if self._effort.num_compared > MAX_LOOKS:
            raise SchemaError("a oneOf has too many options to compare")

    def _apart(self, one: Placed, other: Placed, depth: int = 0) -> bool:
        self._look()
        if depth > MAX_DEPTH:
            return False
        one, other = self._document.follow(*one), self._document.follow(*other)
        if one[0] is False or other[0] is False:
            return True
        if not isinstance(one[0], dict) or not isinstance(other[0], dict):
            return False
        if any(self._parts_apart(*pair, depth + 1) for pair in ((one, other), (other, one))):
            return True
        listed = self._literals(one), self._literals(other)
        self._look(len(listed[0] or ()) + len(listed[1] or ()))
        if listed[0] is not None and listed[1] is not None:
            return set(listed[0]).isdisjoint(listed[1])
        kinds = self._kinds(one, listed[0]) & self._kinds(other, listed[1])
        return all(self._apart_as(kind, one, other, depth) for kind in kinds)

    def _parts_apart(self, one: Placed, other: Placed, depth: int) -> bool:
        """Whether a part that applies to all values of one schema keeps them from the other."""
        node, base = one
        if any(self._apart((part, base), other, depth) for part in list_of(node, "allOf")):
            return True
        return any(
            all(self._apart((part, base), other, depth) for part in list_of(node, key))
            for key in ("anyOf", "oneOf")
            if list_of(node, key)
        )

    def _kinds(self, placed: Placed, literals: Iterable[str] | None) -> set[str]:
        if literals is not None:
            return self._texts[id(self._document.follow(*placed)[0])][2]
        return {"number" if kind == "integer" else kind for kind in types_of(placed[0])}

    def _apart_as(self, kind: str, one: Placed, other: Placed, depth: int) -> bool:
        """Whether no value of a type matches both."""
        if kind == "object":
            return self._objects_apart(one, other, depth) or self._objects_apart(other, one, depth)
        if kind == "number":
            return _below(one[0], other[0]) or _below(other[0], one[0])
        return False

    def _objects_apart(self, one: Placed, other: Placed, depth: int) -> bool:
        """Whether a property that one schema requires is never one of the other."""
        for name in required_of(one[0]):
            pair = [(_property(node, name), base) for node, base in (one, other)]
            if self._apart(pair[0], pair[1], depth + 1):
                return True
        return False


def _property(node: Mapping[str, Any], name: str) -> Node:
    named = mapping(node, "properties")
    if name in named:
        return named[name]
    return True if "patternProperties" in node else node.get("additionalProperties", True)


def _below(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    highest, lowest = one.get("maximum"), other.get("minimum")
    return isinstance(highest, int | float) and isinstance(lowest, int | float) and highest < lowest


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    kinds = ((str, "string"), (dict, "object"), (list, "array"))
    return next((kind for made, kind in kinds if isinstance(value, made)), "number")


def _text(value: Any) -> str:
    """Return a JSON value as text; equal numbers have the same."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_text(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return json.dumps(value)
