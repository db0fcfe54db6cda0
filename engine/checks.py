"""The rules of single values of a request: their types, ranges and lengths. `request.py` calls them.

Each raises InvalidRequestError, which names the field, the rule and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gptserve.engine.errors import InvalidRequestError

MAX_SHOWN = 80  # characters of a value of a wrong type


def check_range(
    name: str, value: float, low: float, high: float | None, *, open_low: bool = False, param: str | None = None
) -> None:
    """Check that low <= value <= high (low < value with open_low) and that value is finite."""
    too_low = value <= low if open_low else value < low
    not_finite = isinstance(value, float) and not math.isfinite(value)
    if not_finite or too_low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"in {'(' if open_low else '['}{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {rule}, got {value}", param=param or name)


def check_length(name: str, length: int, limit: int) -> None:
    """Check that there are not too many entries."""
    if length > limit:
        raise InvalidRequestError(f"{name} may have at most {limit} entries, got {length}", param=name)


def check_number(name: str, value: object, *, whole: bool, optional: bool) -> None:
    """Check that a value is an integer if `whole`, else a number; or None if `optional`."""
    if not _is_number(value, whole=whole) and not (optional and value is None):
        rule = "an integer" if whole else "a number"
        raise _wrong_type(name, f"{rule} or None" if optional else rule, value)


def check_type(name: str, value: object, types: type | tuple[type, ...], rule: str) -> None:
    """Check that a value has one of the types; `rule` says it in words."""
    if not isinstance(value, types):
        raise _wrong_type(name, rule, value)


def check_biases(name: str, biases: object) -> None:
    """Check that a value maps integers to numbers."""
    rule = "a mapping from token ids to numbers"
    if not isinstance(biases, Mapping):
        raise _wrong_type(name, rule, biases)
    for token_id, bias in biases.items():
        if not _is_number(token_id, whole=True) or not _is_number(bias, whole=False):
            raise _wrong_type(name, rule, {token_id: bias})


def as_token_ids(name: str, ids: object) -> tuple[int, ...]:
    """Return a list or tuple of integers as a tuple."""
    if not isinstance(ids, (list, tuple)) or not all(_is_number(token_id, whole=True) for token_id in ids):
        raise _wrong_type(name, "a sequence of token ids", ids)
    return tuple(ids)


def _is_number(value: object, *, whole: bool) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _wrong_type(name: str, rule: str, value: object) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
    return InvalidRequestError(f"{name} must be {rule}, got {shown}", param=name, code="invalid_type")
