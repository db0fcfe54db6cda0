"""Tool calls of an answer: what a piece of the answer adds to them, their ids, and their JSON.

`parts.py` makes them, `output.py` joins them and `completions/shapes.py` renders them.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass, replace

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates refuse ids of another length


@dataclass(frozen=True, slots=True)
class CallDelta:
    """An addition to the call of this index. The first one of a call has its id and name, and others have neither."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def call_id(completion_id: str, choice_index: int, index: int) -> str:
    """Return the id of a call, which depends on its place alone, so that every reader gets the same."""
    digest = hashlib.sha256(f"{completion_id} {choice_index} {index}".encode()).digest()
    return "".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in digest[:_ID_LENGTH])


def join_calls(deltas: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Return one delta for each call, in the order of their first ones."""
    first: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(delta, arguments="".join(arguments[index])) for index, delta in first.items())


def call_json(delta: CallDelta) -> dict[str, object]:
    """Return a call, or an addition to one, in OpenAI's shape but for its index."""
    if delta.name is None:
        return {"function": {"arguments": delta.arguments}}
    return {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": delta.arguments}}
