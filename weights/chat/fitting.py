"""Finds what a template takes, and fits messages to that.

Some templates loop over the parts of a content and write nothing of a text; others fail at parts, or write the list
itself. Some write the first system message alone, or no calls beside a content that is an empty text. They do so
without a word, so they are tried with texts to look for, once a template. These have a line end within them, which a
list that is written as it is would show escaped. Called by template.py; knows no Jinja.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
_Parts = Literal["all", "first", "none"]
"""Which of several parts a template writes."""

_ROLES = ("system", "developer", "user", "assistant", "tool")  # others come from clients, who could make up any number
_FIRST, _SECOND, _NAME = "the first\nprobe", "the second\nprobe", "name_of_probe"


class Fitting:
    """Fits messages to one template. `render` returns its text for a conversation, None if it refuses it."""

    def __init__(self, source: str, render: Callable[[list[Message]], str | None]) -> None:
        self._names_developer = re.search(r"['\"]developer['\"]", source) is not None
        self._reads_parts = re.search(r"\btext\b", source) is not None  # the field of a part
        self._render = render
        self._found: dict[str, bool] = {}
        self._parts: dict[str, _Parts] = {}

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template takes them; what it takes in no form is as it was, with texts for parts."""
        fitted = [self._with_role(message) for message in messages]
        joined = one_system_message(fitted)
        if len(joined) < len(fitted) and not self._once("systems", self._shows_systems):
            fitted = joined
        return [self._with_content(message) for message in fitted]

    def _with_role(self, message: Message) -> Message:
        """Return a message of the system for one of a developer, unless the template knows developers."""
        is_unknown = message.get("role") == "developer" and not self._names_developer
        return {**message, "role": "system"} if is_unknown else message

    def _with_content(self, message: Message) -> Message:
        content = message.get("content")
        if content == "" and message.get("tool_calls"):
            return {**message, "content": None} if self._once("null", self._needs_null) else message
        if content is None or not (self._reads_parts or isinstance(content, list)):
            return message
        role = message.get("role")
        return {**message, "content": self._content(role if role in _ROLES else "user", texts_of(content))}

    def _content(self, role: str, texts: Sequence[str]) -> Content:
        if not self._reads_parts:
            return "\n".join(texts)
        if len(texts) == 1 and self._is_text_shown(role):
            return texts[0]
        shown = self._parts_shown(role)
        if shown == "all":
            return as_parts(*texts)
        if self._is_text_shown(role):
            return "\n".join(texts)
        if shown == "first":
            return as_parts("\n".join(texts))
        return (
            "\n".join(texts) if role == "user" else self._content("user", texts)
        )  # no such role, or not in this place

    def _is_text_shown(self, role: str) -> bool:
        return self._once(role, lambda: _FIRST in self._try(role, _FIRST))

    def _parts_shown(self, role: str) -> _Parts:
        if role not in self._parts:
            text = self._try(role, as_parts(_FIRST, _SECOND))
            self._parts[role] = "none" if _FIRST not in text else "all" if _SECOND in text else "first"
        return self._parts[role]

    def _once(self, name: str, find_out: Callable[[], bool]) -> bool:
        if name not in self._found:
            self._found[name] = find_out()
        return self._found[name]

    def _try(self, role: str, content: Content) -> str:
        """Return the text of a conversation with this content, as short as one with this role can be."""
        tried = {"role": role, "content": content}
        if role == "user":
            return self._render([tried]) or ""
        user = self._user()
        if role == "tool":
            call = _call({})
            asked = {"role": "assistant", "content": self._content("assistant", [""]), "tool_calls": [call]}
            return self._render([user, asked, {**tried, "tool_call_id": call["id"]}]) or ""
        return self._render([tried, user] if role == "system" else [user, tried, user]) or ""

    def _shows_systems(self) -> bool:
        """Return whether of two system messages both are written."""
        systems = [{"role": "system", "content": self._content("system", [text])} for text in (_FIRST, _SECOND)]
        text = self._render([*systems, self._user()]) or ""
        return _FIRST in text and _SECOND in text

    def _needs_null(self) -> bool:
        """Return whether calls are written beside null alone, not beside an empty text."""
        user = self._user()

        def is_shown(content: object) -> bool:
            calls = _call({}), _call("{}")  # each is what some templates take alone
            asked = [{"role": "assistant", "content": content, "tool_calls": [call]} for call in calls]
            return any(_NAME in (self._render([user, message]) or "") for message in asked)

        return not is_shown("") and is_shown(None)

    def _user(self) -> Message:
        return {"role": "user", "content": self._content("user", ["Hi"])}


def one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join system messages that follow each other."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.get("role") == joined[-1].get("role") == "system":
            texts = [*texts_of(joined[-1]["content"]), *texts_of(message["content"])]
            joined[-1] = {**joined[-1], "content": "\n\n".join(texts)}
        else:
            joined.append(message)
    return joined


def texts_of(content: Content) -> list[str]:
    """Return the texts of a content, which has no other parts."""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def as_parts(*texts: str) -> list[dict[str, Any]]:
    """Return texts as parts of a content."""
    return [{"type": "text", "text": text} for text in texts]


def _call(arguments: object) -> Message:
    return {"id": "probe0001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
