"""The warnings of an engine that loads. Each rank makes its own checks: what only one of them warns of, the log names.

A rank beyond the first sends its warnings when it has loaded (worker.py). The first one logs those that it has not
logged itself (ranks.py); Engine keeps these meanwhile.
"""

from __future__ import annotations

import logging


class KeptWarnings(logging.Handler):
    """Keeps the warnings of this package while it is entered. Whoever else gets them still does."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def __enter__(self) -> KeptWarnings:
        logging.getLogger("gptserve").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("gptserve").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        others = [handler for name in ("", "gptserve") for handler in logging.getLogger(name).handlers]
        if logging.lastResort is not None and all(isinstance(handler, KeptWarnings) for handler in others):
            logging.lastResort.handle(record)  # as Python does for a program that has no handlers
