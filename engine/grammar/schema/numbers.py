"""Bounds of numbers, written so that llguidance keeps to them.

llguidance reads bounds as doubles and writes a regex. It takes (0, 0.5] for [0, 0.5], rounds integers beyond 2^53 and
fails beyond 2^63. What cannot be said exactly is drawn in a little, never out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Any

from gptserve.engine.grammar.schema.document import SchemaError

KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_EXACT = 2**53
MAX_INTEGER = 2**63 - 1024  # the last double before 2^63
MAX_NUMBER = 9 * 10**18
NUM_DIGITS = 15  # that a double keeps
_TEN_TO_17 = 10**17  # from here on llguidance needs a bound on the other side
_MAX_COEFFICIENT = 2**32 - 1

Bound = tuple[Decimal, bool] | None
"""A bound, and whether it is outside."""


def rewrite_bounds(schema: Mapping[str, Any], *, is_integer: bool, is_merged: bool) -> dict[str, Any] | None:
    """Return what stands for the five keywords of a schema; None if no number is within. Raises SchemaError.

    With is_merged another schema may add bounds.
    """
    low, high = _bound(schema, "minimum", "exclusiveMinimum", 1), _bound(schema, "maximum", "exclusiveMaximum", -1)
    step = _step_of(schema)
    if step is not None and not _has_multiple(low, high, step, is_integer):
        return None
    bounds = _integers(low, high) if is_integer else _numbers(low, high, is_merged)
    return {**bounds, **({} if step is None else {"multipleOf": abs(schema["multipleOf"])})}


def check_literal(value: Any) -> None:
    """Raise SchemaError if a const or a member of an enum has an integer that llguidance would round."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            check_literal(part)
    elif isinstance(value, int) and abs(value) > MAX_EXACT:
        rounded = float(value) if abs(value) < 2**1000 else math.inf
        # As an integer llguidance writes the double itself, beyond 2^63 its shortest digits.
        is_itself = abs(value) <= MAX_INTEGER and int(rounded) == value
        if not is_itself and Decimal(repr(rounded)) != value:
            raise SchemaError(f"an integer beyond 2^53 cannot be written exactly, got {value}")


def _bound(schema: Mapping[str, Any], name: str, outside: str, sign: int) -> Bound:
    inner, outer = schema.get(name), schema.get(outside)
    if isinstance(outer, bool):  # of draft 4
        return None if inner is None else (_decimal(name, inner), outer)
    found = [
        (_decimal(key, value), key == outside) for key, value in ((name, inner), (outside, outer)) if value is not None
    ]
    return max(found, key=lambda bound: (bound[0] * sign, bound[1]), default=None)


def _decimal(name: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise SchemaError(f"{name} must be a number, got {value!r}")
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def _step_of(schema: Mapping[str, Any]) -> Fraction | None:
    """Return multipleOf. Raises SchemaError unless llguidance finds the same digits, at most nine."""
    given = schema.get("multipleOf")
    if given is None:
        return None
    step = abs(_decimal("multipleOf", given))
    found, num_places = float(min(step, Decimal(_MAX_COEFFICIENT + 1))), 0
    while found % 1 and num_places < 40:
        found, num_places = found * 10, num_places + 1
    if not step or found > _MAX_COEFFICIENT or Fraction(int(found), 10**num_places) != Fraction(step):
        raise SchemaError(f"multipleOf must be greater than 0 and have few digits, got {given!r}")
    return Fraction(step)


def _has_multiple(low: Bound, high: Bound, step: Fraction, is_integer: bool) -> bool:
    if low is None or high is None:
        return True
    if is_integer:
        step = Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
    first, last = Fraction(low[0]) / step, Fraction(high[0]) / step
    return _first(first, low[1]) <= _last(last, high[1])


def _first(value: Fraction, is_outside: bool) -> int:
    return math.floor(value) + 1 if is_outside else math.ceil(value)


def _last(value: Fraction, is_outside: bool) -> int:
    return math.ceil(value) - 1 if is_outside else math.floor(value)


def _integers(low: Bound, high: Bound) -> dict[str, int]:
    """Return closed bounds that are doubles, drawn in to the next one."""
    first = None if low is None else _first(Fraction(low[0]), low[1])
    last = None if high is None else _last(Fraction(high[0]), high[1])
    if (first or 0) > MAX_INTEGER or (last or 0) < -MAX_INTEGER:
        raise SchemaError("integers beyond 2^63 are not supported")
    if (first or 0) >= _TEN_TO_17 and last is None:
        last = MAX_INTEGER
    if (last or 0) <= -_TEN_TO_17 and first is None:
        first = -MAX_INTEGER
    bounds = {}
    if first is not None:
        bounds["minimum"] = -_double_below(-max(first, -MAX_INTEGER))
    if last is not None:
        bounds["maximum"] = _double_below(min(last, MAX_INTEGER))
    return bounds


def _double_below(value: int) -> int:
    rounded = float(value)
    return int(rounded if rounded <= value else math.nextafter(rounded, -math.inf))


def _numbers(low: Bound, high: Bound, is_merged: bool) -> dict[str, float]:
    if (low or (0,))[0] > MAX_NUMBER or (high or (0,))[0] < -MAX_NUMBER:
        raise SchemaError("numbers beyond 9e18 are not supported together with bounds")
    if low is not None and low[0] >= _TEN_TO_17 and high is None:
        high = Decimal(MAX_NUMBER), False
    if high is not None and high[0] <= -_TEN_TO_17 and low is None:
        low = Decimal(-MAX_NUMBER), False
    low, high = _in_reach(low), _mirrored(_in_reach(_mirrored(high)))
    low, high = (
        _from_inside(low, high, is_merged),
        _mirrored(_from_inside(_mirrored(high), _mirrored(low), is_merged)),
    )
    named = (("inimum", low), ("aximum", high))
    return {
        f"exclusiveM{name}" if bound[1] else f"m{name}": float(bound[0]) for name, bound in named if bound is not None
    }


def _mirrored(bound: Bound) -> Bound:
    return None if bound is None else (-bound[0], bound[1])


def _in_reach(low: Bound) -> Bound:
    """Return a lower bound of so few digits that llguidance reads and writes them all."""
    if low is None:
        return None
    if low[0] < -MAX_NUMBER:
        return Decimal(-MAX_NUMBER), False
    rounded = Context(prec=NUM_DIGITS, rounding=ROUND_CEILING).create_decimal(low[0])
    return rounded, low[1] and rounded == low[0]


def _from_inside(low: Bound, high: Bound, is_merged: bool) -> Bound:
    """Return a lower bound; one outside at a whole number, with nothing whole before the other, is taken in."""
    if low is None or not low[1] or low[0] < 0 or low[0] % 1:
        return low
    if not is_merged and (high is None or high[0] >= low[0] + 1):
        return low
    if low[0]:
        return low[0] + Decimal(1).scaleb(low[0].adjusted() + 1 - NUM_DIGITS), False
    shift = 0 if high is None or high[0] <= 0 else min(0, high[0].adjusted() + 1)
    return Decimal(1).scaleb(shift - NUM_DIGITS), False
