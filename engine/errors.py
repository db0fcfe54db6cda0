"""Everything the engine raises across its border. `InvalidRequestError` is a user's fault, the rest are ours."""

from __future__ import annotations

from enum import StrEnum


class DeathKind(StrEnum):
    """How an engine ended."""

    KILLED = "killed"  # a signal ended its process
    EXITED = "exited"  # its process or thread ended by itself
    RAISED = "raised"  # it raised an exception
    STALLED = "stalled"  # it had work and made no step for too long
    LOAD = "load"  # it never became ready
    CLOSED = "closed"  # its client closed it


class EngineError(Exception):
    """Base of all errors below."""


class InvalidConfigurationError(EngineError):
    """The engine cannot be built with this configuration; the message names the setting, the rule and the value."""


class InvalidRequestError(EngineError):
    """A request breaks a rule. `param` is the field at fault, `code` a machine-readable reason."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(EngineError):
    """Too many requests are waiting; `retry_after_s` is when to try again."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStartError(EngineError):
    """The engine could not be started; the message is the cause in one sentence."""


class ScarcityError(EngineStartError):
    """The system had no descriptor, process, thread or memory left for an engine; later it may."""


class EngineDiedError(EngineError):
    """The engine is gone; every stream it served ends with this."""

    def __init__(self, message: str, kind: DeathKind = DeathKind.EXITED) -> None:
        super().__init__(message)
        self.kind = kind
