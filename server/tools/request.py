"""What a chat asks of its tools: which functions the model may call, must call, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.core.errors import show
from gptserve.server.schemas.completions import ChatRequest
from gptserve.server.schemas.tools import AllowedChoice, Function, NamedTool

MAX_TOOLS = 1024  # OpenAI takes 128, but programs offer the tools of all their MCP servers to any model
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class AskedTools:
    """Functions that an answer may call. With `must_call` it is made of calls; with `is_single` it has one at most.

    If they `are_some`, the model sees others, too.
    """

    functions: tuple[Function, ...]
    must_call: bool
    is_single: bool
    are_some: bool = False

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar sees to the calls."""
        is_limited = self.must_call or self.is_single or self.are_some
        return is_limited or any(function.strict for function in self.functions)

    def schema_of(self, function: Function) -> dict[str, Any]:
        """Return the JSON Schema that the arguments of a call match."""
        if not (self.must_call or function.strict):
            return {"type": "object"}
        return _NO_PARAMETERS if function.parameters is None else {"type": "object", **function.parameters}


def asked_tools(body: ChatRequest) -> AskedTools | None:
    """Return what a body asks of its tools; None if no tool may be called. Raises InvalidRequestError."""
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or ()]
    names = [function.name for function in functions]
    if len(functions) > MAX_TOOLS:
        raise _error("tools", f"tools may have at most {MAX_TOOLS} entries, got {len(functions)}")
    seen = set[str]()
    for i, function in enumerate(functions):
        where = f"tools[{i}].function"
        if function.name in seen:
            raise _error("tools", f"{where}.name must differ from the others, got {show(function.name)} twice")
        seen.add(function.name)
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            raise _error("tools", f'{where}.parameters.type must be "object", got {show(kind)}')
    if not functions and choice not in (None, "none", "auto"):
        raise _error("tool_choice", "tool_choice must be none or auto without tools")
    if not functions or choice == "none":
        return None
    must_call = choice not in (None, "auto")
    if isinstance(choice, NamedTool):
        functions = _named(functions, [choice], ("tool_choice",))
    if isinstance(choice, AllowedChoice):
        must_call, named = choice.allowed_tools.mode == "required", choice.allowed_tools.tools
        places = [f"tool_choice.allowed_tools.tools[{i}]" for i in range(len(named))]
        functions = _named(functions, named, places)
        if not functions and must_call:
            raise _error("tool_choice", "tool_choice.allowed_tools.tools must name a tool with the mode required")
        if not functions:
            return None
    is_single = isinstance(choice, NamedTool) or body.parallel_tool_calls is False
    return AskedTools(tuple(functions), must_call, is_single, are_some=len(functions) < len(names))


def _named(functions: Sequence[Function], named: Sequence[NamedTool], places: Sequence[str]) -> list[Function]:
    """Return the functions that have one of these names, in their order. Raises InvalidRequestError."""
    names = [tool.function.name for tool in named]
    known = {function.name for function in functions}
    for place, name in zip(places, names, strict=True):
        if name not in known:
            raise _error("tool_choice", f"{place}.function.name must be that of a tool, got {show(name)}")
    return [function for function in functions if function.name in names]


def _error(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
