"""Tools in the JSON shapes of the Responses API, where a function is flat: what a request offers, calls, their results.

`responses.py` has these fields. `to_chat` gives the shapes of chats, which `tools.py` has.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gptserve.server.schemas.base import Text, _Model, _RequestModel, _text_or_list
from gptserve.server.schemas.tools import FUNCTION_NAME, Function, FunctionCall, _kind_of_choice

CONTENT_RULE = "Input should be a string or a list of parts"
TOOL_CHOICE_RULE = 'Input should be "none", "auto", "required" or {"type": "function", "name": …}'
Json = dict[str, Any]
ToolName = Annotated[str, Field(pattern=FUNCTION_NAME)]


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

    def to_function(self) -> Function:
        """Return the function of a chat."""
        return Function(**self.model_dump(exclude={"type"}))


class CustomFormat(_RequestModel):
    """What the input of a custom tool is like. A regex is enforced; the model sees a Lark grammar and may break it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CustomFormat:
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise PydanticCustomError("custom_format", "A grammar should have syntax and definition")
        return self


class CustomTool(_RequestModel):
    """A tool that takes a text. The model sees a function whose only parameter is `input`."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None
    """default any text"""

    def to_function(self) -> Function:
        """Return the function of a chat; a grammar sees to it that its calls have the input."""
        text, about, rule = {"type": "string"}, self.description, self.format
        if rule is not None and rule.type == "grammar":
            what = "regex" if rule.syntax == "regex" else "Lark grammar"
            told = f"The input must match this {what}:\n{rule.definition}"
            about = told if about is None else f"{about}\n\n{told}"
            if rule.syntax == "regex":
                text["pattern"] = f"^(?:{rule.definition})$"
        parameters = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
        return Function(name=self.name, description=about, parameters=parameters, strict=True)


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("custom", "namespace"):
        return f"[{kind}]"
    return "[hosted]" if isinstance(kind, str) and kind != "function" else "[function]"


_OneTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")], Discriminator(_kind_of_tool)
]


class NamespaceTool(_RequestModel):
    """Tools under a common name: the model sees NAMESPACE__NAME, and their calls have both names."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[_OneTool], Field(fail_fast=True)]


class HostedTool(_RequestModel):
    """A tool that OpenAI runs itself. The model does not see it."""

    type: str


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[HostedTool, Tag("[hosted]")],
    Discriminator(_kind_of_tool),
]
OFFERED_TYPES = ("function", "custom", "namespace")


class NamedTool(_RequestModel):
    """The tool that the model must call; one of a namespace is called NAMESPACE__NAME."""

    type: Literal["function", "custom"]
    name: str


class AllowedTools(_RequestModel):
    """The tools that the model may call, or must call one of. It sees the others, too."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_kind_of_choice, custom_error_type="tool_choice", custom_error_message=TOOL_CHOICE_RULE),
]


class CallItem(FunctionCall):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    namespace: str | None = None

    def to_chat(self) -> Json:
        """Return the call in a message of a chat."""
        function = {"name": joined_name(self.namespace, self.name), "arguments": self.arguments}
        return {"id": self.call_id, "function": function}


class CustomCallItem(_RequestModel):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    namespace: str | None = None
    name: str
    input: str

    def to_chat(self) -> Json:
        """Return the call in a message of a chat."""
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return {
            "id": self.call_id,
            "function": {"name": joined_name(self.namespace, self.name), "arguments": arguments},
        }


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


class CallOutputItem(_RequestModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class _OutputCall(_Model):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    """what the result names"""
    name: str
    namespace: str | None = None
    """of a tool that has one"""


class OutputFunctionCall(_OutputCall):
    """A call that the client is to make."""

    type: Literal["function_call"]
    arguments: str
    """JSON"""


class OutputCustomCall(_OutputCall):
    """A call of a custom tool that the client is to make."""

    type: Literal["custom_tool_call"]
    input: str
