"""Which items of a conversation are dropped, the oldest first, where it is too long for the context.

The conversation goes in turns: a message of the user and all that followed it. In the last turn it goes in calls with
their results. Messages of the system and the developer stay, as do the last message of the user and what came last.
Knows neither tokens nor templates; `plan.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptserve.server.api.response_schemas import InputItem, Item
from gptserve.server.api.response_tool_schemas import CallItem, CallOutputItem, CustomCallItem


def truncations(items: Sequence[Item]) -> list[list[Item]]:
    """Return the conversation as it is, without its oldest piece, without the two oldest, and so on."""
    made = [list(items)]
    dropped: set[int] = set()
    for piece in _pieces(items)[:-1]:
        dropped.update(piece)
        calls = {item.call_id for i in dropped if isinstance(item := items[i], CallItem | CustomCallItem)}
        kept = [
            item
            for i, item in enumerate(items)
            if i not in dropped and not (isinstance(item, CallOutputItem) and item.call_id in calls)
        ]
        if len(kept) < len(made[-1]):
            made.append(kept)
    return made


def _pieces(items: Sequence[Item]) -> list[list[int]]:
    """Return the places of what is dropped together, and at last of what came last."""
    last_of_user = max((i for i, item in enumerate(items) if _is_of(item, "user")), default=-1)
    turns: list[list[int]] = []
    steps: list[list[int]] = [[]]
    open_calls: set[str] = set()
    for i, item in enumerate(items):
        if _is_of(item, "system", "developer") or i == last_of_user:
            continue
        if i < last_of_user:
            if _is_of(item, "user") or not turns:
                turns.append([])
            turns[-1].append(i)
            continue
        is_result = isinstance(item, CallOutputItem)
        if steps[-1] and isinstance(items[steps[-1][-1]], CallOutputItem) and not (is_result or open_calls):
            steps.append([])
        steps[-1].append(i)
        if isinstance(item, CallItem | CustomCallItem):
            open_calls.add(item.call_id)
        elif isinstance(item, CallOutputItem):
            open_calls.discard(item.call_id)
    return turns + steps


def _is_of(item: Item, *roles: str) -> bool:
    return isinstance(item, InputItem) and item.role in roles
