"""The JSON shapes of a conversation, as the chat template sees it. Chats and /tokenize take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gptserve.server.api.base_schemas import MAX_LABEL_LENGTH, Text, _RequestModel, _text_or_list
from gptserve.server.api.tool_schemas import Tool, ToolCall

CONTENT_RULE = "Input should be a string or a list of text parts"


class TextPart(_RequestModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_RequestModel):
    """A message of one side. The chat template decides which roles may follow each other."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True), Tag("list")],
        Discriminator(_text_or_list, custom_error_type="content_type", custom_error_message=CONTENT_RULE),
    ]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """what the assistant called"""
    tool_call_id: str | None = None
    """the call that this is the result of"""
    reasoning_content: str | None = None
    """how the assistant came to its content"""
    reasoning: str | None = None
    """another name of reasoning_content"""

    def to_template(self) -> dict[str, Any]:
        """Return the given fields; text parts are joined with line ends."""
        given = {name: value for name, value in self if value is not None}
        if not isinstance(self.content, str):
            given["content"] = "\n".join(part.text for part in self.content)
        if self.tool_calls is not None:
            given["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.reasoning is not None:
            given["reasoning_content"] = given.pop("reasoning")
        return given


class Conversation(_RequestModel):
    """Messages, and how to make a prompt of them."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None
    """end the prompt with the beginning of an answer; default true"""
    continue_final_message: bool | None = None
    """go on with the last message instead"""
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    """the functions that the model may call"""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables for the chat template"""
    reasoning_effort: Annotated[str, Field(max_length=MAX_LABEL_LENGTH)] | None = None
    """a variable for the chat template, which may ignore it"""
    verbosity: Annotated[str, Field(max_length=MAX_LABEL_LENGTH)] | None = None
    """a variable for the chat template, which may ignore it"""

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template; chat_template_kwargs win."""
        named = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        given = {name: value for name, value in named.items() if value is not None}
        return given | (self.chat_template_kwargs or {})

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as the chat template shows them to the model; None without any."""
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools or ()
        ] or None
