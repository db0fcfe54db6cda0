"""Rewrites a conversation that a template refuses: the same calls and results, in a form that more templates take.

Llama's template takes one call a message, and some read arguments only as an object. A server returns what a model
writes, and a client sends that back. Called by template.py; knows no Jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]


def versions(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as it is, then again with each concession that changes it, and those before."""
    version = list(messages)
    yield version
    for concede in _CONCESSIONS:
        changed = concede(version)
        if changed != version:
            version = changed
            yield version


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


def arguments_as_objects(messages: Sequence[Message]) -> list[Message]:
    """Put an empty object in the place of arguments that are a text."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


_CONCESSIONS: tuple[Callable[[Sequence[Message]], list[Message]], ...] = one_call_each, arguments_as_objects


def _place(result: Message, i: int, ids: Sequence[str | None]) -> int:
    """Return the place of the call that a result belongs to."""
    named = result.get("tool_call_id")
    return ids.index(named) if named is not None and named in ids else min(i, len(ids) - 1)


def _with_object(call: Message) -> Message:
    function = call["function"]
    return call if isinstance(function["arguments"], dict) else {**call, "function": {**function, "arguments": {}}}
