"""The errors that the engine raises to its callers. `InvalidRequestError` is the user's fault; the others are not."""

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
    """The engine cannot be built with this configuration. The message names the setting, the rule and the value."""


class InvalidRequestError(EngineError):
    """A request breaks a rule. `param` names the field, `code` is a machine-readable reason."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(EngineError):
    """Too many requests are waiting. Try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStartError(EngineError):
    """The engine could not be started. The message is the cause in one sentence."""


class ScarcityError(EngineStartError):
    """The system has no descriptors, processes, threads or memory left for an engine. It may have some later."""


class EngineDiedError(EngineError):
    """The engine is gone. All its streams end with this error."""

    def __init__(self, message: str, kind: DeathKind = DeathKind.EXITED) -> None:
        super().__init__(message)
        self.kind = kind
