"""<think>…</think>: the reasoning of Qwen3, of DeepSeek's distillations and of others, apart from the answer.

Magistral, Command A, Seed-OSS and Gemma 4 have other marks. Some templates end the prompt with the first mark, so that
the answer begins within the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import SPACE, Steps, Tape


class ThinkMarks(NamedTuple):
    """What a reasoning stands between."""

    begin: str
    end: str


THINK = ThinkMarks("<think>", "</think>")
_KNOWN = (
    THINK,
    ThinkMarks("[THINK]", "[/THINK]"),
    ThinkMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkMarks("<seed:think>", "</seed:think>"),
    ThinkMarks("<|channel>", "<channel|>"),
)
_LABELS = {"<|channel>": "thought"}
"""What models write behind a mark, which is no part of the reasoning."""


def marks_of(template: str) -> ThinkMarks | None:
    """Return the marks of a model by its chat template; None if it has none."""
    return next((marks for marks in _KNOWN if marks.end in template), None)


def state_after(
    prompt: Sequence[int], tokenizer: Tokenizer, marks: ThinkMarks, *, is_continued: bool
) -> Literal["open", "closed", "none"]:
    """Return whether the prompt ends within a reasoning or after one.

    Its last marks count: of a message that is continued, those after its last special token; otherwise those with which
    it ends, as what a user wrote comes before.
    """
    special = (at for at in range(len(prompt) - 1, -1, -1) if prompt[at] in tokenizer.special_ids)
    own = [tokenizer.encode_with_special(mark) for mark in marks]
    start = next((at + 1 for at in special if [prompt[at]] not in own), 0)
    tail = b"".join(map(tokenizer.token_bytes, prompt[start:])).decode(errors="replace").rstrip()
    if not is_continued:
        label = _LABELS.get(marks.begin, "")
        tail = tail.removesuffix(label) if tail.endswith(marks.begin + label) else tail
        tail = tail[-len(marks.end) :]
    if tail.rfind(marks.begin) > tail.rfind(marks.end):
        return "open"
    return "closed" if marks.end in tail else "none"


def read_reasoning(tape: Tape, parts: Parts, marks: ThinkMarks, *, is_open: bool) -> Steps[None]:
    """Read the reasoning at the beginning of an answer, and the white space around it."""
    if not is_open:
        blank = yield from tape.take_run(SPACE)
        if not (yield from tape.accept(marks.begin)):
            parts.add_text(blank)
            return
        yield from tape.accept(_LABELS.get(marks.begin, ""))
    yield from tape.skip_space()
    yield from tape.pass_until((marks.end,), parts.add_reasoning)
    yield from tape.skip_space()
