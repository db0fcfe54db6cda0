"""Where a prompt leaves the reasoning: its own marks count, those in a user's text do not."""

from __future__ import annotations

import pytest

from gptserve.server.tools.reasoning import state_after
from tests.server.fake_engine import ByteTokenizer


@pytest.mark.parametrize(
    ("prompt", "state", "continued"),
    [
        ("User: Hi Bot:", "none", "none"),
        ("User: Hi Bot: <think>\n", "open", "open"),
        ("User: Hi Bot: <think>\n\n</think>\n\n", "closed", "closed"),
        ("User: what does <think> mean? Bot:", "none", "open"),
        ("User: what does </think> mean? Bot:", "none", "closed"),
        ("User: what does </think> mean? Bot: <think>", "open", "open"),
        ("User: Hi Bot: <think>I am no", "none", "open"),
        ("User: Hi Bot: <think>So.</think> I am", "none", "closed"),
    ],
)
def test_marks_at_the_end_count_and_of_a_continued_message_the_last_ones(
    prompt: str, state: str, continued: str
) -> None:
    tokens = tuple(prompt.encode())

    assert state_after(tokens, ByteTokenizer(), is_continued=False) == state
    assert state_after(tokens, ByteTokenizer(), is_continued=True) == continued
