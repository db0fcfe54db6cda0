"""What templates of published kinds get: contents as texts or parts, roles that they know, calls beside no text."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from gptserve.weights.chat.fitting import Fitting, Message, as_parts
from gptserve.weights.chat.sandbox import open_template
from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.errors import ChatTemplateError

CHATML = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</>' }}{% endfor %}"
KNOWN_ROLES = (  # ChatML's kind that knows three roles
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
GUARD = (  # Llama Guard 3's: a text is iterated letter by letter, and none is a part
    "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ m['role'] }}: {{ c['text'] }};{% endfor %}{% endfor %}"
)
VISION = (  # Llama 3.2 Vision's: the system message is a text
    "{% if messages[0].role == 'system' %}<system>{{ messages[0]['content'] | trim }}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% elif c['type'] == 'text' %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
QWEN_VL = (  # Qwen2-VL's: a part that has a text is one
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if 'image' in c %}<image>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
GEMMA = (  # Gemma 3's: of a system message that is no text the first part
    "{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}{{ messages[0]['content'] }}"
    "{% else %}{{ messages[0]['content'][0]['text'] }}{% endif %}|{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}"
    "{{ c['text'] | trim }}{% endfor %}{% endif %};{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}{% endfor %}"
JOINED_PARTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | map(attribute='text') | join('+') }}{% endfor %}"
DUMPED = "{% for m in messages %}{{ m.content | tojson }}{# text #}{% endfor %}"
WRITTEN = "{% for m in messages %}{{ m.content }}{# text #}{% endfor %}"
MISTRAL_3 = (  # Mistral Small 3's: user and system as either, the others as a text
    "{% for m in messages %}{% if m.role in ('user', 'system') and m.content is not string %}[{{ m.role }}]"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
    "{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}"
)
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + GUARD
TEXT, PARTS = "one", as_parts("one", "two")


def say(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (CHATML, [say("user", TEXT)], "<user>one</>"),
        (CHATML, [say("user", PARTS)], "<user>one\ntwo</>"),
        (CHATML, [say("system", as_parts("one"))], "<system>one</>"),
        (GUARD, [say("user", TEXT)], "user: one;"),
        (GUARD, [say("user", PARTS)], "user: one;user: two;"),
        (GUARD, [say("user", TEXT), say("assistant", "two")], "user: one;assistant: two;"),
        (ALTERNATING, [say("user", TEXT), say("tool", "two")], "user: one;tool: two;"),
        (VISION, [say("system", PARTS), say("user", PARTS)], "<system>one\ntwo<user>onetwo"),
        (VISION, [say("system", TEXT), say("user", TEXT)], "<system>one<user>one"),
        (QWEN_VL, [say("system", PARTS), say("user", PARTS), say("tool", PARTS)],
         "<system>onetwo<user>onetwo<tool>onetwo"),
        (QWEN_VL, [say("user", "Hi"), say("made up", PARTS)], "<user>Hi<made up>onetwo"),
        (GEMMA, [say("system", PARTS), say("user", PARTS)], "one\ntwo|onetwo;"),
        (FIRST_PART, [say("user", PARTS), say("assistant", TEXT)], "<user>one\ntwo<assistant>one"),
        (JOINED_PARTS, [say("user", PARTS), say("assistant", TEXT)], "<user>one+two<assistant>one"),
        (MISTRAL_3, [say("system", TEXT), say("user", PARTS), say("assistant", PARTS)],
         "[system]one[user]onetwo[assistant]one\ntwo"),
        (WRITTEN, [say("user", PARTS)], "one\ntwo"),
        (DUMPED, [say("user", PARTS)], '"one\\ntwo"'),
        (DUMPED, [say("user", TEXT)], '"one"'),
    ],
)  # fmt: skip
def test_contents_come_in_the_form_that_a_template_takes(source: str, messages: list[Message], expected: str) -> None:
    template = ChatTemplate(source, {})
    assert [template.render(messages, {}) for _ in range(2)] == [expected] * 2


@pytest.mark.some(2)
@pytest.mark.parametrize("source", [CHATML, GUARD, VISION, QWEN_VL, GEMMA, FIRST_PART, JOINED_PARTS, MISTRAL_3])
@pytest.mark.parametrize("content", [" one ", as_parts(" zero", " one ")])
def test_a_final_message_of_each_form_is_continued(source: str, content: Any) -> None:
    messages = [say("user", "Hi"), say("assistant", content)]
    text = ChatTemplate(source, {}).render(messages, {}, add_generation_prompt=False, continue_final_message=True)
    assert text.rstrip().endswith("one")
    assert "TAG" not in text


def test_a_template_is_tried_once_and_only_if_it_reads_parts() -> None:
    tried: list[list[Message]] = []

    def render(messages: list[Message], source: str) -> str:
        tried.append(messages)
        return open_template(source)({"messages": messages})

    fitting = Fitting(VISION, partial(render, source=VISION))
    for _ in range(3):
        fitting.fit([say("system", TEXT), say("user", PARTS)])
    roles = [[message["role"] for message in messages] for messages in tried]
    assert roles == [["user"], ["system", "user"], ["user"]]
    fitting.fit([say(role, PARTS) for role in ("one", "another")])
    assert len(tried) == 3, "any number of roles could come"
    tried.clear()
    assert Fitting(CHATML, partial(render, source=CHATML)).fit([say("user", PARTS)]) == [say("user", "one\ntwo")]
    assert tried == []


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (KNOWN_ROLES, [say("developer", "Be brief"), say("user", "Hi")], "<system>Be brief<user>Hi"),
        (KNOWN_ROLES.replace("'user'", "'user', 'developer'"), [say("developer", "Be brief")], "<developer>Be brief"),
        (KNOWN_ROLES.replace("'user'", '"developer"'), [say("developer", "Be brief")], "<developer>Be brief"),
        (KNOWN_ROLES + "{# the developer's #}", [say("developer", "Be brief")], "<system>Be brief"),
        (GUARD, [say("developer", TEXT)], "system: one;"),
    ],
)
def test_a_developer_is_the_system_to_a_template_that_knows_none(
    source: str, messages: list[Message], expected: str
) -> None:
    assert ChatTemplate(source, {}).render(messages, {}) == expected


FIRST_SYSTEM = (  # Gemma's kind: what comes later is left out
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"
)


def test_system_messages_are_one_where_a_template_writes_the_first_alone() -> None:
    messages = [say("system", "one"), say("developer", as_parts("two", "three")), say("user", "Hi")]
    assert ChatTemplate(FIRST_SYSTEM, {}).render(messages, {}) == "<one\n\ntwo\n\nthree>[Hi]"
    assert ChatTemplate(CHATML, {}).render(messages, {}) == "<system>one</><system>two\nthree</><user>Hi</>"


NULL_BESIDE_CALLS = (  # DeepSeek's
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NULL_BESIDE_CALLS, '[Hi]f{"a": 1}'),
        (NULL_BESIDE_CALLS.replace("c.function.name + c.function.arguments", "c.function.name ~ c.function.arguments"),
         "[Hi]f{'a': 1}"),
        (CHATML, "<user>Hi</><assistant></>"),
        ("{% for m in messages %}{{ m.content | tojson }}{{ m.tool_calls }}{% endfor %}",
         "\"Hi\"\"\"[{'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}]"),
    ],
)  # fmt: skip
def test_content_beside_calls_is_null_where_only_that_shows_them(source: str, expected: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [say("user", "Hi"), say("assistant", "", tool_calls=[call])]
    assert ChatTemplate(source, {}).render(messages, {}) == expected


def test_what_a_template_refuses_while_it_is_tried_is_no_fault() -> None:
    source = (
        "{# text #}{% if messages | length < 3 %}{{ raise_exception('short') }}{% endif %}{{ messages[2].content }}"
    )
    template = ChatTemplate(source, {})
    messages = [say("user", "a"), say("assistant", "b"), say("user", PARTS)]
    assert template.render(messages, {}) == "one\ntwo"
    with pytest.raises(ChatTemplateError, match=r"^the chat template refuses this conversation: short$"):
        template.render(messages[:1], {})
    with pytest.raises(ChatTemplateError, match=r"^the chat template is not valid: "):
        ChatTemplate("{% for text %}", {}).render(messages, {})
