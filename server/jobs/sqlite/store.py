"""The job store in SQLite, in a folder or in memory: the request, every output in order, how it ended.

Rows are added and never changed; those of a completion are deleted together. Each row has a checksum, as SQLite has
none. One thread has the connection; the writes that arrive during a transaction form the next one. Knows no HTTP, no
text and no engine; `stores.py` makes one. docs/dev/journal.md describes the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gptserve.server.completions.encoding import PIECE_ENTRIES
from gptserve.server.core.settings import StateSync
from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, StoredJob
from gptserve.server.jobs.sqlite.database import FILE_NAME, connect, disconnect, give_back
from gptserve.server.jobs.sqlite.owners import rename_owners
from gptserve.server.jobs.sqlite.rows import (
    Statement,
    insert_attempt,
    insert_completion,
    insert_end,
    insert_outputs,
    num_bytes_of,
    to_batches,
    to_record,
    verify,
)
from gptserve.server.jobs.store import NO_FORMER_OWNERS, FormerOwners, JobStore, JobStoreError

Result = TypeVar("Result")


class SqliteJobStore(JobStore):
    """One SQLite database, locked by this process; without a folder it is in memory and ends with the process."""

    def __init__(self, folder: Path | None, sync: StateSync = "normal") -> None:
        self._folder = folder
        self._sync = sync
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending: list[Statement] = []
        self._writer: asyncio.Task[None] | None = None  # the one that takes what is pending, or the last that did
        self._writing = asyncio.Lock()
        self._decoding = asyncio.Lock()
        self.on_write: Callable[[float], object] = lambda seconds: None

    @property
    def sharing(self) -> None:
        """None: one server has it."""
        return None

    @property
    def is_durable(self) -> bool:
        """Whether it is in a folder."""
        return self._folder is not None

    def num_bytes(self) -> int:
        """Return the size of its files; 0 in memory."""
        return 0 if self._folder is None else sum(file.stat().st_size for file in self._folder.glob(f"{FILE_NAME}*"))

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

    async def load(self, former_owners: FormerOwners = NO_FORMER_OWNERS) -> list[StoredJob]:
        """Return all completions: first those that ended, by time of end; then the others, oldest first."""
        await self._run(lambda connection: rename_owners(connection, former_owners))
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
            return await asyncio.to_thread(self._explaining, lambda: to_batches(completion_id, first, rows))

    async def add(self, record: CompletionRecord) -> int:
        """Begin a completion; return the number of bytes that it takes."""
        # In a thread, as megabytes may have to be written as JSON.
        return await self._write(await asyncio.to_thread(insert_completion, record))

    async def append(self, completion_id: str, n: int, outputs: OutputBatch) -> int:
        """Add the n-th batch of outputs to a completion; return the number of bytes that it takes."""
        num_scores = sum(len(output.logprobs) + len(output.prompt_logprobs or ()) for output in outputs)
        if num_scores > PIECE_ENTRIES:
            return await self._write(await asyncio.to_thread(insert_outputs, completion_id, n, outputs))
        return await self._write(insert_outputs(completion_id, n, outputs))

    async def add_attempt(self, stored: StoredJob) -> None:
        """Note that a start takes a completion up once more."""
        await self._write(insert_attempt(stored.record.completion_id, len(stored.attempts), stored.num_batches))

    async def clear_attempts(self) -> None:
        """Forget how often completions were taken up."""
        await self._write(("DELETE FROM attempts", ()))

    async def end(self, completion_id: str, end: EndRecord) -> None:
        """End a completion."""
        await self._write(insert_end(completion_id, end))

    async def forget(self, completion_ids: Iterable[str]) -> None:
        """Delete completions with all their rows, and give their space back to the disk."""
        await self._write(*(("DELETE FROM completions WHERE id = ?", (i,)) for i in completion_ids))
        while await self._run(give_back):
            pass

    async def _write(self, *statements: Statement) -> int:
        """Execute statements in one transaction; return the number of bytes that they add."""
        if self._writer is None or not self._pending:
            self._writer = asyncio.create_task(self._write_pending())
        self._pending += statements
        try:
            await asyncio.shield(self._writer)  # it has the writes of others, too
        except Exception as error:  # of any kind, and each caller raises its own
            raise JobStoreError(str(error) or repr(error)) from error
        return sum(map(num_bytes_of, statements))

    async def _write_pending(self) -> None:
        async with self._writing:
            statements, self._pending = self._pending, []
            started_at = time.perf_counter()
            await self._run(lambda connection: _commit(connection, statements))
            self.on_write(time.perf_counter() - started_at)

    async def _run(self, call: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `call` with the connection, in the journal's thread."""

        def run() -> Result:
            if self._connection is None:
                self._connection = connect(self._folder, self._sync)
            return call(self._connection)

        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, self._explaining, run)
        except RuntimeError as error:
            raise JobStoreError(f"the journal is closed: {error}") from error
        return await running

    def _explaining(self, call: Callable[[], Result]) -> Result:
        """Run `call`; turn every error of the database into JobStoreError."""
        try:
            return call()
        except (sqlite3.Error, OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            place = "in memory" if self._folder is None else str(self._folder / FILE_NAME)
            raise JobStoreError(f"the journal {place} cannot be used: {cause}") from error

    def _disconnect(self) -> None:
        if self._connection is not None:
            disconnect(self._connection)


def _commit(connection: sqlite3.Connection, statements: Iterable[Statement]) -> None:
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        for statement, parameters in statements:
            connection.execute(statement, parameters)


def _read_index(connection: sqlite3.Connection) -> list[StoredJob]:
    of_batches = "count(*), sum(length(outputs) + length(completion_id))"
    selected = connection.execute(f"SELECT completion_id, {of_batches} FROM batches GROUP BY completion_id")
    sizes = {completion_id: sums for completion_id, *sums in selected}
    attempts: dict[str, list[int]] = defaultdict(list)
    for completion_id, _, num_batches in map(verify, connection.execute("SELECT * FROM attempts")):
        attempts[completion_id].append(num_batches)
    end_rows = connection.execute("SELECT * FROM ends ORDER BY finished_at")
    ends = {completion_id: EndRecord(*end) for completion_id, *end in map(verify, end_rows)}
    rows = {}
    for row in connection.execute("SELECT * FROM completions ORDER BY created"):
        record = to_record(row)
        num_batches, num_bytes = sizes.get(record.completion_id, (0, 0))
        rows[record.completion_id] = StoredJob(
            replace(record, body="", prompts=()),
            num_prompt_tokens=sum(map(len, record.prompts)),
            num_bytes=num_bytes + sum(len(value) for value in row if isinstance(value, str)),
            num_batches=num_batches,
            attempts=tuple(attempts[record.completion_id]),
            end=ends.get(record.completion_id),
        )
    return [*(rows.pop(completion_id) for completion_id in ends), *rows.values()]


def _read_record(connection: sqlite3.Connection, completion_id: str) -> CompletionRecord:
    row = connection.execute("SELECT * FROM completions WHERE id = ?", (completion_id,)).fetchone()
    if row is None:
        raise ValueError(f"it has no completion {completion_id!r}")
    return to_record(row)
