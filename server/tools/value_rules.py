"""The grammar of arguments that a format writes one by one, as texts: `values.py` reads them.

A string is written as it is, and keeps to its schema by a regex; any other value is JSON. A string whose schema says
more than a regex can is refused. The formats call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptserve.engine.grammar.schema.document import Node, SchemaError
from gptserve.server.tools.format import Arguments, literal, regex
from gptserve.server.tools.values import Kind

_NAME = r"[a-zA-Z0-9_.-]{1,64}"
_KNOWN = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "$schema"))
_OF_TEXT = frozenset(("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "anyOf", "$ref"))
_DATE = r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-zA-Z0-9_+-]{1,32}(\.[a-zA-Z0-9_+-]{1,16})?@[a-z0-9]{1,32}(\.[a-z0-9]{1,16}){1,3}",
}
_MAX_REFS = 16  # one after the other


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """How a format spells an argument, in symbols of Lark: `before`, its name, what comes after that by its kind, the
    value, `end`, `between`. No text has the mark that `end` holds.
    """

    before: str
    after: Mapping[Kind, str]
    end: str
    between: str
    mark: str


@dataclass(frozen=True, slots=True)
class Shape:
    """The arguments that a schema allows: those it names, in order, and the schema of others; False if there are none.

    `defs` are the schemas that those refer to.
    """

    named: Mapping[str, Node]
    required: frozenset[str]
    others: Node
    defs: Mapping[str, Node] = field(default_factory=dict)

    def json_rule(self, rule: str, schema: Node, options: Mapping[str, object]) -> str:
        """Return the rule of a value in JSON."""
        if schema in (True, {}):
            return f"{rule}: %json {{}}"
        defs = {"$defs": self.defs} if '"$ref"' in json.dumps(schema) else {}
        return f"{rule}: %json {json.dumps({**schema, **defs, 'x-guidance': options})}"

    def is_boolean(self, schema: Node) -> bool:
        """Whether a value is true or false, and nothing more is asked for."""
        return isinstance(schema, Mapping) and schema.get("type") == "boolean" and schema.keys() == {"type"}

    def resolved(self, schema: Node) -> Node:
        """Return the schema that a schema refers to."""
        for _ in range(_MAX_REFS):
            if not isinstance(schema, Mapping) or schema.keys() != {"$ref"}:
                break
            schema = self.defs[schema["$ref"].removeprefix("#/$defs/")]
        return schema


def shape_of(schema: Node) -> Shape:
    """Return the shape of arguments by their rewritten schema. Raises SchemaError."""
    if not isinstance(schema, Mapping):
        raise SchemaError("it must be an object")
    found = Shape({}, frozenset(), False, schema.get("$defs", {}))
    schema = found.resolved({key: value for key, value in schema.items() if key not in ("$defs", "$schema")})
    if more := sorted(schema.keys() - _KNOWN):
        raise SchemaError(f"{more[0]} is not supported for arguments that this model writes one by one")
    named, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
    if wrong := [name for name in named if re.fullmatch(_NAME, name) is None]:
        raise SchemaError(f"the name {wrong[0]!r} is not supported for an argument that this model writes by itself")
    if unnamed := sorted(required - named.keys()):
        raise SchemaError(f"the required property {unnamed[0]!r} is not among its properties")
    return Shape(named, required, schema.get("additionalProperties", True), found.defs)


def other_names(shape: Shape) -> str:
    """Return the terminal of names that a shape does not name."""
    named = "|".join(map(exactly, shape.named))
    return regex(_NAME) + (f" & ~{regex(f'({named})')}" if named else "")


def value_rules(arguments: Arguments, syntax: ValueSyntax) -> Iterator[str]:
    """Yield the rules of arguments one after the other. Raises SchemaError."""
    rule, shape = arguments.rule, shape_of(arguments.schema)
    parts = []
    for i, (name, schema) in enumerate(shape.named.items()):
        part = f"{rule}_{i}"
        kind = arguments.kinds.get(name, "json")
        parts.append(part + ("" if name in shape.required else "?"))
        head, null = f"{syntax.before} {literal(name)}", syntax.after["json"]
        is_told = kind == "text or null" and null != syntax.after[kind]  # then a text that says null is a string
        either = f' | {head} {null} "null" {syntax.end} {syntax.between}' if is_told else ""
        yield f"{part}: {head} {syntax.after[kind]} {part}_value {syntax.between}{either}"
        yield from _value(f"{part}_value", schema, "text" if is_told else kind, shape, arguments, syntax)
    if shape.others is not False:
        part, kind = f"{rule}_other", "text" if shape.others in (True, {}) else "json"
        parts.append(part + "*")
        yield f"{part}: {syntax.before} {part.upper()} {syntax.after[kind]} {part}_value {syntax.between}"
        yield f"{part.upper()}: {other_names(shape)}"
        others = {"type": "string"} if kind == "text" else shape.others
        yield from _value(f"{part}_value", others, kind, shape, arguments, syntax)
    yield f"{rule}: {' '.join(parts) or literal('')}"


def _value(
    rule: str, schema: Node, kind: Kind, shape: Shape, arguments: Arguments, syntax: ValueSyntax
) -> Iterator[str]:
    """Yield the rules of a value and of what ends it."""
    if kind == "json":
        value = '("true" | "false" | "True" | "False")' if shape.is_boolean(schema) else f"{rule}_json"
        yield f"{rule}: {value} {syntax.end}"
        if value.endswith("_json"):
            yield shape.json_rule(value, schema, arguments.options)
        return
    # The first mark ends a text, so the rule is lazy, unless the mark is a token that no text matches.
    text = f'({rule.upper()} | "null")' if kind == "text or null" else rule.upper()
    without_mark = f"~{regex(f'(?s:.*){exactly(syntax.mark)}(?s:.*)')}"
    yield f"{rule}{'[lazy]' if syntax.end.startswith(chr(34)) else ''}: {text} {syntax.end}"
    yield f"{rule.upper()}: {_text(schema, shape, has_null=kind != 'text')} & {without_mark}"


def _text(schema: Node, shape: Shape, *, has_null: bool) -> str:
    """Return the terminal of a string's text, or of a null's. Raises SchemaError."""
    schema = shape.resolved(schema)
    if not isinstance(schema, Mapping):
        schema = {}
    if more := sorted(schema.keys() - _OF_TEXT):
        raise SchemaError(f"{more[0]} is not supported for a string that this model writes as it is")
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if texts is not None:
        given = ["null" if text is None else text for text in texts if has_null or text is not None]
        return regex(f"({'|'.join(map(exactly, given))})")
    if "anyOf" in schema:
        options = [option for option in map(shape.resolved, schema["anyOf"]) if option != {"type": "null"}]
        if len(schema) > 1 or len(options) != 1:
            raise SchemaError("anyOf is not supported for a string that this model writes as it is")
        return _text(options[0], shape, has_null=has_null)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    rules = [f"(?s:.{{{least},{most}}})"]
    if "pattern" in schema:
        rules.append(_searched(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise SchemaError(
                f"the format {schema['format']} is not supported for a string that this model writes as it is"
            )
        rules.append(_FORMATS[schema["format"]])
    return " & ".join(map(regex, rules))


def _searched(pattern: str) -> str:
    """Return a regex of whole texts from one that is to be found in a text. Raises SchemaError."""
    begins = pattern.startswith("^")
    ends = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    if (begins or ends) and "|" in pattern:
        raise SchemaError("a pattern with ^ or $ and | is not supported for a string that this model writes as it is")
    inner = pattern[1 if begins else 0 : len(pattern) - 1 if ends else len(pattern)]
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def exactly(text: Any) -> str:
    """Return a regex of one text. Raises SchemaError for something else."""
    if not isinstance(text, str):
        raise SchemaError(f"a value of a string must be a string, got {text!r}")
    return re.sub(r"[\\.+*?()|\[\]{}^$&~#-]", r"\\\g<0>", text).replace("\n", r"\n")
