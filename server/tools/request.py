"""What a chat asks of its tools: which functions the model may call, must call, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.api.schemas import ChatRequest
from gptserve.server.api.tool_schemas import Function, NamedTool
from gptserve.server.errors import show

MAX_TOOLS = 128  # OpenAI's limit
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class AskedTools:
    """Functions that an answer may call. With `must_call` it is made of calls; with `is_single` it has one at most."""

    functions: tuple[Function, ...]
    must_call: bool
    is_single: bool

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar sees to the calls."""
        return self.must_call or self.is_single or any(function.strict for function in self.functions)

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
    for i, function in enumerate(functions):
        where = f"tools[{i}].function"
        if function.name in names[:i]:
            raise _error("tools", f"{where}.name must differ from the others, got {show(function.name)} twice")
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            raise _error("tools", f'{where}.parameters.type must be "object", got {show(kind)}')
    if not functions and choice not in (None, "none", "auto"):
        raise _error("tool_choice", "tool_choice must be none or auto without tools")
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise _error("tool_choice", f"tool_choice.function.name must be that of a tool, got {show(name)}")
        functions = [functions[names.index(name)]]
    is_single = isinstance(choice, NamedTool) or body.parallel_tool_calls is False
    return AskedTools(tuple(functions), choice not in (None, "auto"), is_single)


def _error(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
