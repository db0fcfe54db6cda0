"""The JSON shapes of a conversation, as the chat template sees it. Chats and /tokenize take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gptserve.server.schemas.base import MAX_LABEL_LENGTH, Text, _RequestModel, _text_or_list
from gptserve.server.schemas.tools import FunctionCall, Tool, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_ROLE_LENGTH = 64
CONTENT_RULE = "Input should be a string or a list of text parts"

PART_RULE = "Input should be a text part: only text is served, also of a model that sees"
NOT_TEXT = frozenset(
    (
        "audio",
        "audio_url",
        "file",
        "image",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video",
        "video_url",
    )
)
"""The types of parts that OpenAI's interface and others have beside text."""


class TextPart(_RequestModel):
    """A text of a message. Clients that know the Responses API send its names, too."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(_RequestModel):
    """What the assistant said to refuse."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text as the chat template sees it."""
        return self.refusal


def _kind_of_part(value: Any) -> str | None:
    """Return the tag of a part; None for one that a model would see or hear."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if isinstance(kind, str) and kind in NOT_TEXT:
        return None
    return "[refusal]" if kind == "refusal" else "[text]"


Part = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")],
    Discriminator(_kind_of_part, custom_error_type="part_kind", custom_error_message=PART_RULE),
]


def _or_empty(schema: dict[str, Any]) -> None:
    """Say in a schema that an empty object is taken, too: `take_fields` leaves it out."""
    schema["anyOf"].append({"type": "object", "maxProperties": 0})


class Message(_RequestModel):
    """A message of one side. The chat template decides which roles there are and which may follow each other."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_LENGTH)]
    """system, developer, user, assistant, tool, function (an older name of tool), or another that the template has"""
    content: Annotated[
        Text | Annotated[list[Part], Field(fail_fast=True), Tag("list")],
        Discriminator(_text_or_list, custom_error_type="content_type", custom_error_message=CONTENT_RULE),
    ]
    name: str | None = None
    refusal: str | None = None
    """what the assistant said to refuse; a part of its content"""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """what the assistant called"""
    function_call: Annotated[FunctionCall | None, Field(json_schema_extra=_or_empty)] = None
    """an older spelling of one of the tool_calls"""
    tool_call_id: str | None = None
    """the call that this is the result of"""
    reasoning_content: str | None = None
    """how the assistant came to its content"""
    reasoning: str | None = None
    """another name of reasoning_content"""

    def to_template(self) -> dict[str, Any]:
        """Return the given fields."""
        given = {name: value for name, value in self if value is not None}
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        if refusal := given.pop("refusal", None):
            texts = [*filter(None, texts), refusal]
        if texts != [self.content]:
            given["content"] = [{"type": "text", "text": text} for text in texts]
        if self.role == "function":
            given["role"] = "tool"
        if self.tool_calls is not None:
            given["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.function_call is not None:
            call = ToolCall(function=given.pop("function_call")).to_template()
            given["tool_calls"] = [*given.get("tool_calls", ()), call]
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
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if self.reasoning_effort is not None:
            given["enable_thinking"] = self.reasoning_effort != "none"  # as Qwen3's and other templates name it
        return given | (self.chat_template_kwargs or {})

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as the chat template shows them to the model; None without any."""
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools or ()
        ] or None
