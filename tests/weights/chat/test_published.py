"""The text of the chat templates of published models, against that of transformers, byte for byte.

A template that writes nothing of a message, or a Python list in its place, gets the message in another form: then the
text is that of transformers for one of these forms.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.errors import ChatTemplateError
from tests.weights.chat.published import Published, published

pytestmark = pytest.mark.slow
Message = dict[str, Any]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A <city>"},
        "days": {"type": "integer", "description": "How many"},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather, é", "parameters": PARAMETERS}}
]


def call(call_id: str, **arguments: object) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def say(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


CALLS = [call("abcdefghi", city="Oslo", days=2), call("abcdefghj", city="Ås")]
RAIN = say("user", "Rain?")
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": [say("user", " Hi é\n")]},
    "system": {"messages": [say("system", "Be brief."), RAIN, say("assistant", "Hello."), say("user", "2+2?")]},
    "tools": {"messages": [RAIN], "tools": TOOLS},
    "a call": {
        "messages": [
            RAIN,
            say("assistant", "", tool_calls=CALLS[:1]),
            say("tool", "Yes.", tool_call_id="abcdefghi", name="get_weather"),
        ],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [
            RAIN,
            say("assistant", "I look.", tool_calls=CALLS),
            say("tool", "Yes.", tool_call_id="abcdefghi"),
            say("tool", "No.", tool_call_id="abcdefghj"),
            say("assistant", "So."),
            say("user", "Sure?"),
        ],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [RAIN, say("assistant", "No.", reasoning_content="Hm.", reasoning="Hm."), say("user", "Sure?")]
    },
    "a call after reasoning": {
        "messages": [
            RAIN,
            say("assistant", "", tool_calls=CALLS[:1], reasoning_content="Hm.", reasoning="Hm."),
            say("tool", "Yes.", tool_call_id="abcdefghi"),
        ],
        "tools": TOOLS,
    },
    "parts": {"messages": [say("system", parts("Be", "brief.")), say("user", parts("Rain", "today?"))]},
    "developer": {"messages": [say("developer", "Be brief."), RAIN]},
    "continued": {
        "messages": [RAIN, say("assistant", "Once upon")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}


@pytest.fixture(scope="module")
def theirs(storyteller: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(storyteller)
    tokenizer.add_special_tokens(TOKENS)
    return tokenizer


def their_text(theirs: Any, source: str, messages: Sequence[Message], options: Mapping[str, Any]) -> str | None:
    """Return the text of transformers; None if it has none."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    options = {"add_generation_prompt": True, **options}
    try:
        if any(message["content"] is None for message in messages):  # apply_chat_template would leave that field out
            return str(_compile_jinja_template(source).render(messages=messages, **TOKENS, **options))
        return str(theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options))
    except Exception:
        return None


def _as_given(message: Message) -> Message:
    """Return a message as the server has it: with its reasoning in one field."""
    return {key: value for key, value in message.items() if key != "reasoning"}


def texts_of(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def shows(text: str, messages: Sequence[Message]) -> bool:
    """Whether a text has all of the messages, and no list as Python or JSON writes it."""
    said = [piece for message in messages for piece in texts_of(message)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    said += [value for call in calls for value in call["function"]["arguments"].values() if isinstance(value, str)]
    return re.search(r"""(['"])type\1: \1text\1""", text) is None and all(piece.strip() in text for piece in said)


def forms(messages: Sequence[Message], *, knows_developers: bool) -> Iterator[list[Message]]:
    """Yield the forms of a conversation that a template may get, as it is first."""
    if not knows_developers:
        roles = {"developer": "system"}
        messages = [{**message, "role": roles.get(message["role"], message["role"])} for message in messages]
    for version in (messages, list(_one_call_each(messages))):
        yield from map(list, itertools.product(*map(_forms, version)))


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield a conversation with each call in a message of its own, and its result after it."""
    results = {message.get("tool_call_id"): message for message in messages}
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            if message["role"] != "tool" or len(results) < 3:
                yield message
            continue
        for i, one in enumerate(calls):
            yield {**message, "tool_calls": [one], "content": message["content"] if i == 0 else ""}
            yield results[one["id"]]


def _forms(message: Message) -> list[Message]:
    """Return the forms of a message: its content, and the arguments of its calls."""
    texts, calls = texts_of(message), message.get("tool_calls")
    joined = "\n".join(texts)
    nothing = [None] if calls and not joined else []
    several = [parts(*texts), joined] if len(texts) > 1 else []
    contents = [message["content"], *nothing, *several, parts(joined)]
    ways = [{"tool_calls": calls}, {"tool_calls": list(map(_with_text, calls))}] if calls else [{}]
    return [{**message, **way, "content": content} for way in ways for content in contents]


def _with_text(given: Message) -> Message:
    function = given["function"]
    return {**given, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@pytest.mark.parametrize("template", published(), ids=lambda template: template.name)
def test_published_templates_have_the_text_of_transformers(theirs: Any, template: Published) -> None:
    source = template.source()
    ours = ChatTemplate(source, TOKENS)
    knows_developers = re.search(r"['\"]developer['\"]", source) is not None
    try:
        for name, conversation in CONVERSATIONS.items():
            messages, options = conversation["messages"], {**conversation}
            del options["messages"]
            today = None
            while today != date.today():  # some write the date
                today = date.today()
                try:
                    text = ours.render(list(map(_as_given, messages)), {}, **options)
                except ChatTemplateError:
                    text = None
                candidates = forms(messages, knows_developers=knows_developers)
                first = their_text(theirs, source, next(candidates), options)
            if first is not None and shows(first, messages):
                assert text == first, name
            elif text is None:
                assert first is None, name
            else:
                assert text == first or any(their_text(theirs, source, form, options) == text for form in candidates), (
                    name
                )
    finally:
        ours.close()
