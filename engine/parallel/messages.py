"""What the first rank and the others tell each other, over one connection each: a pipe, or TCP between nodes.

On the wire a message is its name and its fields as JSON, then the bytes of its arrays. It is no pickle, so that reading
one runs no code of whoever wrote it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gptserve.engine.staging import Array

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """From a rank: its weights are loaded, and it waits for the others."""

    warnings: tuple[str, ...]
    """What it has warned of until now."""
    digest: str = ""
    """Of the weights that its node has (Checkpoint.digest); empty on the first node, where all read the same files."""


@dataclass(frozen=True, slots=True)
class Memory:
    """From a rank that has met the others: so many bytes are free, and cache and steps may take so many of them."""

    free_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Cache:
    """To a rank: the sizes to allocate; and back, when it has them."""

    num_blocks: int
    max_model_len: int
    has_graphs: bool
    """Whether the ranks are to record decoding steps next (recorded_steps.py)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """From a rank: what keeps it from graphs, None if nothing does; and back: what keeps one of the ranks."""

    obstacle: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """To a rank: compute the layers for these arrays of batch.py."""

    arrays: tuple[Array, ...]
    graph_size: int | None
    """The size of the graph to replay; None: start the kernels one by one."""
    num_torch_threads: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank, its last message: why it ends."""

    cause: str


Message = Loaded | Memory | Cache | Finding | Step | Failed

_KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in (Loaded, Memory, Cache, Finding, Step, Failed)}


def encode(message: Message) -> bytes:
    """Return the message as it is sent."""
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(message)}
    arrays: tuple[Array, ...] = values.pop("arrays", ())
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    head = json.dumps([type(message).__name__, values, shapes]).encode()
    return b"".join((len(head).to_bytes(_LENGTH_BYTES, "little"), head, *(array.tobytes() for array in arrays)))


def decode(data: bytes) -> Message:
    """Return the message that was encoded; its arrays are writable."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    name, values, shapes = json.loads(data[_LENGTH_BYTES:start])
    arrays: list[Array] = []
    for dtype, shape in shapes:
        flat = np.frombuffer(data, dtype, math.prod(shape), start)
        arrays.append(flat.reshape(shape).copy())
        start += flat.nbytes
    if name == Step.__name__:
        values["arrays"] = tuple(arrays)
    elif name == Loaded.__name__:
        values["warnings"] = tuple(values["warnings"])
    return _KINDS[name](**values)


def send(connection: Connection, message: Message) -> None:
    """Send the message. Raises OSError if the other end is gone."""
    connection.send_bytes(encode(message))


def receive(connection: Connection) -> Any:
    """Return the next message. Raises EOFError or OSError if the other end is gone."""
    return decode(connection.recv_bytes())
