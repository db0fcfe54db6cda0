"""Arguments that a format writes one by one, as texts: makes the JSON object of a call of them, as they arrive.

The JSON Schema of a tool tells what a text stands for: a string as it is, or else JSON, or a literal of Python, which
models write, too. A text that is neither stays a string, as in the parsers that came with the models. The formats call
it; `value_rules.py` has the grammar of the same values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic_core import from_json

from gptserve.server.tools.parts import Parts
from gptserve.server.tools.python_literal import literal_as_json
from gptserve.server.tools.tape import Steps, Tape
from gptserve.weights.chat.arguments import escape_controls

Kind = Literal["text", "text or null", "json"]
"""How a value is written: as it is; so or as null; as JSON."""

Kinds = Mapping[str, Kind]
"""From the names of a tool's arguments to how they are written; others are JSON or else a text."""

Tools = Mapping[str, Kinds]
"""The tools that an answer may call, by name."""

Schema = Mapping[str, Any]

_ALL = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_REFS = 16  # one after the other
_NOTHING: Schema = {}
_NULLS = "null", "None"
_LITERALS = "[", "{", "True", "False", "None"  # "+49" or "(5)" is rather a text
_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def kinds_of(schema: Schema) -> Kinds:
    """Return how the arguments are written that a JSON Schema names."""
    properties = _resolved(schema, schema).get("properties")
    seen: dict[int, frozenset[str]] = {}
    named = properties.items() if isinstance(properties, Mapping) else ()
    return {name: _kind_of(_types(part, schema, seen)) for name, part in named}


def to_json(text: str, *, is_text: bool = False) -> str:
    """Return the JSON of a value that is written as a text; with is_text it is a string or null."""
    stripped = text.strip()
    if is_text:
        return "null" if stripped in _NULLS else json.dumps(text, ensure_ascii=False)
    written = escape_controls(stripped)
    try:
        from_json(written, allow_inf_nan=False)
    except ValueError:
        found = literal_as_json(stripped) if stripped.startswith(_LITERALS) else None
        return json.dumps(text, ensure_ascii=False) if found is None else found
    return written


class ArgumentWriter:
    """Writes the arguments of a call as a JSON object. Call `key`, then a method that reads its value, and so on."""

    def __init__(self, parts: Parts, kinds: Kinds) -> None:
        self._parts, self._kinds = parts, kinds
        self._name = ""
        self._num_written = 0

    def key(self, name: str) -> None:
        """Begin an argument."""
        self._name = name
        before = ", " if self._num_written else "{"
        self._parts.add_arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_written += 1

    def end(self) -> None:
        """End the object."""
        self._parts.add_arguments("}" if self._num_written else "{}")

    def value(self, text: str) -> None:
        """Write the JSON of a value."""
        self._parts.add_arguments(text)

    def read(self, tape: Tape, ends: tuple[str, ...], kind: Kind | None = None) -> Steps[str]:
        """Read a value up to one of the marks, which is returned, or "" at the end of the answer.

        The kind is that of the argument unless it is given. Strings are passed on as they arrive.
        """
        kind = self._kinds.get(self._name, "json") if kind is None else kind
        pieces: list[str] = []
        if kind == "text or null" and not (yield from _sees_null(tape, ends)):
            kind = "text"
        if kind != "text":
            end = yield from tape.pass_until(ends, pieces.append)
            self.value(to_json("".join(pieces), is_text=kind == "text or null"))
            return end
        self.value('"')
        end = yield from tape.pass_until(ends, self._add_text)
        if end:
            self.value('"')
        return end

    def _add_text(self, text: str) -> None:
        self.value(json.dumps(text, ensure_ascii=False)[1:-1])


def _sees_null(tape: Tape, ends: Iterable[str]) -> Steps[bool]:
    """Return whether null comes next, and then one of the marks."""
    for null in _NULLS:
        for end in ends:
            if (yield from tape.sees(null + end)):
                return True
    return False


def _kind_of(types: frozenset[str]) -> Kind:
    return "text" if types == {"string"} else "text or null" if types == {"string", "null"} else "json"


def _types(schema: object, root: Schema, seen: dict[int, frozenset[str]]) -> frozenset[str]:
    """Return the types that values of a schema may have; all of them if it does not say. Each schema is read once."""
    schema = _resolved(schema, root)
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = frozenset()  # what leads back to itself adds no type
    types, given = _ALL, schema.get("type")
    if isinstance(given, str | list):
        types = frozenset(kind for kind in ([given] if isinstance(given, str) else given) if isinstance(kind, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types &= {_TYPES.get(type(value), "null") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            found = [_types(part, root, seen) for part in parts]
            types &= frozenset.intersection(*found) if key == "allOf" else frozenset.union(*found)
    seen[id(schema)] = types
    return types


def _resolved(schema: object, root: Schema) -> Schema:
    """Return the schema that a schema refers to within the root; an empty one if it is none."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping):
            break
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return schema
        schema = _at(root, ref)
    return _NOTHING


def _at(root: object, ref: str) -> object:
    """Return what a reference within the root points to; None for anything else."""
    if not ref.startswith("#"):
        return None
    for step in filter(None, ref[1:].split("/")):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
