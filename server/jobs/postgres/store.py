"""The job store in a PostgreSQL database, which several servers share.

The batches of outputs that arrive during a statement form the next one. All else is a statement of its own, on a few
connections at once. What this server may not write any more, as another goes on with the completion, is a
LeaseLostError. Knows no HTTP, no text and no engine; `stores.py` makes one. docs/dev/journal.md describes the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection

from gptserve.server.completions.encoding import PIECE_ENTRIES
from gptserve.server.core.settings import StateSync
from gptserve.server.jobs.postgres import statements as sql
from gptserve.server.jobs.postgres.beside import Beside
from gptserve.server.jobs.postgres.connections import Call, Connections, Result, cause_of, takes_connections
from gptserve.server.jobs.postgres.groups import Group
from gptserve.server.jobs.postgres.membership import Membership
from gptserve.server.jobs.postgres.schema import ROLE_INDEPENDENT, prepare
from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, StoredJob, encode_outputs
from gptserve.server.jobs.sharing import Sharing
from gptserve.server.jobs.store import (
    NO_FORMER_OWNERS,
    FormerOwners,
    JobStore,
    JobStoreError,
    KeyTakenError,
    LeaseLostError,
    StoreUnavailableError,
)

LIMIT_S = 5.0  # for a statement, with the connection it needs: what a client may wait for
PATIENCE_S = 60.0  # that running completions wait for a database that is away
INTERVAL_S = 0.02  # between two statements with batches: a model that makes tokens faster writes several in one row
NUM_CONNECTIONS = 4  # beside one for the membership and one for batches of outputs
NUM_BESIDE = 2  # for files and batches of requests


class _Batch(NamedTuple):
    """One batch of outputs to be appended, the n-th."""

    n: int
    outputs: str
    num_bytes: int
    num_tokens: int


class PostgresJobStore(JobStore):
    """One database with the schema `gptserve`; `url` is libpq's, and is never shown, as it may have a password.

    lease_ttl_s is how long others leave this server's completions to it when it no longer answers.
    """

    def __init__(
        self, url: str, sync: StateSync = "normal", lease_ttl_s: float = 10.0, patience_s: float = PATIENCE_S
    ) -> None:
        milliseconds = round(max(LIMIT_S, lease_ttl_s) * 1000)
        settings = (
            f"SET synchronous_commit = {'on' if sync == 'full' else 'off'}; SET statement_timeout = {milliseconds}; "
            f"SET idle_in_transaction_session_timeout = {milliseconds}; {ROLE_INDEPENDENT}"
        )
        self._url = url
        self._of_membership = Connections(url, 1, settings, lease_ttl_s)
        spare = self._of_membership
        self._all = Connections(url, NUM_CONNECTIONS, settings, lease_ttl_s, spare)
        self._of_batches = Connections(url, 1, settings, lease_ttl_s, spare)
        self._patience_s = patience_s
        self._membership = Membership(self._of_membership, self._all, lease_ttl_s, min(LIMIT_S, lease_ttl_s))
        self.beside = Beside(Connections(url, NUM_BESIDE, settings, lease_ttl_s, spare), self._membership, LIMIT_S)
        self._batches = Group(self._append, INTERVAL_S)
        self._ends = Group(self._end)
        self._decoding = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._num_bytes = 0
        self.on_write: Callable[[float], object] = lambda seconds: None

    @property
    def sharing(self) -> Sharing:
        """This server's place among those of the database."""
        return self._membership

    @property
    def is_durable(self) -> bool:
        """True: a database outlives the server."""
        return True

    def num_bytes(self) -> int:
        """Return the size of the tables with their indexes when all completions were read last."""
        return self._num_bytes

    async def open(self) -> None:
        """Create the tables if there are none, and join the servers."""
        async with self._opening:
            if self._membership.me is None:
                try:
                    await self._of_membership.run(lambda connection, _: prepare(connection), LIMIT_S)
                    await self._membership.join()
                except StoreUnavailableError as error:
                    if not await asyncio.to_thread(takes_connections, self._url):
                        raise
                    cause = cause_of(error.__cause__ or error)
                    raise JobStoreError(f"the journal in PostgreSQL cannot be used: {cause}") from error

    async def close(self) -> None:
        """Finish the writes that are under way, and leave the servers."""
        await asyncio.gather(self._batches.wait(), self._ends.wait())
        with contextlib.suppress(JobStoreError):  # closed already, or out of reach: others reap it
            await self._membership.leave()
        for connections in (self._all, self._of_batches, self._of_membership, self.beside):
            await connections.close()

    async def load(self, former_owners: FormerOwners = NO_FORMER_OWNERS) -> list[StoredJob]:
        """Return all completions. No earlier version has written such a store, so it has no former owners."""
        await self.open()
        [(self._num_bytes,)] = await self._select(sql.NUM_BYTES)
        return [sql.to_shared(row).stored for row in await self._select(sql.FIND_ALL)]

    async def read_record(self, completion_id: str) -> CompletionRecord:
        """Return the record of a completion."""
        rows = await self._select(sql.READ_RECORD, id=completion_id)
        if not rows:
            raise JobStoreError(f"the journal in PostgreSQL cannot be used: it has no completion {completion_id!r}")
        return await asyncio.to_thread(_decoded, lambda: sql.to_record(rows[0]))

    async def batches(self, completion_id: str, first: int, limit: int) -> list[OutputBatch]:
        """Return at most `limit` batches of a completion from the `first`-th on."""
        rows = await self._select(sql.READ_BATCHES, id=completion_id, first=first, limit=limit)
        if not rows:
            return []
        async with self._decoding:  # in a thread, one at a time: scores take long, and compete with the event loop
            return await asyncio.to_thread(_decoded, lambda: sql.to_batches(completion_id, first, rows))

    async def add(self, record: CompletionRecord) -> int:
        """Begin a completion, with a lease of this server."""
        row = await asyncio.to_thread(sql.completion_row, record)  # which may be megabytes

        async def insert(connection: AsyncConnection, is_repeated: bool) -> bool:
            try:
                cursor = await connection.execute(sql.ADD.encode(), row | self._me)
                is_added = await cursor.fetchone() is not None
            except psycopg.errors.UniqueViolation:
                if not is_repeated:
                    raise
                is_added = False
            return is_added or (is_repeated and await _is_true(connection, sql.IS_HELD, self._me | {"id": row["id"]}))

        if not await self._timed(insert):
            if await self._all.run(lambda connection, _: _is_true(connection, sql.IS_MEMBER, self._me), LIMIT_S):
                raise KeyTakenError
            raise StoreUnavailableError("this server was away from the database of stored completions; try again")
        return int(row["num_bytes"])

    async def append(self, completion_id: str, n: int, outputs: OutputBatch) -> int:
        """Add the n-th batch of outputs to a completion."""
        num_scores = sum(len(output.logprobs) + len(output.prompt_logprobs or ()) for output in outputs)
        is_long = num_scores > PIECE_ENTRIES
        text = await asyncio.to_thread(encode_outputs, outputs) if is_long else encode_outputs(outputs)
        num_bytes, num_tokens = len(text) + len(completion_id), sum(len(output.token_ids) for output in outputs)
        # Clients wait for the first output, and for one that ends a choice.
        is_urgent = n == 0 or any(output.finish_reason is not None for output in outputs)
        await self._batches.add(completion_id, _Batch(n, text, num_bytes, num_tokens), is_urgent=is_urgent)
        return num_bytes

    async def add_attempt(self, stored: StoredJob) -> None:
        """Note that this server takes a completion up once more."""
        row = {"id": stored.record.completion_id, "n": len(stored.attempts), "num_batches": stored.num_batches}

        async def insert(connection: AsyncConnection, _: bool) -> bool:
            try:
                return await (await connection.execute(sql.ADD_ATTEMPT.encode(), row | self._me)).fetchone() is not None
            except psycopg.errors.ForeignKeyViolation:  # it was deleted meanwhile
                return False

        if not await self._timed(insert, self._patience_s):
            raise LeaseLostError

    async def clear_attempts(self) -> None:
        """Forget how often this server has taken completions up."""

        async def delete(connection: AsyncConnection, _: bool) -> None:
            await connection.execute(sql.CLEAR_ATTEMPTS.encode(), self._me)

        await self._timed(delete)

    async def end(self, completion_id: str, end: EndRecord) -> None:
        """End a completion, which frees its lease, and its key if it failed."""
        await self._ends.add(completion_id, end)

    async def forget(self, completion_ids: Iterable[str]) -> None:
        """Delete completions with all their rows. PostgreSQL's autovacuum reuses their space."""
        ids = list(completion_ids)

        async def delete(connection: AsyncConnection, _: bool) -> None:
            await connection.execute(sql.FORGET.encode(), {"ids": ids})

        await self._timed(delete)

    @property
    def _me(self) -> dict[str, Any]:
        return {"me": self._membership.me}

    async def _timed(
        self, write: Call[Result], patience_s: float = 0.0, connections: Connections | None = None
    ) -> Result:
        started_at = time.perf_counter()
        try:
            result = await (connections or self._all).run(write, LIMIT_S, patience_s)
        except psycopg.errors.UniqueViolation as error:
            raise JobStoreError(f"the journal in PostgreSQL cannot be used: {cause_of(error)}") from error
        self.on_write(time.perf_counter() - started_at)
        return result

    async def _select(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        async def select(connection: AsyncConnection, _: bool) -> list[tuple[Any, ...]]:
            return await (await connection.execute(statement.encode(), values)).fetchall()

        return await self._all.run(select, LIMIT_S)

    async def _append(self, batches: Sequence[tuple[str, _Batch]]) -> set[str]:
        ids, items = zip(*batches, strict=True)
        ns, outputs, num_bytes, num_tokens = map(list, zip(*items, strict=True))
        columns = {"ids": list(ids), "ns": ns, "outputs": outputs, "bytes": num_bytes, "tokens": num_tokens}

        async def insert(connection: AsyncConnection, _: bool) -> set[str]:
            return await _ids(connection, sql.APPEND, columns | self._me)

        return await self._timed(insert, self._patience_s, self._of_batches)

    async def _end(self, ends: Sequence[tuple[str, EndRecord]]) -> set[str]:
        columns = sql.end_columns(ends)

        async def insert(connection: AsyncConnection, is_repeated: bool) -> set[str]:
            ended = await _ids(connection, sql.END, columns | self._me)
            return ended | (await _ids(connection, sql.IS_ENDED, columns) if is_repeated else set())

        return await self._timed(insert, self._patience_s)


async def _ids(connection: AsyncConnection, statement: str, values: dict[str, Any]) -> set[str]:
    return {
        completion_id for (completion_id,) in await (await connection.execute(statement.encode(), values)).fetchall()
    }


async def _is_true(connection: AsyncConnection, statement: str, values: dict[str, Any]) -> bool:
    return await (await connection.execute(statement.encode(), values)).fetchone() == (True,)


def _decoded(decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except ValueError as error:
        raise JobStoreError(f"the journal in PostgreSQL cannot be used: {error}") from error
