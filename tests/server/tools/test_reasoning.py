"""Where a prompt leaves the reasoning: its own marks count, those in a user's text do not."""

from __future__ import annotations

import pytest

from gptserve.server.tools.reasoning import THINK, marks_of, state_after
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

    assert state_after(tokens, ByteTokenizer(), THINK, is_continued=False) == state
    assert state_after(tokens, ByteTokenizer(), THINK, is_continued=True) == continued


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{{ '<think>' }}{{ message.content.split('</think>')[-1] }}", ("<think>", "</think>")),
        ("{{ '[THINK]' + part.thinking + '[/THINK]' }}", ("[THINK]", "[/THINK]")),
        ("{{ message.thinking }}", None),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|>", ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("{% set end = '</seed:think>' %}", ("<seed:think>", "</seed:think>")),
    ],
)
def test_the_chat_template_tells_the_marks(template: str, marks: tuple[str, str] | None) -> None:
    assert marks_of(template) == marks


def test_marks_that_are_special_tokens_are_no_ends_of_a_message() -> None:
    tokenizer, marks = ByteTokenizer("[THINK]", "[/THINK]", "[/INST]"), marks_of("[/THINK]")
    assert marks is not None
    for prompt, state in (("[/INST][THINK]", "open"), ("[/INST][THINK]So.[/THINK]", "closed"), ("[/INST]", "none")):
        assert state_after(tokenizer.encode_with_special(prompt), tokenizer, marks, is_continued=True) == state
