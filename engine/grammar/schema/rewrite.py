"""Rewrites a JSON Schema into one that llguidance follows exactly, or refuses it in words.

llguidance reads some keywords loosely (`numbers.py`) and refuses others that its own can say: a oneOf whose options
cannot both match, formats that are annotations, propertyNames, references by name. With unnamed properties refused, an
object that names properties has no others. `compiler.py` calls it for JSON, the server for the parameters of tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gptserve.engine.grammar.grammar import UnnamedProperties
from gptserve.engine.grammar.schema.document import Document, Node, SchemaError, types_of, walk
from gptserve.engine.grammar.schema.effort import Effort
from gptserve.engine.grammar.schema.keywords import COUNTS, count_of, listed, required_of, text_of
from gptserve.engine.grammar.schema.numbers import KEYS, check_literal, rewrite_bounds
from gptserve.engine.grammar.schema.objects import APPLICATORS, Units, closed
from gptserve.engine.grammar.schema.options import Options
from gptserve.engine.grammar.schema.property_names import without_property_names

Reader = Callable[[Node, Node], Node]
"""From a schema and the base of its references to the rewritten one."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Those that llguidance knows; the others are annotations."""

KEYS_SET = frozenset(KEYS)
_ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
        "$comment",
        "x-guidance",
        "title",
        "description",
    }
    | {"default", "examples", "readOnly", "writeOnly", "deprecated", "discriminator"}
)
_DROPPED = _ANNOTATIONS | KEYS_SET | {"unevaluatedProperties"}
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "minProperties": (0,),
    "minItems": (0,),
    "minLength": (0,),
}
"""Values of keywords that ask for nothing."""
_PARTNERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}


def rewrite(schema: Node, unnamed: UnnamedProperties, effort: Effort | None = None) -> Node:
    """Return a schema for llguidance. What matches it matches `schema`. Raises SchemaError."""
    try:
        return _Rewriter(schema, unnamed, Effort() if effort is None else effort).whole()
    except RecursionError:
        raise SchemaError("the schema is nested too deep") from None
    except SchemaError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # no value of a client is a defect
        raise SchemaError("the schema is malformed") from None


