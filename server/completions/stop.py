"""Stop strings: finds the first of them in a text that arrives in pieces. `output.py` has one StopStrings a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopPattern(NamedTuple):
    """A stop string with its borders: borders[i] is the length of the longest proper border of text[: i + 1]."""

    text: str
    borders: tuple[int, ...]


def compile_stop(text: str) -> StopPattern:
    """Prepare a stop string for matching character by character (Knuth, Morris and Pratt 1977)."""
    borders = [0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length - 1]
        borders.append(length + (text[length] == char))
    return StopPattern(text, tuple(borders))


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that could be the start of one.

    The match that ends first wins; of several that end together, the longest. With `passes_match` the match itself is
    passed on, too, and nothing is held back. Invariant: otherwise the text held back is the longest suffix of all text
    so far that starts a stop string.
    """

    def __init__(self, patterns: Sequence[StopPattern], *, passes_match: bool = False) -> None:
        self.matched: str | None = None
        self._patterns = patterns
        self._passes_match = passes_match
        self._progress = [0] * len(patterns)
        self._held = ""

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add text, in which a match may end; return the text to pass on. Feed nothing after a match."""
        assert self.matched is None
        if not self._patterns:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            matched = self._advance(char)
            if matched and may_match:
                self.matched, self._held = matched, ""
                return buffer[: end if self._passes_match else end - len(matched)]
        certain = len(buffer) - (0 if self._passes_match else max(self._progress))
        self._held = buffer[certain:]
        return buffer[:certain]

    def flush(self) -> str:
        """Return the text held back; nothing may follow."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        """Add one character; return the longest stop string that it completes, or an empty string."""
        matched = ""
        for i, (stop, borders) in enumerate(self._patterns):
            length = self._progress[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            if length == len(stop):
                matched = max(matched, stop, key=len)
                length = borders[-1]  # the next match may begin within this one
            self._progress[i] = length
        return matched
