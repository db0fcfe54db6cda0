"""The errors that the engine raises to its callers. `InvalidRequestError` is the user's fault; the others are not."""

from __future__ import annotations

import errno
import logging
from enum import StrEnum

from gptserve.weights.errors import WeightsError

_SCARCITY = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""The error numbers of pipe and fork without free descriptors, processes or memory."""
_NO_THREAD = "can't start new thread"
"""The whole message of the RuntimeError that Thread.start raises without free threads; it has no number."""


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


def start_error(message: str, cause: Exception) -> EngineStartError:
    """Return the error with this message for a start that `cause` ended."""
    is_scarce = str(cause) == _NO_THREAD or getattr(cause, "errno", None) in _SCARCITY
    return (ScarcityError if is_scarce else EngineStartError)(message)


def explain(error: Exception) -> str:
    """Return why an engine ended, as one sentence; log an unexpected error with its traceback."""
    if isinstance(error, EngineError | WeightsError):
        return str(error)
    logging.getLogger(__name__).error("the engine failed", exc_info=error)
    first_line = str(error).partition("\n")[0]
    return f"the engine raised {type(error).__name__}: {first_line}"
