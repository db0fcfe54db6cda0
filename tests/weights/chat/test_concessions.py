"""What is rewritten for a template that refuses a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from gptserve.weights.chat.concessions import Message, versions
from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.errors import ChatTemplateError

SINGLE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "({{ m.content }}{{ m.tool_calls[0].function.name }})"
    "{% else %}[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)
CALLS = "{% for m in messages %}{% for call in m.tool_calls %}SHOWN{% endfor %}{% endfor %}"
ITEMS = CALLS.replace("SHOWN", "{{ call.function.name }}{{ call.function.arguments | items | list }}")
JSON = CALLS.replace("SHOWN", "{{ call.function.arguments | tojson }}")


def call(name: str, arguments: object = None, **fields: Any) -> Message:
    return {
        **fields,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def asked(*calls: Message, content: str = "") -> list[Message]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


def result(content: str, **fields: str) -> Message:
    return {"role": "tool", "content": content, **fields}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ([call("f", id="a"), call("g", id="b")], [result("F", tool_call_id="a"), result("G", tool_call_id="b")],
         "[user:hi](Hm.f)[tool:F](g)[tool:G][user:so?]"),
        ([call("f", id="a"), call("g", id="b")], [result("G", tool_call_id="b"), result("F", tool_call_id="a")],
         "[user:hi](Hm.f)[tool:F](g)[tool:G][user:so?]"),
        ([call("f"), call("g")], [result("F"), result("G"), result("more")],
         "[user:hi](Hm.f)[tool:F](g)[tool:G][tool:more][user:so?]"),
        ([call("f", id="a"), call("g", id="b"), call("h", id="c")], [result("H", tool_call_id="c")],
         "[user:hi](Hm.f)(g)(h)[tool:H][user:so?]"),
        ([call("f", id="a")], [result("F", tool_call_id="x")], "[user:hi](Hm.f)[tool:F][user:so?]"),
    ],
)  # fmt: skip
def test_a_template_of_single_calls_gets_a_message_for_each(
    calls: list[Message], results: list[Message], expected: str
) -> None:
    messages = [*asked(*calls, content="Hm."), *results, {"role": "user", "content": "so?"}]
    assert ChatTemplate(SINGLE, {}).render(messages, {}) == expected


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        (ITEMS, {"a": 1}, "f[('a', 1)]"),
        (ITEMS, "Oslo", "f[]"),
        (JSON, "Oslo", '"Oslo"'),
        (JSON, {"a": 1}, '{"a": 1}'),
    ],
)
def test_arguments_that_are_a_text_are_an_empty_object_where_a_template_takes_no_text(
    source: str, arguments: object, expected: str
) -> None:
    assert ChatTemplate(source, {}).render(asked(call("f", arguments)), {}) == expected


def test_arguments_are_json_where_a_template_takes_only_a_text() -> None:
    source = CALLS.replace("SHOWN", "{{ '(' + call.function.arguments + ')' }}")
    assert ChatTemplate(source, {}).render(asked(call("f", {"a": "é"}), call("g", "Oslo")), {}) == '({"a": "é"})(Oslo)'


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}{{ raise_exception('it must come first') }}"
    "{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def test_system_messages_are_one_where_a_template_takes_one() -> None:
    system, developer, user = ({"role": role, "content": role[0]} for role in ("system", "developer", "user"))
    template = ChatTemplate(ONE_SYSTEM, {})
    assert template.render([system, developer, user], {}) == "[system:s\n\nd][user:u]"
    assert template.render([system, user], {}) == "[system:s][user:u]"
    with pytest.raises(ChatTemplateError, match="it must come first"):
        template.render([system, user, system], {})


@pytest.mark.some(2)
@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_answer_is_a_blank_where_a_template_wants_one(content: object) -> None:
    source = "{% for m in messages %}{{ raise_exception('no content') if not m.content }}[{{ m.content }}]{% endfor %}"
    messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    assert ChatTemplate(source, {}).render([*messages, messages[0]], {}) == "[a][ ][a]"
    assert ChatTemplate(source.replace("if not", "if no and"), {}).render(messages, {}) == "[a][]"


def test_both_are_conceded_at_once() -> None:
    source = SINGLE.replace(".name }}", ".name }}{{ m.tool_calls[0].function.arguments | items | list }}")
    text = ChatTemplate(source, {}).render(asked(call("f", "x"), call("g", {"a": 1})), {})
    assert text == "[user:hi](f[])(g[('a', 1)])"


def test_what_is_refused_all_the_same_is_told_of_what_was_given() -> None:
    source = SINGLE.replace("[0]", "[1]")
    with pytest.raises(
        ChatTemplateError, match=r"^the chat template refuses this conversation: only single tool-calls"
    ):
        ChatTemplate(source, {}).render(asked(call("f"), call("g")), {})


def test_a_version_is_there_only_if_it_differs_and_none_is_changed() -> None:
    assert list(versions([{"role": "user", "content": "hi"}])) == [[{"role": "user", "content": "hi"}]]
    plain = asked(call("f", {"a": 1}))
    assert list(versions(plain)) == [plain, asked(call("f", '{"a": 1}'))]
    both = asked(call("f", "x"), call("g"))
    kept = [dict(message) for message in both]
    assert len(list(versions(both))) == 4
    assert both == kept


def test_a_message_after_calls_can_be_continued() -> None:
    messages = [*asked(call("f"), call("g")), result("F"), {"role": "assistant", "content": "Once"}]
    text = ChatTemplate(SINGLE, {}).render(messages, {}, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user:hi](f)[tool:F](g)[assistant:Once"
