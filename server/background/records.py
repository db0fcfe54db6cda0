"""The rows of the journal: their fields, their JSON and their checksums. docs/dev/journal.md describes them.

`journal.py` reads and writes them, `database.py` checks and creates the tables. Knows no SQLite but its statements.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput

EndStatus = Literal["completed", "failed", "cancelled"]
OutputBatch = tuple[TokenOutput, ...]
Statement = tuple[str, Sequence[object]]


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """Everything that is known of a completion when it begins, enough to compute it again.

    kind is the `object` of its answer; owner is the name of the API key; tokenizer is the fingerprint of the one that
    its token ids belong to; body is the client's JSON object without the prompt; prompts are token ids; deadline is
    seconds since the epoch; digest is of the request, to compare with others of the same idempotency key.
    """

    completion_id: str
    kind: str
    created: int
    model: str
    fingerprint: str
    batch_invariant: bool
    seed: int
    owner: str | None
    tokenizer: str
    body: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    deadline: float | None
    key: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class EndRecord:
    """How a completion ended; error is a JSON object. finished_at is seconds since the epoch.

    position is the id of its last event, and None if no outputs were read; num_tokens is the number of its tokens.
    """

    status: EndStatus
    error: str | None
    finished_at: float
    num_batches: int
    num_tokens: int
    position: str | None


class IndexRow(NamedTuple):
    """The part of a completion that the store holds in memory. Without an end it has not ended.

    record is without body and prompts; num_bytes is what all its rows take. attempts has for each start that took it up
    the number of batches of outputs that it had then.
    """

    record: CompletionRecord
    num_prompt_tokens: int
    num_bytes: int
    num_batches: int = 0
    attempts: tuple[int, ...] = ()
    end: EndRecord | None = None

    @property
    def num_vain_attempts(self) -> int:
        """How many starts took it up since its last output."""
        return self.attempts.count(self.num_batches)


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


def encode_outputs(outputs: Iterable[TokenOutput]) -> str:
    """Return a JSON array with an object for each output, of the fields that differ from their defaults.

    Fields that are not compared are left out: they are of a run, not of the answer. TokenLogprobs become arrays of
    their fields.
    """
    encode = json.JSONEncoder(separators=(",", ":"), default=attrgetter(*TokenLogprobs.__slots__)).encode
    # One call for each output: a single call for all could hold the interpreter for long.
    return f"[{','.join(encode(_changed_fields(output)) for output in outputs)}]"


def decode_outputs(text: str) -> OutputBatch:
    """Invert `encode_outputs`. Raises ValueError."""
    try:
        return tuple(_decode_output(value) for value in json.loads(text))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not the outputs of a completion: {error}") from error


def _changed_fields(output: TokenOutput) -> dict[str, object]:
    answer = [f for f in fields(output) if f.compare]
    return {f.name: getattr(output, f.name) for f in answer if getattr(output, f.name) != f.default}


def _decode_output(values: dict[str, Any]) -> TokenOutput:
    values["token_ids"] = tuple(values["token_ids"])
    for name in values.keys() & {"logprobs", "prompt_logprobs"}:
        values[name] = tuple(entry and _decode_logprobs(*entry) for entry in values[name])
    if "finish_reason" in values:
        values["finish_reason"] = FinishReason(values["finish_reason"])
    return TokenOutput(**values)


def _decode_logprobs(token_id: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, rank, tuple((i, value) for i, value in top))


def _insert(table: str, *values: object) -> Statement:
    row = (*values, _checksum(values))
    return f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row


def _checksum(values: Sequence[object]) -> int:
    return zlib.crc32(json.dumps(values).encode())
