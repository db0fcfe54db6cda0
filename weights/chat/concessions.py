"""Rewrites a conversation that a template refuses: the same messages, in a form that more templates take.

Llama's template takes one call a message; some read arguments only as an object and some only as a text; some take one
system message, and some no empty answer. A server returns what a model writes, and a client sends that back. Called by
template.py; knows no Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from gptserve.weights.chat.fitting import Content, Message, one_system_message, texts_of


def versions(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as it is, then other versions, each with more that was conceded."""
    version = list(messages)
    yield version
    for concede in (one_system_message, blank_for_nothing, one_call_each):
        changed = concede(version)
        if changed != version:
            version = changed
            yield version
    for concede in (arguments_as_texts, arguments_as_objects):
        changed = concede(version)
        if changed != version:
            yield changed


def blank_for_nothing(messages: Sequence[Message]) -> list[Message]:
    """Put a blank in the place of answers without a text or a call: they may not be left out where roles alternate."""
    return [
        {**message, "content": " "}
        if message.get("role") == "assistant" and not message.get("tool_calls") and _is_empty(message.get("content"))
        else message
        for message in messages
    ]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, with its results after it: of its id, or else of its place."""
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results = list(takewhile(lambda next_one: next_one["role"] == "tool", messages[at:]))
        at += len(results)
        ids = [call.get("id") for call in calls]
        places = [_place(result, i, ids) for i, result in enumerate(results)]
        for i, call in enumerate(calls):
            before = message if i == 0 else {"role": message["role"], "content": ""}
            split.append({**before, "tool_calls": [call]})
            split += [result for result, place in zip(results, places, strict=True) if place == i]
    return split


def arguments_as_texts(messages: Sequence[Message]) -> list[Message]:
    """Put JSON in the place of arguments that are an object."""
    return _with_arguments(
        messages, lambda value: json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    )


def arguments_as_objects(messages: Sequence[Message]) -> list[Message]:
    """Put an empty object in the place of arguments that are a text."""
    return _with_arguments(messages, lambda value: value if isinstance(value, dict) else {})


def _with_arguments(messages: Sequence[Message], change: Callable[[object], object]) -> list[Message]:
    def changed(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}

    return [
        {**message, "tool_calls": list(map(changed, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def _is_empty(content: Content | None) -> bool:
    return content is not None and not any(texts_of(content))


def _place(result: Message, i: int, ids: Sequence[str | None]) -> int:
    """Return the place of the call that a result belongs to."""
    named = result.get("tool_call_id")
    return ids.index(named) if named is not None and named in ids else min(i, len(ids) - 1)
