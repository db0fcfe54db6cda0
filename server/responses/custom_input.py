"""The input of a custom tool's call, read from the arguments that the model writes: {"input": "…"}.

The text is given out as it arrives. Knows nothing of items; `output.py` has a reader for each call.
"""

from __future__ import annotations

import re

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HIGH, _LOW, _HEX = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", r"[0-9a-fA-F]{4}"
# The first half of a surrogate pair waits for what follows it.
_CHARACTER = re.compile(
    rf'[^"\\]+|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u{_HEX})|(?!{_HIGH})\\u{_HEX}|\\[^u]', re.DOTALL
)


class InputReader:
    """Reads the arguments of one call. Arguments of another form are given out as they are."""

    def __init__(self) -> None:
        self._buffer = ""
        self._read = self._read_begin

    def read(self, arguments: str) -> str:
        """Return what these arguments, which follow those before, add to the text."""
        self._buffer += arguments
        return self._read()

    def _read_begin(self) -> str:
        found = _BEGIN.match(self._buffer)
        if found is not None:
            self._buffer = self._buffer[found.end() :]
            self._read = self._read_text
        elif not '{"input":"'.startswith("".join(self._buffer.split())):
            self._read = self._read_all
        else:
            return ""
        return self._read()

    def _read_text(self) -> str:
        pieces, end = [], 0
        while (found := _CHARACTER.match(self._buffer, end)) is not None:
            pieces.append(_decode(found[0]))
            end = found.end()
        self._buffer = self._buffer[end:]
        if self._buffer.startswith('"'):
            self._read = self._drop
        return "".join(pieces)

    def _read_all(self) -> str:
        text, self._buffer = self._buffer, ""
        return text

    def _drop(self) -> str:
        self._buffer = ""
        return ""


def _decode(written: str) -> str:
    if not written.startswith("\\"):
        return written
    if not written.startswith("\\u"):
        return _ESCAPES.get(written[1], written[1])
    units = b"".join(int(digits, 16).to_bytes(2, "big") for digits in written.split("\\u")[1:])
    return units.decode("utf-16-be", errors="replace")
