"""Types of arguments for argparse. Their errors have the rule that a text breaks."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gptserve.server.core.sizes import parse_size

Parsed = TypeVar("Parsed")


def argument(
    rule: str, parse: Callable[[str], Parsed], holds: Callable[[Parsed], bool] = lambda _: True
) -> Callable[[str], Parsed]:
    """Return a converter for argparse; its error has the `rule` that a text breaks where `parse` or `holds` fails."""

    def convert(text: str) -> Parsed:
        with contextlib.suppress(ValueError):
            if holds(value := parse(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")

    return convert


def each(parse: Callable[[str], Parsed]) -> Callable[[str], tuple[Parsed, ...]]:
    """Return a parser of comma-separated values."""
    return lambda text: tuple(map(parse, text.split(",")))


TEXT = argument("UTF-8", lambda text: text.encode().decode())  # surrogates stand for bytes that are not UTF-8
WHOLE = argument("a whole number", int)
NUMBER = argument("a finite number", float, math.isfinite)
POSITIVE = argument("a finite number over 0", float, lambda number: 0 < number < math.inf)
SHARE = argument("a number of at least 0 and below 1", float, lambda number: 0 <= number < 1)
COUNT = argument("a whole number of at least 1", int, lambda number: number >= 1)
NATURAL = argument("a whole number of at least 0", int, lambda number: number >= 0)
COUNTS = argument("whole numbers of at least 1, as 1,8", each(int), lambda numbers: min(numbers) >= 1)
RATES = argument("finite numbers over 0, as 0.5,2", each(float), lambda rates: all(0 < r < math.inf for r in rates))
PICTURE = argument("a file.png, .svg or .pdf", Path, lambda path: path.suffix.lower() in (".png", ".svg", ".pdf"))
SIZE = argument("a number of bytes such as 8GiB", parse_size)
