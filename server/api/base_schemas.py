"""The two bases of the JSON shapes: of what is sent, and of what is received."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)


class _RequestModel(_Model):
    # `take_fields` lets unknown fields through and leaves them out. What still has one was written by another version.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, json_schema_extra={"additionalProperties": True}
    )
