"""The store of batches in the database that servers share: the record of a batch, its results so far, and its lease.

Every write is one statement. It counts only if this server has the lease of the batch, and is not reaped meanwhile.
docs/dev/journal.md describes the tables. Knows no HTTP and no owners.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from gptserve.server.batches.store import (
    BatchCancelledError,
    BatchLostError,
    BatchRecord,
    BatchStore,
    BatchStoreError,
    Results,
    SharedBatch,
    SharedBatches,
    batch_of,
)
from gptserve.server.jobs.postgres.beside import Beside, ForeignKeyViolation, Row
from gptserve.server.jobs.sharing import FORGOTTEN_AFTER_S
from gptserve.server.jobs.store import JOURNAL_UNAVAILABLE, JobStoreError

PATIENCE_S = 60.0  # that a running batch waits for a database that is away, before it says so and tries again
_PAGE = 16  # results that are read at once
_DROPPED = 1000  # results that are deleted at once

_ME = "WITH me AS (SELECT id FROM gptserve.replicas WHERE id = %(me)s FOR KEY SHARE)"
_MINE = f"""{_ME},
mine AS (
    SELECT l.batch_id FROM gptserve.batch_leases l, me WHERE l.batch_id = %(batch_id)s AND l.replica = me.id
    FOR KEY SHARE OF l
)"""
# A record waits until it is on the disk with all before it: a crash takes back neither an end nor what was read then.
_DURABLY = "set_config('synchronous_commit', 'on', true)"
ADD = f"""
{_ME},
new AS (
    INSERT INTO gptserve.batch_records SELECT %(batch_id)s, %(created)s, %(status)s, %(record)s FROM me
    ON CONFLICT DO NOTHING RETURNING batch_id, created
)
INSERT INTO gptserve.batch_leases
SELECT new.batch_id, %(input_file_id)s, %(fingerprint)s, new.created, me.id FROM new, me
RETURNING batch_id, {_DURABLY}
"""
IS_HELD = "SELECT batch_id FROM gptserve.batch_leases WHERE batch_id = %(batch_id)s AND replica = %(me)s"
# Who cancels a batch, and who begins to write its files, write the same row: the first one has it.
PUT = f"""
{_MINE}
UPDATE gptserve.batch_records r SET status = %(status)s, record = %(record)s FROM mine
WHERE r.batch_id = mine.batch_id AND (%(status)s <> 'finalizing' OR r.cancelled_at IS NULL)
RETURNING r.batch_id, {_DURABLY}
"""
END = f"""
{_ME},
gone AS (
    DELETE FROM gptserve.batch_leases l USING me WHERE l.batch_id = %(batch_id)s AND l.replica = me.id
    RETURNING l.batch_id
),
begun AS (DELETE FROM gptserve.batch_begun b USING gone WHERE b.batch_id = gone.batch_id)
UPDATE gptserve.batch_records r SET status = %(status)s, record = %(record)s FROM gone
WHERE r.batch_id = gone.batch_id RETURNING r.batch_id, {_DURABLY}
"""
IS_PUT = "SELECT batch_id FROM gptserve.batch_records WHERE batch_id = %(batch_id)s AND record = %(record)s"
BEGIN_LINE = f"""
{_MINE},
begun AS (INSERT INTO gptserve.batch_begun SELECT batch_id, %(n)s, %(me)s FROM mine ON CONFLICT DO NOTHING)
SELECT batch_id FROM mine
"""
FORGET_BEGUN = "DELETE FROM gptserve.batch_begun WHERE batch_id = %(batch_id)s AND replica = %(me)s RETURNING n"
# A result that is there already was added by this statement, whose answer was lost, or by a server that died.
ADD_RESULT = f"""
{_MINE},
new AS (
    INSERT INTO gptserve.batch_results SELECT batch_id, %(n)s, %(failed)s, %(result)s FROM mine
    ON CONFLICT DO NOTHING RETURNING batch_id
),
done AS (DELETE FROM gptserve.batch_begun b USING mine WHERE b.batch_id = mine.batch_id AND b.n = %(n)s),
counted AS (
    UPDATE gptserve.batch_leases l SET num_failed = num_failed + %(failed)s::boolean::integer,
        num_completed = num_completed + 1 - %(failed)s::boolean::integer, num_bytes = num_bytes + %(num_bytes)s
    FROM new WHERE l.batch_id = new.batch_id
)
SELECT batch_id FROM mine
"""
STATE = "SELECT n, failed FROM gptserve.batch_results WHERE batch_id = %(batch_id)s ORDER BY n"
NUM_BYTES = "SELECT num_bytes FROM gptserve.batch_leases WHERE batch_id = %(batch_id)s"
BEGUN = """
SELECT n, count(*) FROM gptserve.batch_begun
WHERE batch_id = %(batch_id)s AND replica IS DISTINCT FROM %(me)s GROUP BY n
"""
READ = f"""
SELECT n, result FROM gptserve.batch_results WHERE batch_id = %(batch_id)s AND failed = %(failed)s AND n > %(after)s
ORDER BY n LIMIT {_PAGE}
"""
DROP = f"""
DELETE FROM gptserve.batch_results WHERE batch_id = %(batch_id)s AND n IN (
    SELECT n FROM gptserve.batch_results WHERE batch_id = %(batch_id)s LIMIT {_DROPPED}
) RETURNING n
"""
UNDROPPED = """
SELECT r.batch_id FROM gptserve.batch_records r
WHERE NOT EXISTS (SELECT FROM gptserve.batch_leases l WHERE l.batch_id = r.batch_id)
AND EXISTS (SELECT FROM gptserve.batch_results s WHERE s.batch_id = r.batch_id)
"""
FORGET = "DELETE FROM gptserve.batch_records WHERE batch_id = %(batch_id)s RETURNING batch_id"
IDS = "SELECT batch_id FROM gptserve.batch_records"
_FIND = """
SELECT r.record, r.cancelled_at, coalesce(l.num_completed, 0), coalesce(l.num_failed, 0), coalesce(l.num_bytes, 0)
FROM gptserve.batch_records r LEFT JOIN gptserve.batch_leases l ON l.batch_id = r.batch_id
"""
FIND = f"{_FIND} WHERE r.batch_id = ANY(%(batch_ids)s)"
FIND_ALL = f"{_FIND} ORDER BY r.created, r.batch_id"
_IS_FREE = """
l.replica IS NULL AND (l.fingerprint = ANY(%(fingerprints)s) OR NOT EXISTS (
    SELECT FROM gptserve.fingerprints f WHERE f.fingerprint = l.fingerprint
    AND f.seen_at > clock_timestamp() - make_interval(secs => %(forgotten_after_s)s)
))
"""
# Only reads, as mostly there is nothing to take.
HELD = f"""
SELECT l.batch_id, r.cancelled_at IS NOT NULL, l.replica IS NULL FROM gptserve.batch_leases l
JOIN gptserve.batch_records r ON r.batch_id = l.batch_id WHERE l.replica = %(me)s OR ({_IS_FREE})
"""
CLAIM = f"""
{_ME},
free AS (
    SELECT l.batch_id FROM gptserve.batch_leases l WHERE {_IS_FREE} ORDER BY l.created, l.batch_id LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE gptserve.batch_leases l SET replica = me.id FROM free, me WHERE l.batch_id = free.batch_id RETURNING l.batch_id
"""
RELEASE = "UPDATE gptserve.batch_leases SET replica = NULL WHERE replica = %(me)s RETURNING batch_id"
CANCEL = """
UPDATE gptserve.batch_records SET cancelled_at = %(now)s
WHERE batch_id = %(batch_id)s AND status IN ('validating', 'in_progress') AND cancelled_at IS NULL RETURNING batch_id
"""


class PostgresBatchStore(BatchStore, SharedBatches):
    """The batches of a database, through what the store of stored completions has opened."""

    def __init__(self, database: Beside) -> None:
        self._database = database
        self._writes: defaultdict[str, set[asyncio.Task[list[Row]]]] = defaultdict(set)

    @property
    def sharing(self) -> SharedBatches:
        """Itself: batches have leases."""
        return self

    async def load(self) -> list[BatchRecord]:
        """Return all batches. Which of them are this server's, `hold` says.

        Results of batches that have ended are dropped, as a server may have died before it did so.
        """
        for (batch_id,) in await self._rows(UNDROPPED):
            await self.drop_results(batch_id)
        return [to_shared(row).record for row in await self._rows(FIND_ALL)]

    async def add(self, record: BatchRecord, fingerprint: str) -> None:
        """Add a batch, with a lease of this server, which holds its input file."""
        values = _values(record) | {"created": record.created, "input_file_id": record.input_file_id}
        try:
            is_added = await self._rows(ADD, fingerprint=fingerprint, **values)
        except ForeignKeyViolation as error:
            message = f"file {record.input_file_id!r} does not exist"
            raise BatchStoreError(message, "file_not_found") from error
        if not is_added and not await self._rows(IS_HELD, batch_id=record.batch_id):
            message = "this server was away from the database of stored completions; try again"
            raise BatchStoreError(message, JOURNAL_UNAVAILABLE, 5)

    async def put(self, record: BatchRecord) -> None:
        """Put a record; the lease ends with the batch. The answer may have been lost, and the record been put."""
        values = _values(record)
        if writes := self._writes.pop(record.batch_id, None):  # whose callers may have been cancelled
            await asyncio.wait(writes)
        if await self._rows(END if record.has_ended else PUT, PATIENCE_S, **values):
            return
        if await self._rows(IS_PUT, PATIENCE_S, **values):
            return
        raise BatchCancelledError if await self._rows(IS_HELD, PATIENCE_S, **values) else BatchLostError

    async def begin_line(self, batch_id: str, n: int) -> None:
        """Add a row of this server."""
        await self._write(batch_id, BEGIN_LINE, n=n)

    async def forget_begun(self, batch_id: str) -> None:
        """Delete the rows of this server."""
        await self._rows(FORGET_BEGUN, batch_id=batch_id)

    async def add_result(self, batch_id: str, n: int, result: str, *, failed: bool) -> None:
        """Add a result, and count it."""
        num_bytes = len(result.encode())
        await self._write(batch_id, ADD_RESULT, n=n, result=result, failed=failed, num_bytes=num_bytes)

    async def results(self, batch_id: str) -> Results:
        """Return which lines have results."""
        state = bytearray()
        for n, failed in await self._rows(STATE, PATIENCE_S, batch_id=batch_id):
            state.extend(bytes(n + 1 - len(state)))
            state[n] = 1 + failed
        num_bytes = sum(held for (held,) in await self._rows(NUM_BYTES, PATIENCE_S, batch_id=batch_id))
        return Results(state, num_bytes, dict(await self._rows(BEGUN, PATIENCE_S, batch_id=batch_id)))

    async def read_results(self, batch_id: str, *, failed: bool) -> AbstractContextManager[Iterator[tuple[int, bytes]]]:
        """Return the results in the order of their lines, which are read some at a time."""
        loop = asyncio.get_running_loop()

        def read() -> Iterator[tuple[int, bytes]]:
            after = 0
            while True:
                call = self._rows(READ, PATIENCE_S, batch_id=batch_id, failed=failed, after=after)
                page = asyncio.run_coroutine_threadsafe(call, loop).result()
                for after, result in page:
                    yield after, result.encode() + b"\n"
                if len(page) < _PAGE:
                    return

        return nullcontext(read())

    async def drop_results(self, batch_id: str) -> None:
        """Delete the results, some at a time: no statement takes long."""
        while await self._rows(DROP, PATIENCE_S, batch_id=batch_id):
            pass

    async def forget(self, batch_id: str) -> None:
        """Delete the record, after the results."""
        await self.drop_results(batch_id)
        await self._rows(FORGET, PATIENCE_S, batch_id=batch_id)

    async def close(self) -> None:
        """Close the connections, which the store of files has, too."""
        await self._database.close()

    async def ids(self) -> set[str]:
        """Return the ids of all batches."""
        return {batch_id for (batch_id,) in await self._rows(IDS)}

    async def find(self, batch_ids: Collection[str]) -> list[SharedBatch]:
        """Return the batches with these ids."""
        return [to_shared(row) for row in await self._rows(FIND, batch_ids=list(batch_ids))]

    async def hold(self, fingerprints: Collection[str], limit: int) -> Mapping[str, bool]:
        """Take leases if there are any to take, and return the batches of this server."""
        asked: dict[str, Any] = {"fingerprints": list(fingerprints), "forgotten_after_s": FORGOTTEN_AFTER_S}
        rows = await self._rows(HELD, **asked)
        if limit and any(is_free for _, _, is_free in rows):
            await self._rows(CLAIM, limit=limit, **asked)
            rows = await self._rows(HELD, **asked)
        return {batch_id: is_cancelled for batch_id, is_cancelled, is_free in rows if not is_free}

    async def release(self) -> None:
        """Give up all leases of this server."""
        await self._rows(RELEASE)

    async def cancel(self, batch_id: str, now: int) -> None:
        """Note that a batch is to be cancelled."""
        await self._rows(CANCEL, batch_id=batch_id, now=now)

    async def _write(self, batch_id: str, statement: str, **values: Any) -> None:
        """Write what is of a batch: if the caller is cancelled, before the next record of it is put."""
        write = asyncio.create_task(self._rows(statement, PATIENCE_S, batch_id=batch_id, **values))
        self._writes[batch_id].add(write)
        write.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone
        write.add_done_callback(self._writes[batch_id].discard)
        if not await asyncio.shield(write):
            raise BatchLostError

    async def _rows(self, statement: str, patience_s: float = 0.0, **values: Any) -> list[Row]:
        try:
            return await self._database.rows(statement, patience_s, **values)
        except JobStoreError as error:
            raise BatchStoreError(str(error), error.code, error.retry_after_s) from error


def _values(record: BatchRecord) -> dict[str, Any]:
    return {"batch_id": record.batch_id, "status": record.status, "record": json.dumps(asdict(record))}


def to_shared(row: Row) -> SharedBatch:
    """Return the batch in a row of FIND. Its holder may not know yet that it is to be cancelled."""
    text, cancelled_at, *results = row
    record = batch_of(json.loads(text))
    if cancelled_at is not None and record.status in ("validating", "in_progress"):
        record = replace(record, status="cancelling", times={**record.times, "cancelling": cancelled_at})
    return SharedBatch(record, *results)
