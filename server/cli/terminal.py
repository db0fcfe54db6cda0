"""What commands print: text of models and servers, which a terminal must not obey. The commands call it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from gptserve.server.cli.errors import CommandError

# Control characters could move the cursor or give commands to the terminal.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"} | {0x0D: ""}


def visible(text: str) -> str:
    """Return the text with its control characters as hexadecimal numbers, and without carriage returns."""
    return text.translate(_SHOWN)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal; a standard stream that is closed is None."""
    return stream is not None and stream.isatty()


def print_text(pieces: Iterable[str]) -> None:
    """Print text as it comes, then the end of the line; a pipe or a file gets the text as it is.

    Raises CommandError, and BrokenPipeError where no one reads on, as behind `| head`.
    """
    into_terminal, has_begun = is_terminal(sys.stdout), False
    try:
        for text in pieces:
            has_begun = has_begun or text != ""
            _write(visible(text) if into_terminal else text)
    finally:
        if has_begun:
            _write("\n")


def _write(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except UnicodeEncodeError as error:
        character = ascii(error.object[error.start])
        raise CommandError(
            f"stdout has the encoding {error.encoding}, which lacks {character}; PYTHONIOENCODING=utf-8 changes it"
        ) from error
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries to write the rest when it ends
        if isinstance(error, BrokenPipeError):
            raise
        raise CommandError(f"cannot write to stdout: {error.strerror}") from error


@contextmanager
def ctrl_c_kills() -> Iterator[None]:
    """End the process at Ctrl-C: while torch is imported, a KeyboardInterrupt can get lost or abort with a dump."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
