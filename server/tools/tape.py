"""The text of an answer as it arrives, for readers that are written as if all of it were there.

A reader is a generator: it yields where it needs more text. So what it reads cannot depend on how the text is cut into
pieces. `dialect.py` feeds the tape; `reasoning.py`, `json_call.py` and the formats read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a reader; it returns a T."""

Emit = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]+")


class Tape:
    """What has arrived and was not read yet. Between `keep` and `kept` it remembers what was read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str, *, is_last: bool) -> None:
        """Add text; after the last one nothing follows."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._has_ended = is_last

    def keep(self) -> None:
        """Begin to remember what is read."""
        self._kept = []

    def kept(self) -> str:
        """Return what was read since `keep`, and remember no more."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def peek(self) -> Steps[str]:
        """Wait for the next character and return it; "" at the end of the answer."""
        while self._at == len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._at]

    def read(self, num_chars: int = 1) -> str:
        """Read characters that have arrived."""
        text = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._kept is not None:
            self._kept.append(text)
        return text

    def read_run(self, run: re.Pattern[str]) -> str:
        """Read what has arrived of a run of characters; more of it may follow."""
        match = run.match(self._text, self._at)
        return self.read(len(match[0])) if match else ""

    def pass_run(self, run: re.Pattern[str], emit: Emit) -> Steps[None]:
        """Pass a whole run of characters on as it arrives."""
        while (yield from self.peek()) and (text := self.read_run(run)):
            emit(text)

    def take_run(self, run: re.Pattern[str]) -> Steps[str]:
        """Read a whole run of characters, and return it."""
        pieces: list[str] = []
        yield from self.pass_run(run, pieces.append)
        return "".join(pieces)

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        yield from self.pass_run(SPACE, drop)

    def sees(self, mark: str) -> Steps[bool]:
        """Return whether the mark comes next."""
        while len(rest := self._text[self._at : self._at + len(mark)]) < len(mark):
            if self._has_ended or not mark.startswith(rest):
                return False
            yield
        return rest == mark

    def accept(self, mark: str) -> Steps[bool]:
        """Read the mark if it comes next; return whether it did."""
        is_next = yield from self.sees(mark)
        if is_next:
            self.read(len(mark))
        return is_next

    def pass_until(self, marks: tuple[str, ...], emit: Emit) -> Steps[str]:
        """Pass text on up to the first of the marks; read that and return it, "" at the end of the answer."""
        while True:
            rest = self._text[self._at :]
            found = min(((at, mark) for mark in marks if (at := rest.find(mark)) >= 0), default=None)
            num_certain = found[0] if found else len(rest) if self._has_ended else len(rest) - _num_open(rest, marks)
            if num_certain:
                emit(self.read(num_certain))
            if found:
                return self.read(len(found[1]))
            if self._has_ended:
                return ""
            yield


def _num_open(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of the text may begin one of the marks."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    ends = (text[-num:] for num in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)


def drop(text: str) -> None:
    """Let text go."""
