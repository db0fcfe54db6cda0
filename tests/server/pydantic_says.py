"""What pydantic's version says of a value of a wrong type, as our messages repeat it: no test pins its sentences."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticKnownError


def _said(kind: Any) -> str:
    text = PydanticKnownError(kind).message()
    return text[0].lower() + text[1:]


NO_STRING, NO_BOOLEAN, NO_INTEGER = _said("string_type"), _said("bool_type"), _said("int_type")
NO_NUMBER = _said("float_type")
