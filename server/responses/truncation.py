"""Which items of a conversation are dropped, the oldest first, where it is too long for the context.

The conversation goes in turns: a message of the user and all that followed it. In the last turn it goes in calls with
their results. Messages of the system and the developer stay, as do the last message of the user and what came last.
Knows neither tokens nor templates; `plan.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gptserve.server.schemas.response_tools import CallItem, CallOutputItem, CustomCallItem
from gptserve.server.schemas.responses import InputItem, Item


def truncations(items: Sequence[Item]) -> tuple[int, Callable[[int], list[Item]]]:
    """Return how many shorter conversations there are, and a function that makes one of them.

    It takes a step: 0 makes the conversation as it is, 1 makes it without its oldest piece, and so on.
    """
    pieces = _pieces(items)
    stays = len(pieces)
    dropped_at = [stays] * len(items)
    of_call: dict[str, int] = {}
    for number, piece in enumerate(pieces[:-1]):
        for i in piece:
            dropped_at[i] = number
            if isinstance(item := items[i], CallItem | CustomCallItem):
                of_call.setdefault(item.call_id, number)
    for i, item in enumerate(items):
        if isinstance(item, CallOutputItem):
            dropped_at[i] = min(dropped_at[i], of_call.get(item.call_id, stays))
    # Results may all have gone with calls before them, and then their piece is none.
    numbers = sorted(set(dropped_at) - {stays})

    def shortened(step: int) -> list[Item]:
        first = numbers[step - 1] + 1 if step else 0
        return [item for item, number in zip(items, dropped_at, strict=True) if number >= first]

    return len(numbers), shortened


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
