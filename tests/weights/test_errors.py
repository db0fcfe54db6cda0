"""What a message shows of a hostile value is short, printable and one line."""

from __future__ import annotations

import pytest

from gptserve.weights.errors import SHOWN_LENGTH, shown


@pytest.mark.parametrize("value", ["x" * 1000, "\n\x1b[2J", "\ud800", {"a": ["é"] * 100}, 10**300, None])
def test_shown_value_is_one_short_line(value: object) -> None:
    text = shown(value)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= SHOWN_LENGTH
