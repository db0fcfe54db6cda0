"""The rows of the tables: the statements that write them, and their checksums. docs/dev/journal.md describes them.

`store.py` executes and reads them, `database.py` creates the tables. Knows no connection.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any

from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, decode_outputs, encode_outputs

Statement = tuple[str, Sequence[object]]


def insert_completion(record: CompletionRecord) -> Statement:
    """Return the statement that adds a completion."""
    values = {name: getattr(record, name) for name in record.__slots__}
    values |= {"prompts": json.dumps(record.prompts), "batch_invariant": int(record.batch_invariant)}
    return _insert("completions", *values.values())


def update_owner(record: CompletionRecord, owner: str) -> Statement:
    """Return the statement that gives a completion to another owner."""
    _, row = insert_completion(replace(record, owner=owner))
    return "UPDATE completions SET owner = ?, checksum = ? WHERE id = ?", (owner, row[-1], record.completion_id)


def insert_outputs(completion_id: str, n: int, outputs: OutputBatch) -> Statement:
    """Return the statement that adds the n-th batch of outputs to a completion."""
    return _insert("batches", completion_id, n, encode_outputs(outputs))


def insert_attempt(completion_id: str, n: int, num_batches: int) -> Statement:
    """Return the statement that notes the n-th time that a start takes a completion up, after num_batches outputs."""
    return _insert("attempts", completion_id, n, num_batches)


def insert_end(completion_id: str, end: EndRecord) -> Statement:
    """Return the statement that ends a completion."""
    return _insert("ends", completion_id, *astuple(end))


def num_bytes_of(statement: Statement) -> int:
    """Return how much of the database the row of a statement takes, but for a few bytes."""
    return sum(len(value) for value in statement[1] if isinstance(value, str))


def to_record(row: Sequence[Any]) -> CompletionRecord:
    """Return the record in a row of completions. Raises ValueError."""
    values = dict(zip(CompletionRecord.__slots__, verify(row), strict=True))
    prompts = tuple(map(tuple, json.loads(values["prompts"])))
    return CompletionRecord(**values | {"prompts": prompts, "batch_invariant": bool(values["batch_invariant"])})


def to_batches(completion_id: str, first: int, rows: Iterable[Sequence[Any]]) -> list[OutputBatch]:
    """Return the outputs in rows of batches, of which the first is the `first`-th. Raises ValueError."""
    batches = []
    for expected, row in enumerate(rows, first):
        _, n, outputs = verify(row)
        if n != expected:
            raise ValueError(f"it is damaged: {completion_id!r} lacks batch {expected}")
        batches.append(decode_outputs(outputs))
    return batches


def verify(row: Sequence[Any]) -> Sequence[Any]:
    """Return a row without its checksum. Raises ValueError if the checksum is wrong."""
    *values, checksum = row
    if bytes in map(type, row) or _checksum(values) != checksum:  # one flipped bit turns SQLite's text into bytes
        raise ValueError(f"it is damaged: the row of {row[0]!r} has another checksum")
    return values


def _insert(table: str, *values: object) -> Statement:
    row = (*values, _checksum(values))
    return f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row


def _checksum(values: Sequence[object]) -> int:
    return zlib.crc32(json.dumps(values).encode())
