"""Reads the arguments of a call in the history of a chat: any text that a model wrote, whole JSON or not.

A model may write a list, a line break within a string, or nothing, and `max_tokens` may cut a call off. A chat goes on
after each of them. The server and LLM call it; knows no templates.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

_STRING = re.compile(r'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)
ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)}
"""From the control characters that JSON takes only escaped to their escapes."""
_NOTHING = frozenset(("", "null", '""'))


def read_arguments(text: str) -> dict[str, Any] | str:
    """Return the object that a text is, or as much as it has of one; a text that begins none is returned as it is.

    A text that says nothing is an object without fields.
    """
    if text.strip() in _NOTHING:
        return {}
    try:
        value = from_json(escape_controls(text), allow_partial="trailing-strings")
    except ValueError:
        return text
    if isinstance(value, str) and value.lstrip().startswith("{"):  # JSON within JSON
        return read_arguments(value)
    return value if isinstance(value, dict) else text


def escape_controls(text: str) -> str:
    """Return JSON with the control characters within its strings escaped, as JSON wants them."""
    return _STRING.sub(lambda found: found[0].translate(ESCAPES), text)
