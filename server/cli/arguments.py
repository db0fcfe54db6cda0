"""Types of arguments for argparse. Their errors have the rule that a text breaks."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
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


TEXT = argument("UTF-8", lambda text: text.encode().decode())  # surrogates stand for bytes that are not UTF-8
WHOLE = argument("a whole number", int)
NUMBER = argument("a finite number", float, math.isfinite)
COUNT = argument("a whole number of at least 1", int, lambda number: number >= 1)
SIZE = argument("a number of bytes such as 8GiB", parse_size)
