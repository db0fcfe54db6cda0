"""That many stop strings cost no more than one. What they find is in test_output.py."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from gptserve.server.schemas.completions import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from gptserve.server.text.stop import StopAutomaton, StopStrings
from tests.server.conftest import Api

SAME_START = ["a" * length + "b" for length in range(1, 65)]


def calls_of(run: Callable[[], object]) -> int:
    """Return how many functions are called, those of C too."""
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("text", ["a" * 500, "xyz" * 200, ("a" * 60 + "c") * 9])
def test_a_character_costs_the_same_beside_many_stop_strings(text: str) -> None:
    one, many = (StopStrings(StopAutomaton(stops)) for stops in (SAME_START[-1:], SAME_START))
    costs = [calls_of(lambda found=found: found.feed(text)) for found in (one, many)]  # type: ignore[misc]
    assert costs[1] <= 1.1 * costs[0]


def test_the_automaton_grows_with_the_characters_alone() -> None:
    stops = ["x" * 9 + chr(97 + i) for i in range(26)]
    assert len(StopAutomaton(stops).held) == 1 + 9 + 26


def test_as_many_as_may_be_are_found(api: Api) -> None:
    stops = [f"{i:030}!" for i in range(MAX_STOP_STRINGS - 1)]
    assert sum(map(len, stops)) <= MAX_STOP_CHARACTERS - 2
    choice = api.complete(prompt="x", stop=[*stops, "bc"]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("a", "bc")
