"""Stop strings: finds the first of them in a text that arrives in pieces. `output.py` has one StopStrings a choice."""

from __future__ import annotations

from collections.abc import Iterable

_START = 0
_CHAR_BITS = 21  # of a Unicode character


class StopAutomaton:
    """All stop strings of a request as one automaton (Aho and Corasick 1975), whose steps do not cost more for more.

    A state is a prefix of stop strings: the longest with which the text so far ends. `held` is the length of the
    longest such prefix that is no whole stop string, `matches` the longest stop string with which the text ends.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.matches, self.held = [""], [0]
        self._falls = [_START]
        self._steps: dict[int, int] = {}
        """By state and character in one number, which takes a third of the time of a pair."""
        self._link(self._add(texts))

    @property
    def is_empty(self) -> bool:
        """Whether there are no stop strings."""
        return len(self.held) == 1

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        steps, code = self._steps, ord(char)
        while (after := steps.get(state << _CHAR_BITS | code)) is None:
            if state == _START:
                return _START
            state = self._falls[state]
        return after

    def _add(self, texts: Iterable[str]) -> list[tuple[int, str]]:
        """Make the states; return of each the state before it and the character between them."""
        before = [(_START, "")]
        for text in texts:
            state = _START
            for depth, char in enumerate(text, 1):
                after = self._steps.setdefault(state << _CHAR_BITS | ord(char), len(before))
                if after == len(before):
                    before.append((state, char))
                    self.held.append(depth)
                state = after
            self.matches += [""] * (len(before) - len(self.matches))
            self.matches[state] = text
        return before

    def _link(self, before: list[tuple[int, str]]) -> None:
        """Find where each state falls back to: the longest suffix of its text that is a state, too."""
        self._falls *= len(before)
        goes_on = {state for state, _ in before}
        for state in sorted(range(1, len(before)), key=self.held.__getitem__):
            parent, char = before[state]
            fall = self._falls[state] = self.step(self._falls[parent], char) if parent != _START else _START
            self.matches[state] = self.matches[state] or self.matches[fall]
            if state not in goes_on:
                self.held[state] = self.held[fall]


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that could be the start of one.

    The match that ends first wins; of several that end together, the longest. With `passes_match` the match itself is
    passed on, too, and nothing is held back. Invariant: otherwise the text held back is the longest suffix of all text
    so far that starts a stop string.
    """

    def __init__(self, automaton: StopAutomaton, *, passes_match: bool = False) -> None:
        self.matched: str | None = None
        self._automaton = automaton
        self._passes_match = passes_match
        self._state = _START
        self._held = ""

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add text, in which a match may end; return the text to pass on. Feed nothing after a match."""
        assert self.matched is None
        automaton = self._automaton
        if automaton.is_empty:
            return text
        buffer, state = self._held + text, self._state
        for end, char in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, char)
            matched = automaton.matches[state]
            if matched and may_match:
                self.matched, self._held = matched, ""
                return buffer[: end if self._passes_match else end - len(matched)]
        self._state = state
        certain = len(buffer) - (0 if self._passes_match else automaton.held[state])
        self._held = buffer[certain:]
        return buffer[:certain]

    def flush(self) -> str:
        """Return the text held back; nothing may follow."""
        held, self._held = self._held, ""
        return held


NO_STOP = StopAutomaton(())
