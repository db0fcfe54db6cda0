"""Tools in the JSON shapes of chats: what a request offers, and the calls that its messages and answers have.

`chat.py` and `completions.py` have these fields. `server/tools/` gives them their meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gptserve.server.schemas.base import _Model, _RequestModel
from gptserve.weights.chat.arguments import read_arguments

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
TOOL_CHOICE_RULE = 'Input should be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'


def _kind_of_choice(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is not None or isinstance(value, dict):
        return "allowed_tools" if kind == "allowed_tools" else "function"
    return "word" if value in ("none", "auto", "required") else None


class Function(_RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """a JSON Schema of an object; without one the function has no parameters"""
    strict: bool | None = None
    """the arguments match the schema; default false"""


class Tool(_RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(_RequestModel):
    """The name of a function."""

    name: str


class NamedTool(_RequestModel):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(_RequestModel):
    """The tools that the model may call, or must call one of. It sees the others, too."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


class AllowedChoice(_RequestModel):
    """Which tools the model may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice, custom_error_type="tool_choice", custom_error_message=TOOL_CHOICE_RULE),
]


class ToolFields(_RequestModel):
    """The fields of a chat that say which tools the model calls, and how many."""

    tool_choice: ToolChoice | None = None
    """default auto with tools"""
    parallel_tool_calls: bool | None = None
    """more than one call in an answer; default true"""


def _or_null(schema: dict[str, Any]) -> None:
    """Say in a schema that null is taken, too: `take_fields` leaves it out."""
    schema["type"] = [schema["type"], "null"]


class FunctionCall(_RequestModel):
    """A call in an earlier answer."""

    name: str
    arguments: Annotated[str, Field(json_schema_extra=_or_null)] = ""
    """as the model wrote them, JSON or not"""


class ToolCall(_RequestModel):
    """A call in a message of the conversation."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def to_template(self) -> dict[str, object]:
        """Return the call; its arguments are an object, which templates expect, or else a text."""
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments)}
        return {**({} if self.id is None else {"id": self.id}), "type": "function", "function": function}


class AnswerFunction(_Model):
    """The function that the model calls; in a chunk, a piece of its arguments."""

    name: str | None = None
    arguments: str
    """JSON"""


class AnswerToolCall(_Model):
    """A call of a function."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class ToolCallDelta(_Model):
    """A chunk's addition to a call. The first one of a call has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: AnswerFunction
