"""The values of keywords, read with their types checked: a client may send any JSON as a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptserve.engine.grammar.schema.document import SchemaError

COUNTS = frozenset(f"{least}{of}" for least in ("min", "max") for of in ("Items", "Properties", "Length", "Contains"))
"""Keywords whose values are whole numbers; 2.0 is one."""


def mapping(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a keyword's object, {} without it. Raises SchemaError."""
    value = node.get(key, {})
    if not isinstance(value, dict):
        raise SchemaError(f"{key} must be an object, got {value!r}")
    return value


def listed(node: Mapping[str, Any], key: str) -> list[Any]:
    """Return a keyword's list, [] without it. Raises SchemaError."""
    value = node.get(key, [])
    if not isinstance(value, list):
        raise SchemaError(f"{key} must be a list, got {value!r}")
    return value


def required_of(node: Mapping[str, Any]) -> list[str]:
    """Return the properties that a schema requires. Raises SchemaError."""
    names = listed(node, "required")
    if not all(isinstance(name, str) for name in names):
        raise SchemaError(f"required must be a list of strings, got {names!r}")
    return names


def count_of(node: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a keyword's whole number. Raises SchemaError."""
    value = node.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise SchemaError(f"{key} must be a whole number that is not negative, got {value!r}")
    return int(value)


def text_of(node: Mapping[str, Any], key: str) -> str:
    """Return a keyword's string. Raises SchemaError without one."""
    value = node.get(key)
    if not isinstance(value, str):
        raise SchemaError(f"{key} must be a string, got {value!r}")
    return value
