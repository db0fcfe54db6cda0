"""Moves all completions between a PostgreSQL database and another store, while no server uses either.

One transaction does it, which keeps servers from starting meanwhile: the tables have all of it or nothing.
`stores.py` calls it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import AsyncConnection

from gptserve.server.jobs.postgres import statements as sql
from gptserve.server.jobs.postgres.connections import cause_of, parameters_of
from gptserve.server.jobs.postgres.schema import ROLE_INDEPENDENT, prepare
from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, StoredJob, encode_outputs
from gptserve.server.jobs.store import JobStore, JobStoreError, cancelled

Execute = Callable[..., Awaitable[list[tuple[Any, ...]]]]
"""Executes a statement with values by name, and returns its rows."""
Read = Callable[[str, int, int], Awaitable[list[OutputBatch]]]
PAGE = 64  # batches that are read at once
_LIVING = (
    "SELECT count(*) FROM gptserve.replicas WHERE heartbeat_at >= clock_timestamp() - make_interval(secs => ttl_s)"
)
_PATIENTLY = "SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0"  # for gigabytes
_ANY = """
SELECT 1 WHERE EXISTS (SELECT FROM gptserve.completions) OR EXISTS (SELECT FROM gptserve.files)
OR EXISTS (SELECT FROM gptserve.batch_records)
"""
_BATCH = "INSERT INTO gptserve.batches VALUES (%s, %s, %s, %s, %s)"


async def import_jobs(url: str, source: JobStore, rest: Callable[[Execute], Awaitable[None]]) -> tuple[int, int]:
    """Copy all completions of a store into a database that has none, then what `rest` copies.

    Returns their number, and of how many the servers of the database are to go on with. Raises JobStoreError.
    """
    stored_jobs = await source.load()
    async with _without_servers(url) as connection:
        if await _rows(connection, _ANY):
            raise JobStoreError("the database has completions, files or batches already; name an empty one")
        replica = uuid4()  # of none that lives: attempts name whoever made them
        for stored in stored_jobs:
            record = await source.read_record(stored.record.completion_id)
            await _insert(connection, record, stored, replica)
            num_bytes = num_tokens = 0
            async for first, page in _pages(source.batches, stored):
                rows = []
                for n, outputs in enumerate(page, first):
                    text = encode_outputs(outputs)
                    num_bytes += len(text) + len(record.completion_id)
                    num_tokens += sum(len(output.token_ids) for output in outputs)
                    rows.append((record.completion_id, n, text, num_bytes, num_tokens))
                await connection.cursor().executemany(_BATCH.encode(), rows)
        await rest(partial(_rows, connection))
    return len(stored_jobs), sum(stored.end is None for stored in stored_jobs)


async def export_jobs(url: str, target: JobStore, rest: Callable[[Execute], Awaitable[None]]) -> tuple[int, int]:
    """Copy all completions of a database into an empty store, then the rest; return as `import_jobs` does.

    Raises JobStoreError.
    """
    async with _without_servers(url) as connection:
        shared_jobs = [sql.to_shared(row) for row in await _rows(connection, sql.FIND_ALL)]
        num_unfinished = 0
        for stored, num_tokens, is_cancelled in shared_jobs:
            [row] = await _rows(connection, sql.READ_RECORD, id=stored.record.completion_id)
            await target.add(sql.to_record(row))

            async def read(completion_id: str, first: int, limit: int) -> list[OutputBatch]:
                rows = await _rows(connection, sql.READ_BATCHES, id=completion_id, first=first, limit=limit)
                return sql.to_batches(completion_id, first, rows)

            async for first, page in _pages(read, stored):
                for n, outputs in enumerate(page, first):
                    await target.append(stored.record.completion_id, n, outputs)
            for n, num_batches in enumerate(stored.attempts):
                await target.add_attempt(stored._replace(attempts=stored.attempts[:n], num_batches=num_batches))
            end = stored.end
            if end is None and is_cancelled:  # its order to end is not of the other store
                error = json.dumps(cancelled().fields())
                end = EndRecord("cancelled", error, time.time(), stored.num_batches, num_tokens, None)
            if end is not None:
                await target.end(stored.record.completion_id, end)
            num_unfinished += end is None
        await rest(partial(_rows, connection))
    return len(shared_jobs), num_unfinished


@asynccontextmanager
async def _without_servers(url: str) -> AsyncIterator[AsyncConnection]:
    """Open a transaction during which no server uses the database. Raises JobStoreError if one does."""
    try:
        connecting = AsyncConnection.connect(**{"application_name": "gptserve"} | parameters_of(url))
        async with await connecting as connection:
            await connection.execute(f"{ROLE_INDEPENDENT}; {_PATIENTLY}".encode())
            await prepare(connection)
            await connection.execute("LOCK TABLE gptserve.replicas IN SHARE ROW EXCLUSIVE MODE")
            [(num_servers,)] = await _rows(connection, _LIVING)
            if num_servers:
                raise JobStoreError(f"servers are using the database: {num_servers}; end them first")
            await connection.execute("DELETE FROM gptserve.replicas")  # the silent, who join anew if they come back
            yield connection
    except (psycopg.Error, ValueError) as error:
        raise JobStoreError(f"the journal in PostgreSQL cannot be used: {cause_of(error)}") from error


async def _insert(connection: AsyncConnection, record: CompletionRecord, stored: StoredJob, replica: UUID) -> None:
    """Insert a completion with all but its batches."""
    completion_id, end = record.completion_id, stored.end
    await connection.execute(sql.INSERT.encode(), await asyncio.to_thread(sql.completion_row, record))
    if record.key is not None and (end is None or end.status != "failed"):
        await connection.execute(
            b"INSERT INTO gptserve.keys VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
            (record.owner, record.key, completion_id),
        )
    for n, num_batches in enumerate(stored.attempts):
        await connection.execute(
            b"INSERT INTO gptserve.attempts VALUES (%s, %s, %s, %s)", (completion_id, n, num_batches, replica)
        )
    if end is not None:
        await connection.execute(
            b"INSERT INTO gptserve.ends VALUES (%s, %s, %s, %s, %s, %s, %s)", (completion_id, *astuple(end))
        )
        return
    await connection.execute(
        b"INSERT INTO gptserve.leases VALUES (%s, %s, %s)", (completion_id, record.fingerprint, record.created)
    )
    await connection.execute(  # a server with the model has some time to come
        b"INSERT INTO gptserve.fingerprints VALUES (%s, clock_timestamp())"
        b" ON CONFLICT (fingerprint) DO UPDATE SET seen_at = excluded.seen_at",
        (record.fingerprint,),
    )


async def _pages(read: Read, stored: StoredJob) -> AsyncIterator[tuple[int, list[OutputBatch]]]:
    """Yield all batches of a completion in pages, with the number of the first of each."""
    first = 0
    while first < stored.num_batches:
        page = await read(stored.record.completion_id, first, PAGE)
        if not page:
            raise JobStoreError(f"the journal lacks the end of completion {stored.record.completion_id!r}")
        yield first, page
        first += len(page)


async def _rows(connection: AsyncConnection, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    return await (await connection.execute(statement.encode(), values)).fetchall()
