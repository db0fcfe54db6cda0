"""The two bases of the JSON shapes, of what is sent and of what is received, and types that several files have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Tag

MAX_LABEL_LENGTH = 256  # user and cache_salt travel with every request
Text = Annotated[str, Tag("text")]


class _Model(BaseModel):
    # Strings below the fields describe them: openapi.py reads these, as pydantic would do so at each start.
    # Each model is built when it is first used, in some milliseconds: all of them would delay the start.
    model_config = ConfigDict(allow_inf_nan=False, defer_build=True)


class _Page(_Model):
    """A page of a list, but for its `data`."""

    object: Literal["list"] = "list"
    first_id: str | None
    """null on an empty page"""
    last_id: str | None
    has_more: bool


class _RequestModel(_Model):
    # `take_fields` lets unknown fields through and leaves them out. What still has one was written by another version.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, json_schema_extra={"additionalProperties": True}
    )


def _text_or_list(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None
