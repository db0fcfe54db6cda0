"""Text that commands read from a file or from standard input. `main.py` calls it."""

from __future__ import annotations

import sys
from pathlib import Path

from gptserve.server.cli.errors import CommandError

STDIN = "-"


def read_text(source: str) -> str:
    """Return the UTF-8 text of a file, or of standard input; line ends stay as they are. Raises CommandError."""
    try:
        return _read(source).decode()
    except OSError as error:
        raise CommandError(f"cannot read {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        name = "stdin" if source == STDIN else source
        raise CommandError(f"the text on {name} must be UTF-8, got something else at byte {error.start}") from error


def read_question() -> str:
    """Return the text of standard input without the line ends after it. Raises CommandError, also if it is empty."""
    if question := read_text(STDIN).rstrip("\r\n"):
        return question
    raise CommandError("the question on stdin is empty")


def _read(source: str) -> bytes:
    if source != STDIN:
        return Path(source).read_bytes()
    if sys.stdin is None:
        raise CommandError("stdin is closed")
    return sys.stdin.buffer.read()
