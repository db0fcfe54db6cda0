"""Tools in the JSON shapes of the Responses API, where a function is flat: what a request offers, calls, their results.

`response_schemas.py` has these fields. `to_chat` gives the shapes of chats, which `tool_schemas.py` has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gptserve.server.api.base_schemas import Text, _Model, _RequestModel, _text_or_list
from gptserve.server.api.tool_schemas import Function, FunctionCall, _kind_of_choice

CONTENT_RULE = "Input should be a string or a list of parts"
TOOL_CHOICE_RULE = 'Input should be "none", "auto", "required" or {"type": "function", "name": …}'
Json = dict[str, Any]


class InputPart(_RequestModel):
    """A part of an item."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


Content = Annotated[
    Text | Annotated[list[InputPart], Field(fail_fast=True), Tag("list")],
    Discriminator(_text_or_list, custom_error_type="content_type", custom_error_message=CONTENT_RULE),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    def to_chat(self) -> Json:
        """Return the tool of a chat."""
        return {"type": self.type, "function": self.model_dump(exclude={"type"})}


class NamedFunction(_RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    name: str

    def to_chat(self) -> Json:
        """Return the choice of a chat."""
        return {"type": self.type, "function": {"name": self.name}}


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedFunction, Tag("function")],
    Discriminator(_kind_of_choice, custom_error_type="tool_choice", custom_error_message=TOOL_CHOICE_RULE),
]


class CallItem(FunctionCall):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str

    def to_chat(self) -> Json:
        """Return the call in a message of a chat."""
        return {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


class CallOutputItem(_RequestModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class OutputFunctionCall(_Model):
    """A call that the client is to make."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    """what the result names"""
    name: str
    arguments: str
    """JSON"""