class _Rewriter:
    """Rewrites one document. A schema becomes a unit of its own, or a part of the unit of another."""

    def __init__(self, root: Node, unnamed: UnnamedProperties, effort: Effort) -> None:
        self._document = Document(root)
        self._options = Options(self._document, effort)
        self._units = Units(self._document, effort)
        self._unnamed = unnamed
        self._names: dict[tuple[int, bool], str] = {}
        self._defined: dict[str, Node] = {}
        self._made: dict[tuple[int, str], Node] = {}
        self._is_merged = any(_merges(node) for node in walk(root))

    def whole(self) -> Node:
        """Return the rewritten document."""
        root = self._document.root
        if not self._document.is_finite(root) and root is not False:
            raise SchemaError("no JSON of finite length matches the schema: its $ref lead back to themselves")
        made = self._unit(root, root)
        if not isinstance(made, dict):
            return made
        draft = {"$schema": root["$schema"]} if "$schema" in root else {}
        return {**draft, **made, **({"$defs": self._defined} if self._defined else {})}

    def _unit(self, node: Node, base: Node) -> Node:
        """Return the schema of a value, closed if that is asked for."""
        if not isinstance(node, dict) or not self._document.is_finite(node):
            return self._node(node, base, self._unit)
        base = self._document.base_of(node, base)
        if _is_reference(node):
            return self._reference(node["$ref"], base, is_unit=True)
        names = self._units.names_of(node, base)
        applied = [key for key in APPLICATORS if key in node]
        if applied in (["anyOf"], ["oneOf"]) and not names.is_shut and not {"properties", "required"} & node.keys():
            return self._node(node, base, self._unit)
        if names.is_shut and (names.has_choices or node.get("unevaluatedProperties") is not False):
            raise SchemaError(
                "unevaluatedProperties: false is not supported together with anyOf or oneOf or within allOf"
            )
        made = self._node(node, base, self._part)
        may_close = "object" in types_of(node) and not names.speaks_of_others and isinstance(made, dict)
        if not may_close or not (names.is_shut or (self._unnamed == "refuse" and names.may_be_all)):
            return made
        return (
            {**made, "allOf": [*made.get("allOf", ()), self._units.closing(names)]} if applied else closed(made, names)
        )

    def _part(self, node: Node, base: Node) -> Node:
        """Return a schema that applies to a value beside others."""
        if isinstance(node, dict) and _is_reference(node):
            return self._reference(node["$ref"], self._document.base_of(node, base), is_unit=False)
        return self._node(node, base, self._part)

    def _reference(self, ref: object, base: Node, *, is_unit: bool) -> Node:
        return self._define(*self._document.resolve(ref, base), is_unit=is_unit)

    def _define(self, node: Node, base: Node, *, is_unit: bool) -> Node:
        """Return a reference to a schema of this document."""
        if not isinstance(node, dict) or not self._document.is_finite(node):
            return self._node(node, base, self._unit)
        key = id(node), is_unit
        if key not in self._names:
            self._names[key] = name = str(len(self._names))
            self._defined[name] = True
            self._defined[name] = (self._unit if is_unit else self._part)(node, base)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _node(self, node: Node, base: Node, of_part: Reader) -> Node:
        """Return a schema; `of_part` reads those of the same value within it."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise SchemaError(f"a schema must be an object, true or false, got {node!r}")
        if not self._document.is_finite(node):
            return False
        base = self._document.base_of(node, base)
        types, unevaluated = types_of(node), node.get("unevaluatedProperties", True)
        if unevaluated not in (True, False, {}):
            raise SchemaError("unevaluatedProperties must be true or false")
        made: dict[str, Any] = {}
        more: list[Node] = []
        for key, value in without_property_names(self._document, node, base).items():
            if key in _DROPPED or _asks_nothing(node, key, value):
                continue
            if key == "$ref":
                said = self._reference(value, base, is_unit=False)
            elif key == "oneOf":
                said = {"anyOf": self._options_of(node, base, of_part)}
            elif key == "required":
                said = {key: required_of(node)}
            elif key in COUNTS:
                said = {key: count_of(node, key)}
            else:
                with _within(key):
                    said = {key: self._keyword(key, value, base, of_part)}
            if isinstance(said, dict) and node.keys().isdisjoint(said.keys() - {key}):
                made |= said
            else:
                more.append(said)
        if KEYS_SET & node.keys() and {"number", "integer"} & {*types}:
            is_integer = "number" not in types
            bounds = rewrite_bounds(node, is_integer=is_integer, is_merged=self._is_merged)
            if bounds is None:
                made["type"] = [kind for kind in types if kind not in ("number", "integer")]
            else:
                made |= bounds
        return _joined(made, more)

    def _keyword(self, key: str, value: Any, base: Node, of_part: Reader) -> Any:
        match key:
            case "allOf" | "anyOf" if isinstance(value, list):
                return [of_part(part, base) for part in value]
            case "properties" | "patternProperties" if isinstance(value, dict):
                return {name: self._named(name, part, base) for name, part in value.items()}
            case "prefixItems" | "items" if isinstance(value, list):
                return [self._unit(part, base) for part in value]
            case "additionalProperties" | "items" | "additionalItems":
                return self._unit(value, base)
            case "const" | "enum":
                check_literal(value)
        return value

    def _named(self, name: str, node: Node, base: Node) -> Node:
        with _within(name):
            return self._unit(node, base)

    def _options_of(self, node: Mapping[str, Any], base: Node, of_part: Reader) -> list[Node]:
        """Return the options of a oneOf for an anyOf. Raises SchemaError if two may match one value."""
        options = [option for option in listed(node, "oneOf") if self._document.is_finite(option)]
        seen = [(_within_parent(option, node), base) for option in options]
        if len(options) > 1 and not self._options.are_apart(seen):
            tag = self._options.common_tag(seen)
            if tag is None:
                raise SchemaError(
                    "oneOf is supported only where no value can match two of its options, such as with different types "
                    "or a required property of different values; anyOf takes others"
                )
            return [self._tagged(option, base, tag, is_unit=of_part == self._unit) for option in options]
        return [of_part(option, base) for option in options]

    def _tagged(self, option: Node, base: Node, tag: str, *, is_unit: bool) -> Node:
        """Return an option whose values have a property: without it, it could not be told from the others."""
        node, base = self._document.follow(option, base)
        if (id(node), tag) not in self._made:
            required = [*listed(node, "required"), tag]
            self._made[id(node), tag] = self._document.adopt({**node, "required": required}, node)
        return self._define(self._made[id(node), tag], base, is_unit=is_unit)


def _is_reference(node: Mapping[str, Any]) -> bool:
    """Whether a schema is a $ref and nothing else that matters."""
    return "$ref" in node and all(key in _ANNOTATIONS or key == "$ref" or key.startswith("x-") for key in node)


def _merges(node: Mapping[str, Any]) -> bool:
    """Whether bounds of one number may come from two schemas."""
    applied = [key for key in (*APPLICATORS, "const", "enum") if key in node]
    return "allOf" in applied or (bool(applied) and ("$ref" in node or bool(KEYS_SET & node.keys())))


def _asks_nothing(node: Mapping[str, Any], key: str, value: Any) -> bool:
    if key == "format":
        return text_of(node, key) not in FORMATS
    if key == "if":
        return "then" not in node and "else" not in node
    if key in _PARTNERS:
        return _PARTNERS[key] not in node
    return key in _IDLE and any(value == idle and type(value) is type(idle) for idle in _IDLE[key])


def _within_parent(option: Node, parent: Mapping[str, Any]) -> Node:
    """Return an option of a oneOf with what the schema around it says of all its values."""
    if not isinstance(option, dict) or "$ref" in option:
        return option
    kinds = {"type": parent["type"]} if "type" in parent else {}
    return {**kinds, **option, "required": [*listed(parent, "required"), *listed(option, "required")]}


def _joined(made: dict[str, Any], more: list[Node]) -> Node:
    """Return a schema with further ones for the same value; False if it cannot match."""
    for schema in more:
        if isinstance(schema, dict) and made.keys().isdisjoint(schema):
            made |= schema
        elif schema is not True:
            made["allOf"] = [*made.get("allOf", ()), schema]
    if "anyOf" in made:
        made["anyOf"] = [option for option in made["anyOf"] if option is not False]
    is_impossible = any(part is False for part in made.get("allOf", ()))
    return False if is_impossible or made.get("anyOf") == [] or made.get("type") == [] else made


@contextmanager
def _within(place: str) -> Iterator[None]:
    """Put a place before the message of a SchemaError."""
    try:
        yield
    except SchemaError as error:
        raise SchemaError(f"{place}: {error}" if error.is_bare else f"{place}.{error}", is_bare=False) from None
