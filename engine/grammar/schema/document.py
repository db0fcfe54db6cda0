"""A JSON Schema with its references: which schema a $ref stands for, and which schemas have a finite value at all.

`rewrite.py` makes one of each schema. Pure: no regex, grammar or model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

Node = Any
"""A schema: a mapping or a bool; anything else is an error that the reader of it raises."""

LITERAL = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
MAPPINGS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # from names
SCALARS = frozenset({"null", "boolean", "number", "integer", "string"})
TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_REFS = 200  # one after the other, with nothing else between
MAX_ROUNDS = 20  # through all schemas; more than two only with circles within circles


class SchemaError(ValueError):
    """A JSON Schema cannot be followed exactly; the message says why, and where unless it is bare."""

    def __init__(self, message: str, *, is_bare: bool = True) -> None:
        super().__init__(message)
        self.is_bare = is_bare


class Document:
    """A whole schema. Resources within it that have an $id have their own base for references."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self._by_uri: dict[str, Node] = {}
        self._anchors: dict[tuple[int, str], Node] = {}
        self._uris: dict[int, str] = {}
        self._collect(root, root, "")
        self.has_refs = any("$ref" in node for node in walk(root))
        self._finite: set[int] | None = None
        self._followed: dict[tuple[int, int], tuple[Node, Node, tuple[Node, Node]]] = {}  # with the schemas of the ids

    def base_of(self, node: Node, base: Node) -> Node:
        """Return the resource to which the references of a schema belong, if its parent's belong to `base`."""
        return node if isinstance(node, dict) and isinstance(node.get("$id"), str) else base

    def resolve(self, ref: object, base: Node) -> tuple[Node, Node]:
        """Return the schema that a reference stands for, and its base. Raises SchemaError."""
        if not isinstance(ref, str):
            raise SchemaError(f"$ref must be a string, got {ref!r}")
        uri, _, fragment = ref.partition("#")
        resource = base if not uri else self._by_uri.get(_join(self._uris.get(id(base), ""), uri, "$ref"))
        if resource is None:
            raise SchemaError(f"$ref must point into the schema itself, got {ref!r}")
        fragment = unquote(fragment)
        if not fragment or fragment == "/":
            return resource, resource
        node: Node = resource
        if fragment.startswith("/"):
            for part in fragment[1:].split("/"):
                node = _step(node, part.replace("~1", "/").replace("~0", "~"), ref)
        else:
            node = self._anchors.get((id(resource), fragment))
            if node is None:
                raise SchemaError(f"$ref points to nothing, got {ref!r}")
        return node, self.base_of(node, resource)

    def follow(self, node: Node, base: Node) -> tuple[Node, Node]:
        """Return the schema behind references that stand alone. Raises SchemaError, also for a circle."""
        passed: list[tuple[Node, Node]] = []
        while isinstance(node, dict) and "$ref" in node:
            known = self._followed.get((id(node), id(base)))
            if known is not None:
                node, base = known[-1]
                break
            passed.append((node, base))
            if len(passed) > MAX_REFS:
                raise SchemaError("$ref points to itself")
            node, base = self.resolve(node["$ref"], self.base_of(node, base))
        found = node, self.base_of(node, base)
        for start in passed:
            self._followed[id(start[0]), id(start[1])] = *start, found
        return found

    def is_finite(self, node: Node) -> bool:
        """Whether a value of finite length could match; not so where required parts repeat the whole for ever."""
        if not self.has_refs or not isinstance(node, dict):
            return node is not False
        if self._finite is None:
            self._finite = self._find_finite()
        return id(node) in self._finite

    def adopt(self, node: Node, like: Node) -> Node:
        """Return a schema made of another one, which is finite where that is."""
        if self.is_finite(like) and self._finite is not None:
            self._finite.add(id(node))
        return node

    def _collect(self, node: Node, resource: Node, uri: str) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$id"), str) or node is self.root:
                resource, uri = node, _join(uri, str(node.get("$id", "")), "$id")
                self._by_uri.setdefault(uri.removesuffix("#"), node)
                self._uris[id(node)] = uri
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(name), str):
                    self._anchors[id(resource), node[name]] = node
        for child in _children(node):
            self._collect(child, resource, uri)

    def _find_finite(self) -> set[int]:
        """Return the ids of schemas with a finite value: the least set that explains itself."""
        nodes = self._in_order()
        finite: set[int] = set()
        for _ in range(MAX_ROUNDS):
            before = len(finite)
            nodes = [pair for pair in nodes if not self._explains(*pair, finite)]
            if len(finite) == before:
                return finite
        raise SchemaError("the schema refers to itself through too many levels")

    def _in_order(self) -> list[tuple[dict[str, Any], Node]]:
        """Return all schemas with their bases. But for circles, those that a schema is made of come before it."""
        ordered: list[tuple[dict[str, Any], Node]] = []
        seen: set[int] = set()
        stack: list[tuple[Node, Node, bool]] = [(self.root, self.root, False)]
        while stack:
            node, base, is_left = stack.pop()
            base = self.base_of(node, base)
            if is_left:
                ordered.append((node, base))
            elif not isinstance(node, dict):
                stack += [(child, base, False) for child in _children(node)]
            elif id(node) not in seen:
                seen.add(id(node))
                targets = [self.resolve(node["$ref"], base)] if "$ref" in node else []
                stack.append((node, base, True))
                stack += [(child, base, False) for child in _children(node)]
                stack += [(*target, False) for target in targets]
        return ordered

    def _explains(self, node: Mapping[str, Any], base: Node, finite: set[int]) -> bool:
        """Add a schema to the finite ones if those found so far show that it is one."""

        def known(child: Node) -> bool:
            return child is not False and (not isinstance(child, dict) or id(child) in finite)

        parts = [all(map(known, list_of(node, "allOf")))]
        parts += [any(map(known, list_of(node, key))) for key in ("anyOf", "oneOf") if key in node]
        if "$ref" in node:
            parts.append(known(self.resolve(node["$ref"], base)[0]))
        types = types_of(node)
        literal = "const" in node or "enum" in node
        parts.append(literal or not SCALARS.isdisjoint(types) or any(_may_end(node, kind, known) for kind in types))
        if all(parts):
            finite.add(id(node))
        return all(parts)


