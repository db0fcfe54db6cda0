"""The format of log lines on stderr, one line an event: text for people, JSON for machines.

A `request_id` passed as `extra` appears in both formats, other extra fields only in JSON. A message may hold a client's
text, which cannot forge a line. The server's and the engine's process configure logging each; no other code does.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from gptserve.engine.config import EngineConfig
from gptserve.engine.process.factory import load_engine_first
from gptserve.engine.process.loop import Report, StepEngine

if TYPE_CHECKING:  # the engine's process imports this, and needs no settings
    from gptserve.server.core.settings import LogFormat, LogLevel

RARE_INTERVAL_S = 60.0

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00.000 INFO    gptserve.server.serve: request-1: the message; without other extra fields."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            record.message = f"{request_id}: {record.message}"
        record.message = _printable(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, then the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class RareWarning:
    """A warning that strangers can cause: logs the first at once, then one a minute with a count of the others."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._num_silent = 0
        self._due_at = -math.inf

    def log(self, message: str) -> None:
        """Log `message`, or count it."""
        now = time.monotonic()
        if now < self._due_at:
            self._num_silent += 1
            return
        noun = "message" if self._num_silent == 1 else "messages"
        since = f" ({self._num_silent} similar {noun} suppressed)" if self._num_silent else ""
        self._logger.warning("%s%s", message, since)
        self._num_silent, self._due_at = 0, now + RARE_INTERVAL_S


def configure_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Log this project at `level` and other packages' warnings; replaces any earlier configuration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if log_format == "text" else JsonFormatter())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(threshold, logging.WARNING))
    logging.getLogger("gptserve").setLevel(threshold)


def load_logging_engine(config: EngineConfig, log_format: LogFormat, level: LogLevel, *, report: Report) -> StepEngine:
    """Load the engine in a process that has no logging yet; picklable, for an EngineClient."""
    configure_logging(log_format, level)
    return load_engine_first(config, report=report)


def _printable(text: str) -> str:
    """Return `text` with line ends, terminal escapes and other invisible characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
