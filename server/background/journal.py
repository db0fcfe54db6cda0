"""Background completions in SQLite, in a folder or in memory: the request, every output in order, how it ended.

Rows are added and never changed; those of a completion are deleted together. Each row has a checksum, as SQLite has
none. One thread has the connection; the writes that arrive during a transaction form the next one. Knows no HTTP, no
text and no engine; `store.py` and `recorder.py` call it. docs/background.md describes the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.server.completions.encoding import PIECE_ENTRIES
from gptserve.server.errors import ServiceError

FILE_NAME = "gptserve.sqlite3"
SCHEMA_VERSION = 1
APPLICATION_ID = 0x67707473  # "gpts": tells a journal from any other SQLite file

_SCHEMA = f"""
BEGIN;
CREATE TABLE completions (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, created INTEGER NOT NULL, model TEXT NOT NULL, fingerprint TEXT NOT NULL,
    batch_invariant INTEGER NOT NULL, seed INTEGER NOT NULL, body TEXT NOT NULL, prompts TEXT NOT NULL,
    max_tokens INTEGER NOT NULL, deadline REAL, key TEXT, digest TEXT NOT NULL, checksum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE batches (
    completion_id TEXT NOT NULL REFERENCES completions ON DELETE CASCADE, n INTEGER NOT NULL, outputs TEXT NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (completion_id, n)
) WITHOUT ROWID;
CREATE TABLE ends (
    completion_id TEXT PRIMARY KEY REFERENCES completions ON DELETE CASCADE, status TEXT NOT NULL, error TEXT,
    finished_at REAL NOT NULL, num_batches INTEGER NOT NULL, checksum INTEGER NOT NULL
) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

EndStatus = Literal["completed", "failed", "cancelled"]
OutputBatch = tuple[TokenOutput, ...]
Statement = tuple[str, Sequence[object]]
Result = TypeVar("Result")


class JournalError(ServiceError):
    """The journal cannot be opened, read or written; the message is the cause in one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__("journal_failed", message)


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """Everything that is known of a completion when it begins, enough to compute it again.

    kind is the `object` of its answer; body is the client's JSON object; prompts are token ids; deadline is seconds
    since the epoch; digest is of the request, to compare with others of the same idempotency key.
    """

    completion_id: str
    kind: str
    created: int
    model: str
    fingerprint: str
    batch_invariant: bool
    seed: int
    body: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    deadline: float | None
    key: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class EndRecord:
    """How a completion ended; error is a JSON object. finished_at is seconds since the epoch."""

    status: EndStatus
    error: str | None
    finished_at: float
    num_batches: int


class IndexRow(NamedTuple):
    """The part of a completion that the store holds in memory. Without an end it has not ended."""

    completion_id: str
    fingerprint: str
    key: str | None
    digest: str
    end: EndRecord | None


class Journal:
    """One SQLite database; without a folder it is in memory and ends with the process.

    `open` or the first other call opens it. All methods raise JournalError; a call that fails has written nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.is_durable = folder is not None
        self._folder = folder
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending: list[Statement] = []
        self._writer: asyncio.Task[None] | None = None  # the one that takes what is pending, or the last that did
        self._writing = asyncio.Lock()
        self._decoding = asyncio.Lock()

    async def open(self) -> None:
        """Open the database and check all of it; create it if there is none."""
        await self._run(lambda connection: None)

    async def close(self) -> None:
        """Close the database after the pending writes. May be called twice; call nothing else after it."""
        if self._writer is not None:
            await asyncio.wait([self._writer])
        with contextlib.suppress(RuntimeError):  # it is closed already
            await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    async def load(self) -> list[IndexRow]:
        """Return all completions: first those that ended, by time of end; then the others, oldest first."""
        return await self._run(_read_index)

    async def read_record(self, completion_id: str) -> CompletionRecord:
        """Return the record of a completion."""
        return await self._run(lambda connection: _read_record(connection, completion_id))

    async def batches(self, completion_id: str, first: int, limit: int) -> list[OutputBatch]:
        """Return the outputs of at most `limit` calls of `append`, from the `first`-th call on."""
        select = "SELECT * FROM batches WHERE completion_id = ? AND n >= ? ORDER BY n LIMIT ?"
        rows = await self._run(lambda connection: connection.execute(select, (completion_id, first, limit)).fetchall())
        # Decoding scores takes long: not in the journal's thread, where writes wait, and one at a time, as each
        # competes with the event loop.
        async with self._decoding:
            return await asyncio.to_thread(self._explaining, lambda: _to_batches(completion_id, first, rows))

    async def add(self, record: CompletionRecord) -> None:
        """Begin a completion."""
        # In a thread, as megabytes may have to be written as JSON.
        await self._write(await asyncio.to_thread(_insert_completion, record))

    async def append(self, completion_id: str, n: int, outputs: OutputBatch) -> None:
        """Add the n-th batch of outputs to a completion."""
        num_scores = sum(len(output.logprobs) + len(output.prompt_logprobs or ()) for output in outputs)

        def insert() -> Statement:
            return _insert("batches", completion_id, n, encode_outputs(outputs))

        await self._write(await asyncio.to_thread(insert) if num_scores > PIECE_ENTRIES else insert())

    async def end(self, completion_id: str, end: EndRecord) -> None:
        """End a completion."""
        await self._write(_insert("ends", completion_id, *astuple(end)))

    async def forget(self, completion_ids: Iterable[str]) -> None:
        """Delete completions with all their rows."""
        await self._write(*(("DELETE FROM completions WHERE id = ?", (i,)) for i in completion_ids))

    async def _write(self, *statements: Statement) -> None:
        if self._writer is None or not self._pending:
            self._writer = asyncio.create_task(self._write_pending())
        self._pending += statements
        try:
            await asyncio.shield(self._writer)  # it has the writes of others, too
        except Exception as error:  # of any kind, and each caller raises its own
            raise JournalError(str(error) or repr(error)) from error

    async def _write_pending(self) -> None:
        async with self._writing:
            statements, self._pending = self._pending, []
            await self._run(lambda connection: _commit(connection, statements))

    async def _run(self, call: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `call` with the connection, in the journal's thread."""

        def run() -> Result:
            if self._connection is None:
                self._connection = _connect(self._folder)
            return call(self._connection)

        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, self._explaining, run)
        except RuntimeError as error:
            raise JournalError(f"the journal is closed: {error}") from error
        return await running

    def _explaining(self, call: Callable[[], Result]) -> Result:
        """Run `call`; turn every error of the database into JournalError."""
        try:
            return call()
        except (sqlite3.Error, OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            place = "in memory" if self._folder is None else str(self._folder / FILE_NAME)
            raise JournalError(f"the journal {place} cannot be used: {cause}") from error

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def encode_outputs(outputs: Iterable[TokenOutput]) -> str:
    """Return a JSON array with an object for each output, of the fields that differ from their defaults.

    TokenLogprobs become arrays of their fields.
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
    return {f.name: getattr(output, f.name) for f in fields(output) if getattr(output, f.name) != f.default}


def _decode_output(values: dict[str, Any]) -> TokenOutput:
    values["token_ids"] = tuple(values["token_ids"])
    for name in values.keys() & {"logprobs", "prompt_logprobs"}:
        values[name] = tuple(entry and _decode_logprobs(*entry) for entry in values[name])
    if "finish_reason" in values:
        values["finish_reason"] = FinishReason(values["finish_reason"])
    return TokenOutput(**values)


def _decode_logprobs(token_id: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, rank, tuple((i, value) for i, value in top))


def _connect(folder: Path | None) -> sqlite3.Connection:
    """Open or create the database. `Journal._run` handles the exceptions."""
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite would create a file that everybody can read. Its other files get the permissions of this one.
        os.close(os.open(folder / FILE_NAME, os.O_CREAT | os.O_RDWR, 0o600))
    path = ":memory:" if folder is None else str(folder / FILE_NAME)
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Lock the database, check it and create its tables if it is new."""
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise ValueError("another server is using it") from error
        raise
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    [(verdict, *_), *_] = connection.execute("PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise ValueError(f"it is damaged: {verdict}")
    [(application_id,)] = connection.execute("PRAGMA application_id")
    [(version,)] = connection.execute("PRAGMA user_version")
    [(num_tables,)] = connection.execute("SELECT count(*) FROM sqlite_master")
    if (application_id, version, num_tables) == (0, 0, 0):
        connection.executescript(_SCHEMA)
    elif application_id != APPLICATION_ID:
        raise ValueError("it is a database of something else")
    elif version != SCHEMA_VERSION:
        raise ValueError(f"its format is version {version}, and this server reads version {SCHEMA_VERSION}")


def _commit(connection: sqlite3.Connection, statements: Iterable[Statement]) -> None:
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        for statement, parameters in statements:
            connection.execute(statement, parameters)


def _insert_completion(record: CompletionRecord) -> Statement:
    values = {name: getattr(record, name) for name in record.__slots__}
    values |= {"prompts": json.dumps(record.prompts), "batch_invariant": int(record.batch_invariant)}
    return _insert("completions", *values.values())


def _insert(table: str, *values: object) -> Statement:
    row = (*values, _checksum(values))
    return f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row


def _checksum(values: Sequence[object]) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _verify(row: Sequence[Any]) -> Sequence[Any]:
    """Return a row without its checksum. Raises ValueError if the checksum is wrong."""
    *values, checksum = row
    if bytes in map(type, row) or _checksum(values) != checksum:  # one flipped bit turns SQLite's text into bytes
        raise ValueError(f"it is damaged: the row of {row[0]!r} has another checksum")
    return values


def _read_index(connection: sqlite3.Connection) -> list[IndexRow]:
    end_rows = connection.execute("SELECT * FROM ends ORDER BY finished_at")
    ends = {completion_id: EndRecord(*end) for completion_id, *end in map(_verify, end_rows)}
    rows = {}
    for row in connection.execute("SELECT * FROM completions ORDER BY created"):
        record = _to_record(row)
        i = record.completion_id
        rows[i] = IndexRow(i, record.fingerprint, record.key, record.digest, ends.get(i))
    return [*(rows.pop(i) for i in ends), *rows.values()]


def _read_record(connection: sqlite3.Connection, completion_id: str) -> CompletionRecord:
    row = connection.execute("SELECT * FROM completions WHERE id = ?", (completion_id,)).fetchone()
    if row is None:
        raise ValueError(f"it has no completion {completion_id!r}")
    return _to_record(row)


def _to_record(row: Sequence[Any]) -> CompletionRecord:
    values = dict(zip(CompletionRecord.__slots__, _verify(row), strict=True))
    prompts = tuple(map(tuple, json.loads(values["prompts"])))
    return CompletionRecord(**values | {"prompts": prompts, "batch_invariant": bool(values["batch_invariant"])})


def _to_batches(completion_id: str, first: int, rows: Iterable[Sequence[Any]]) -> list[OutputBatch]:
    batches = []
    for expected, row in enumerate(rows, first):
        _, n, outputs = _verify(row)
        if n != expected:
            raise ValueError(f"it is damaged: {completion_id!r} lacks batch {expected}")
        batches.append(decode_outputs(outputs))
    return batches
