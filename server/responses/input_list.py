"""The items that a response was made of, with ids, as `GET /v1/responses/{id}/input_items` lists them page by page.

They depend on the kept request alone. Knows no HTTP; `api/responses.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptserve.server.completions.shapes import Json
from gptserve.server.responses.plan import input_items
from gptserve.server.schemas.response_tools import CallItem, CallOutputItem, CustomCallItem, InputPart
from gptserve.server.schemas.responses import InputItem, Item, StoredRequest

_PREFIXES = {
    **{"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"},
    **{"custom_tool_call": "ctc", "custom_tool_call_output": "ctco"},
}


def items_by_id(response_id: str, asked: StoredRequest) -> dict[str, Item]:
    """Return what a response was made of, by ids: the conversation that it continued, and its input."""
    items, suffix = [*asked.earlier, *input_items(asked)], response_id.partition("_")[2]
    return {f"{_PREFIXES[item.type or 'message']}_{suffix}_in_{i}": item for i, item in enumerate(items)}


def item_json(item_id: str, item: Item) -> Json:
    """Return an item as it is listed."""
    head: Json = {"id": item_id, "type": item.type or "message", "status": "completed"}
    if isinstance(item, CallItem | CustomCallItem):
        namespace = {} if item.namespace is None else {"namespace": item.namespace}
        own = {"arguments": item.arguments} if isinstance(item, CallItem) else {"input": item.input}
        return {**head, "call_id": item.call_id, **namespace, "name": item.name, **own}
    if isinstance(item, CallOutputItem):
        output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
        return {**head, "call_id": item.call_id, "output": output}
    if item.type == "reasoning":
        return {**head, "summary": [], "content": _parts(_in_parts(item), "reasoning_text")}
    kind = "output_text" if item.role == "assistant" else "input_text"
    return {**head, "role": item.role, "content": _parts(_in_parts(item), kind)}


def _in_parts(item: InputItem) -> Sequence[InputPart]:
    return [InputPart(type="input_text", text=item.content)] if isinstance(item.content, str) else item.content


def _parts(parts: Sequence[InputPart], kind: str) -> list[Json]:
    """Return parts in the shape that they have in an item of this kind."""
    own: Json = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": part.text, **own} for part in parts]
