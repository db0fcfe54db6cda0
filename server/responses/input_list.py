"""The items that a response was made of, with ids, as `GET /v1/responses/{id}/input_items` lists them page by page.

They depend on the kept request alone. Knows no HTTP; `api/responses.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptserve.server.completions.shapes import Json
from gptserve.server.core.errors import ServiceError, show
from gptserve.server.responses.plan import input_items
from gptserve.server.schemas.response_tools import CallItem, CallOutputItem, CustomCallItem, InputPart
from gptserve.server.schemas.responses import InputItem, Item, StoredRequest

_PREFIXES = {
    **{"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"},
    **{"custom_tool_call": "ctc", "custom_tool_call_output": "ctco"},
}


@dataclass(frozen=True, slots=True)
class PageAsked:
    """Which items of a list a client wants: up to `limit` of them, after the item with the id `after`."""

    limit: int
    is_descending: bool
    after: str | None


def list_items(response_id: str, asked: StoredRequest, page: PageAsked) -> Json:
    """Return a page of the conversation that a response continued, and of its input. Raises ServiceError."""
    items = [*asked.earlier, *input_items(asked)]
    ids = item_ids(response_id, items)
    places = list(range(len(items)))[:: -1 if page.is_descending else 1]
    if page.after is not None:
        if page.after not in ids:
            message = f"after must be the id of an item of this response's input, got {show(page.after)}"
            raise ServiceError("invalid_value", message, param="after")
        places = places[places.index(ids.index(page.after)) + 1 :]
    shown = places[: page.limit]
    return {
        "object": "list",
        "data": [_to_json(ids[place], items[place]) for place in shown],
        "first_id": ids[shown[0]] if shown else None,
        "last_id": ids[shown[-1]] if shown else None,
        "has_more": len(shown) < len(places),
    }


def item_ids(response_id: str, items: Sequence[Item]) -> list[str]:
    """Return the ids of what a response was made of."""
    suffix = response_id.partition("_")[2]
    return [f"{_PREFIXES[item.type or 'message']}_{suffix}_in_{i}" for i, item in enumerate(items)]


def _to_json(item_id: str, item: Item) -> Json:
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
