"""Moves all files and batches between stores in a folder and a database, in the transaction that moves completions.

`stores.py` calls it. Knows no connection: `execute` executes a statement and returns its rows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from gptserve.server.batches import postgres as batch_sql
from gptserve.server.batches.postgres import to_shared
from gptserve.server.batches.store import BatchStore
from gptserve.server.files import postgres as file_sql
from gptserve.server.files.files import PIECE_BYTES
from gptserve.server.files.store import FileRecord, FileStore

Execute = Callable[..., Awaitable[list[tuple[Any, ...]]]]

_CONTENT = "INSERT INTO gptserve.contents VALUES (%(content)s) RETURNING id"
_PIECE = "INSERT INTO gptserve.pieces VALUES (%(content)s, %(place)s, %(data)s) RETURNING place"
_BATCH = (
    "INSERT INTO gptserve.batch_records VALUES (%(batch_id)s, %(created)s, %(status)s, %(record)s) RETURNING status"
)
_LEASE = """
INSERT INTO gptserve.batch_leases VALUES (%(batch_id)s, %(input_file_id)s, '', %(created)s, NULL, %(num_completed)s,
    %(num_failed)s, %(num_bytes)s) RETURNING batch_id
"""
_RESULT = "INSERT INTO gptserve.batch_results VALUES (%(batch_id)s, %(n)s, %(failed)s, %(result)s) RETURNING n"
_BEGUN = "INSERT INTO gptserve.batch_begun VALUES (%(batch_id)s, %(n)s, %(replica)s) RETURNING n"


async def import_batches(execute: Execute, files: FileStore, batches: BatchStore) -> None:
    """Copy all files and batches into a database. Whoever comes goes on with a batch, as with a folder."""
    for file in await files.load():
        content, place = uuid4(), 0
        await execute(_CONTENT, content=content)
        with await files.open(file.file_id) as data:
            while piece := await asyncio.to_thread(data.read, PIECE_BYTES):
                await execute(_PIECE, content=content, place=place, data=piece)
                place += len(piece)
        await execute(file_sql.INSERT, **asdict(file), content=content)
    for record in await batches.load():
        batch_id, results = record.batch_id, await batches.results(record.batch_id)
        counts = {"num_completed": results.num_completed, "num_failed": results.num_failed}
        values = asdict(record) | counts | {"num_bytes": results.num_bytes, "record": json.dumps(asdict(record))}
        await execute(_BATCH, **values)
        if record.has_ended:
            continue
        await execute(_LEASE, **values)
        for failed in (False, True):
            with await batches.read_results(batch_id, failed=failed) as lines:
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    await execute(_RESULT, batch_id=batch_id, n=line[0], failed=failed, result=line[1][:-1].decode())
        for n, num_servers in results.begun.items():
            for _ in range(num_servers):
                await execute(_BEGUN, batch_id=batch_id, n=n, replica=uuid4())


async def export_batches(execute: Execute, files: FileStore, batches: BatchStore) -> None:
    """Copy all files and batches of a database into empty stores, which are loaded here."""
    await files.load()
    await batches.load()
    for file in [FileRecord(*row) for row in await execute(file_sql.FIND_ALL)]:
        new, place = await files.begin(file.file_id), 0
        [(content, _)] = await execute(file_sql.OPEN, file_id=file.file_id)
        while place < file.num_bytes:
            [(start, data)] = await execute(file_sql.READ, content=content, place=place)
            await new.write(data)
            place = start + len(data)
        await new.keep(file)
    for shared in map(to_shared, await execute(batch_sql.FIND_ALL)):
        record, batch_id = shared.record, shared.record.batch_id
        await batches.add(record, "")
        if record.has_ended:
            continue
        for failed in (False, True):
            after = 0
            while page := await execute(batch_sql.READ, batch_id=batch_id, failed=failed, after=after):
                for after, result in page:
                    await batches.add_result(batch_id, after, result, failed=failed)
        for n, num_servers in await execute(batch_sql.BEGUN, batch_id=batch_id, me=None):
            for _ in range(num_servers):
                await batches.begin_line(batch_id, n)
