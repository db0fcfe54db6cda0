"""The exception for errors that a client should see. `error_responses.py` maps its codes to HTTP statuses."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE = 400  # characters; do not send a value of megabytes back


class ServiceError(Exception):
    """What a client is told instead of an answer. `code` says what is wrong, `param` is the field at fault."""

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…")
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ServiceError:
        """Return the error with these `fields`; those of an older version are more, and may lack retry_after_s."""
        retry_after_s = fields.get("retry_after_s")
        return ServiceError(fields["code"], fields["message"], param=fields["param"], retry_after_s=retry_after_s)

    def fields(self) -> dict[str, Any]:
        """Return all its fields, as JSON types."""
        return {"code": self.code, "message": str(self), "param": self.param, "retry_after_s": self.retry_after_s}

    def fresh(self) -> ServiceError:
        """Return a copy without a traceback; raising one instance again would keep every reader's frames alive."""
        return self.from_fields(self.fields())


def shutting_down() -> ServiceError:
    """Return the error for requests that a shutdown refuses or cuts off."""
    return ServiceError("draining", "the server is shutting down")


def show(value: object) -> str:
    """Return a user's value, shortened and almost as JSON."""
    return _Shown().repr(value)


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist, self.maxdict, self.maxstring, self.maxlong, self.maxother = 4, 4, 60, 40, 60

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802 - reprlib finds it by the type's name
        return "null"
