"""The format of calls that the chat templates of published models get: it reads the calls that they write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gptserve.server.text.calls import join_calls
from gptserve.server.tools.formats import OWN_FORMATS, format_of
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.reasoning import marks_of
from gptserve.server.tools.tape import Tape
from gptserve.server.tools.values import kinds_of
from gptserve.weights.chat.template import ChatTemplate
from tests.weights.chat.published import Published, published
from tests.weights.chat.test_published import CALLS, PARAMETERS, RAIN, TOKENS, TOOLS, say

pytestmark = pytest.mark.slow
TEMPLATES = published()
PAGE = Path(__file__).parents[3] / "docs" / "dev" / "tool-formats.md"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_published_template_has_its_format_or_none(template: Published) -> None:
    source = template.source()
    form = format_of(source)
    if re.search(r"\btools\b", source):  # what has none is refused before its format matters
        assert form is (OWN_FORMATS[template.form] if template.form else None)
    marks = marks_of(source)
    assert ("" if marks is None else marks.end) == template.think


def test_the_page_names_the_templates_whose_calls_are_not_read() -> None:
    _, section = PAGE.read_text(encoding="utf-8").split("## Templates without a format\n")
    section = section.split("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE) for name in re.findall("`(.+?)`", row)
    }
    without = {one.name for one in TEMPLATES if not one.form and re.search(r"\btools\b", one.source())}
    assert named == without - {"openai-gpt-oss-120b"}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("template", [one for one in TEMPLATES if one.shows_calls], ids=lambda template: template.name)
def test_a_format_reads_the_calls_that_a_template_writes(template: Published, count: int) -> None:
    chat = ChatTemplate(template.source(), TOKENS)
    try:
        answer = say("assistant", "", tool_calls=CALLS[:count])
        whole = chat.render([RAIN, answer], {}, tools=TOOLS, add_generation_prompt=False)
        asked = chat.render([RAIN], {}, tools=TOOLS)
    finally:
        chat.close()
    same = next(i for i, char in enumerate(whole) if not asked.startswith(char, i))
    before = whole[:same]
    start = before.rfind("<")  # of a mark that both texts begin, perhaps
    text = whole[start if ">" not in before[start:] and start >= 0 else same :]
    if template.form == "llama":  # one call a message
        text, count = text.split("<|eot_id|>")[0], 1 if "<|eot_id|>" in text else count
    tape, parts = Tape(), Parts(str)
    tape.feed(text, is_last=True)
    next(OWN_FORMATS[template.form].read(tape, parts, {"get_weather": kinds_of(PARAMETERS)}), None)
    calls = join_calls(parts.take()[2])
    assert [call.name for call in calls] == ["get_weather"] * count
    assert [json.loads(call.arguments) for call in calls] == [one["function"]["arguments"] for one in CALLS[:count]]
