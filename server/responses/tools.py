"""The tools of a response: which functions of a chat the model sees in their place, and what its calls are called.

A tool of a namespace is the function NAMESPACE__NAME, a custom tool one with the parameter `input`. Knows no HTTP;
`plan.py` and `output.py` use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions.shapes import Json
from gptserve.server.core.errors import show
from gptserve.server.schemas.response_tools import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedTool,
    NamespaceTool,
    OfferedTool,
    ToolChoice,
    joined_name,
)

MAX_NAME_LENGTH = 128  # as that of a function


@dataclass(frozen=True, slots=True)
class ResponseTool:
    """A tool that the model may call. `place` is where the request has it; `note` is about its namespace."""

    tool: FunctionTool | CustomTool
    place: str
    namespace: str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The name that the model sees."""
        return joined_name(self.namespace, self.tool.name)

    def to_chat(self) -> Json:
        """Return the tool of a chat. Raises InvalidRequestError."""
        if len(self.name) > MAX_NAME_LENGTH:
            message = (
                f"{self.place}.name and the name of its namespace must have at most {MAX_NAME_LENGTH} characters "
                f"together, got {show(self.name)}"
            )
            raise InvalidRequestError(message, param="tools")
        function = self.tool.to_function().model_dump()
        about = "\n\n".join(text for text in (function["description"], self.note) if text) or None
        return {"type": "function", "function": {**function, "name": self.name, "description": about}}


class ResponseTools:
    """The tools of one request."""

    def __init__(self, offered: Sequence[OfferedTool] | None) -> None:
        self._tools = list(_flatten(offered or ()))
        self._by_name = {tool.name: tool for tool in self._tools}
        self._is_given = offered is not None

    def to_chat(self, choice: ToolChoice | None) -> Json:
        """Return the fields of a chat with these tools. Raises InvalidRequestError."""
        tools = [tool.to_chat() for tool in self._tools] if self._is_given else None
        return {"tools": tools, "tool_choice": self._choice_of_chat(choice)}

    def called(self, name: str) -> tuple[Literal["function_call", "custom_tool_call"], Json]:
        """Return the type of the item of a call, and the names that it has."""
        tool = self._by_name.get(name)
        if tool is None:
            return "function_call", {"name": name}
        names: Json = {"name": tool.tool.name}
        if tool.namespace is not None:
            names["namespace"] = tool.namespace
        return ("custom_tool_call" if tool.tool.type == "custom" else "function_call"), names

    def place(self, index: int) -> str:
        """Return where the request has the tool of this index."""
        return self._tools[index].place

    def _choice_of_chat(self, choice: ToolChoice | None) -> Json | str | None:
        if isinstance(choice, NamedTool):
            return self._find(choice, "tool_choice")
        if isinstance(choice, AllowedTools):
            tools = [self._find(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(choice.tools)]
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
        return choice

    def _find(self, named: NamedTool, where: str) -> Json:
        tool = self._by_name.get(named.name)
        if self._tools and (tool is None or tool.tool.type != named.type):
            what = "a tool" if tool is None else f"a {named.type} tool"
            message = f"{where}.name must be that of {what}, got {show(named.name)}"
            raise InvalidRequestError(message, param="tool_choice")
        return {"type": "function", "function": {"name": named.name}}


def _flatten(offered: Sequence[OfferedTool]) -> Iterator[ResponseTool]:
    for i, tool in enumerate(offered):
        if isinstance(tool, FunctionTool | CustomTool):
            yield ResponseTool(tool, f"tools[{i}]")
        elif isinstance(tool, NamespaceTool):
            note = f"About all tools {tool.name}__…: {tool.description}" if tool.description else ""
            for j, inner in enumerate(tool.tools):
                yield ResponseTool(inner, f"tools[{i}].tools[{j}]", tool.name, "" if j else note)
