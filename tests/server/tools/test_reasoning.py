"""Where a prompt leaves the reasoning: its own marks count, those in a user's text do not."""

from __future__ import annotations

import pytest

from gptserve.server.tools.parts import Parts
from gptserve.server.tools.reasoning import THINK, marks_of, read_reasoning, state_after
from gptserve.server.tools.tape import Steps, Tape
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
        ("{% set parts = text.split('<channel|>') %}", ("<|channel>", "<channel|>")),
        ("{{ '<|channel|>analysis' }}", None),
    ],
)
def test_the_chat_template_tells_the_marks(template: str, marks: tuple[str, str] | None) -> None:
    assert marks_of(template) == marks


@pytest.mark.parametrize("cut", range(30))
@pytest.mark.parametrize(
    ("text", "is_open", "found"),
    [
        ("<|channel>thought\nSo.\n<channel|>Hi", False, ("Hi", "So.\n")),
        ("<|channel>thought\n<channel|>Hi", False, ("Hi", "")),
        ("So I thought.<channel|>Hi", True, ("Hi", "So I thought.")),
        ("<|channel>So.<channel|>Hi", False, ("Hi", "So.")),
        ("thought", False, ("thought", "")),
    ],
)
def test_the_label_of_a_channel_is_no_part_of_the_reasoning(
    text: str, found: tuple[str, str], cut: int, *, is_open: bool
) -> None:
    marks = marks_of("<channel|>")
    assert marks is not None
    tape, parts = Tape(), Parts(str)

    def steps() -> Steps[None]:
        yield from read_reasoning(tape, parts, marks, is_open=is_open)
        yield from tape.pass_until((), parts.add_text)

    reading = steps()
    for piece, is_last in ((text[:cut], False), (text[cut:], True)):
        tape.feed(piece, is_last=is_last)
        next(reading, None)
    assert parts.take()[:2] == found


def test_a_prompt_that_ends_within_or_after_a_channel_is_told() -> None:
    tokenizer, marks = ByteTokenizer("<|channel>", "<channel|>", "<|turn>"), marks_of("<channel|>")
    assert marks is not None
    for end, state in (("thought\n", "open"), ("thought\n<channel|>", "closed")):
        prompt = tokenizer.encode_with_special(f"<|turn>model\n<|channel>{end}")
        for is_continued in (True, False):
            assert state_after(prompt, tokenizer, marks, is_continued=is_continued) == state


def test_marks_that_are_special_tokens_are_no_ends_of_a_message() -> None:
    tokenizer, marks = ByteTokenizer("[THINK]", "[/THINK]", "[/INST]"), marks_of("[/THINK]")
    assert marks is not None
    for prompt, state in (("[/INST][THINK]", "open"), ("[/INST][THINK]So.[/THINK]", "closed"), ("[/INST]", "none")):
        assert state_after(tokenizer.encode_with_special(prompt), tokenizer, marks, is_continued=True) == state
