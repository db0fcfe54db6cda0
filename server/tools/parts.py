"""What has been read of an answer since the last delta: text, reasoning and additions to tool calls."""

from __future__ import annotations

from collections.abc import Callable

from gptserve.server.text.calls import CallDelta, join_calls


class Parts:
    """Collects what a reader finds. `new_id` returns the id of the call of an index."""

    def __init__(self, new_id: Callable[[int], str]) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._ids: set[str] = set()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self.add_text = self._text.append
        self.add_reasoning = self._reasoning.append

    def begin_call(self, name: str, own_id: str | None = None) -> None:
        """Begin a call; the arguments that follow are its own. It has the id that the model wrote, if that is new."""
        made_id = self._new_id(self.num_calls) if own_id is None or own_id in self._ids else own_id
        self._ids.add(made_id)
        self._calls.append(CallDelta(self.num_calls, "", made_id, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if text:
            self._calls.append(CallDelta(self.num_calls - 1, text))

    def take(self) -> tuple[str, str, tuple[CallDelta, ...]]:
        """Return text, reasoning and calls since the last time."""
        taken = "".join(self._text), "".join(self._reasoning), join_calls(self._calls)
        for added in (self._text, self._reasoning, self._calls):
            added.clear()
        return taken