def walk(node: Node) -> Iterator[dict[str, Any]]:
    """Yield a schema and all mappings within it."""
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
        stack += _children(node)


def types_of(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema names; all of them if it names none. Raises SchemaError."""
    given = node.get("type", TYPES)
    types = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not types or not all(kind in TYPES or kind == "integer" for kind in types):
        raise SchemaError(f"type must be one of {', '.join(TYPES)} and integer, or a list of them, got {given!r}")
    return types


def _may_end(node: Mapping[str, Any], kind: str, known: Any) -> bool:
    """Whether an array or an object may have only parts that are known to be finite."""
    if kind == "array":
        given, prefix = node.get("minItems", 0), list_of(node, "prefixItems")
        least = given if isinstance(given, int | float) else 0
        first = [part for i, part in enumerate(prefix) if i < least]
        return all(map(known, [*first, *([node.get("items", True)] if least > len(prefix) else [])]))
    properties = node.get("properties", {})
    names = [name for name in list_of(node, "required") if isinstance(name, str)]
    return not isinstance(properties, dict) or all(known(properties[name]) for name in names if name in properties)


def _children(node: Node) -> list[Node]:
    """Return the schemas, and the lists of schemas, that a schema or a list holds."""
    if not isinstance(node, dict):
        return [value for value in node if isinstance(value, dict | list)] if isinstance(node, list) else []
    found = []
    for key, value in node.items():
        inner = list(value.values()) if key in MAPPINGS and isinstance(value, dict) else [value]
        found += [child for child in inner if key not in LITERAL and isinstance(child, dict | list)]
    return found


def list_of(node: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list, [] for what is none: `rewrite.py` refuses that where it is part of a schema."""
    value = node.get(key, [])
    return value if isinstance(value, list) else []


def _step(node: Node, part: str, ref: str) -> Node:
    if isinstance(node, dict) and part in node:
        return node[part]
    if isinstance(node, list) and part.isdecimal() and len(part) <= len(str(len(node))) and int(part) < len(node):
        return node[int(part)]
    raise SchemaError(f"$ref points to nothing, got {ref!r}")


def _join(base: str, uri: str, key: str) -> str:
    try:
        urlsplit(uri)  # urljoin does not look at it without a base
        return urljoin(base, uri)
    except ValueError:
        raise SchemaError(f"{key} must be a URI, got {uri!r}") from None
