"""Roles that only some chat templates have. A template may not leave out the messages of one that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gptserve.server.core.errors import show
from gptserve.server.schemas.chat import ROLES
from gptserve.weights.errors import ChatTemplateError

Messages = Sequence[Mapping[str, Any]]


def check_roles(messages: Messages, render: Callable[[Messages], str]) -> None:
    """Raise ChatTemplateError if the template leaves out a message whose role is none of the usual ones.

    Such messages get other contents, and `render` tells whether these are in the prompt.
    """
    marks = {i: f"message{i}of{len(messages)}" for i, message in enumerate(messages) if message["role"] not in ROLES}
    if not marks:
        return
    seen = [{**message, "content": marks.get(i, message["content"])} for i, message in enumerate(messages)]
    text = render(seen)
    for i, mark in marks.items():
        if mark not in text:
            role = show(messages[i]["role"])
            raise ChatTemplateError(f"messages[{i}].role: the chat template leaves out messages of the role {role}")
