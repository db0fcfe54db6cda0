"""The store of files in the database that servers share: the record of a file is a row, its bytes are pieces.

Bytes that arrive belong to a server, and go with it if it dies; they become a file in one statement. Knows no HTTP and
no owners. docs/dev/journal.md describes the tables.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, BinaryIO, cast
from uuid import UUID, uuid4

from gptserve.server.files.files import PIECE_BYTES
from gptserve.server.files.store import FileRecord, FileStore, FileStoreError, NewContent, SharedFiles, in_use
from gptserve.server.jobs.postgres.beside import Beside, ForeignKeyViolation, Row
from gptserve.server.jobs.store import JOURNAL_UNAVAILABLE, JobStoreError

PATIENCE_S = 60.0  # that whoever reads a file waits for a database that is away

_ME = "WITH me AS (SELECT id FROM gptserve.replicas WHERE id = %(me)s FOR KEY SHARE)"
_COLUMNS = tuple(FileRecord.__slots__)
BEGIN = f"{_ME} INSERT INTO gptserve.contents SELECT %(content)s, id FROM me ON CONFLICT DO NOTHING"
# A piece that is written again, as an answer was lost, is the same. What is not returned was not written.
WRITE = f"""
{_ME}
INSERT INTO gptserve.pieces SELECT c.id, %(place)s, %(data)s FROM me JOIN gptserve.contents c ON c.replica = me.id
WHERE c.id = %(content)s ON CONFLICT (content, place) DO UPDATE SET data = excluded.data RETURNING place
"""
KEEP = f"""
{_ME},
mine AS (
    UPDATE gptserve.contents c SET replica = NULL FROM me WHERE c.id = %(content)s AND c.replica = me.id
    AND (%(batch_id)s::text IS NULL OR EXISTS (
        SELECT FROM gptserve.batch_leases l WHERE l.batch_id = %(batch_id)s AND l.replica = me.id
    ))
    RETURNING c.id
)
INSERT INTO gptserve.files ({", ".join(_COLUMNS)}, content)
SELECT {", ".join(f"%({name})s" for name in _COLUMNS)}, mine.id FROM mine RETURNING file_id
"""
INSERT = f"""
INSERT INTO gptserve.files ({", ".join(_COLUMNS)}, content)
VALUES ({", ".join(f"%({name})s" for name in _COLUMNS)}, %(content)s) RETURNING file_id
"""
IS_KEPT = "SELECT file_id FROM gptserve.files WHERE file_id = %(file_id)s AND content = %(content)s"
DISCARD = "DELETE FROM gptserve.contents WHERE id = %(content)s"
FORGET = "DELETE FROM gptserve.contents USING gptserve.files f WHERE f.file_id = %(file_id)s AND id = f.content"
IDS = "SELECT file_id FROM gptserve.files"
_FIND = f"SELECT {', '.join(_COLUMNS)} FROM gptserve.files"
_IN_ORDER = "ORDER BY created, file_id"
FIND = f"{_FIND} WHERE file_id = ANY(%(file_ids)s) {_IN_ORDER}"
FIND_ALL = f"{_FIND} {_IN_ORDER}"
OPEN = "SELECT content, num_bytes FROM gptserve.files WHERE file_id = %(file_id)s"
READ = """
SELECT place, data FROM gptserve.pieces WHERE content = %(content)s AND place <= %(place)s ORDER BY place DESC LIMIT 1
"""


class PostgresFileStore(FileStore, SharedFiles):
    """The files of a database, through what the store of stored completions has opened."""

    def __init__(self, database: Beside) -> None:
        self._database = database

    @property
    def sharing(self) -> SharedFiles:
        """Itself: other servers keep and delete files, too."""
        return self

    async def load(self) -> list[FileRecord]:
        """Return all files."""
        return [FileRecord(*row) for row in await self._rows(FIND_ALL)]

    async def ids(self) -> set[str]:
        """Return the ids of all files."""
        return {file_id for (file_id,) in await self._rows(IDS)}

    async def find(self, file_ids: Collection[str]) -> list[FileRecord]:
        """Return the files with these ids."""
        return [FileRecord(*row) for row in await self._rows(FIND, file_ids=list(file_ids))]

    async def begin(self, file_id: str, batch_id: str | None = None) -> NewContent:
        """Begin a file; its id is not taken before it is kept."""
        content = uuid4()
        await self._rows(f"{BEGIN} RETURNING id", content=content)
        return _NewContent(self, content, batch_id)

    async def open(self, file_id: str) -> BinaryIO:
        """Return the bytes of a file, which are read a piece at a time."""
        found = await self._rows(OPEN, file_id=file_id)
        if not found:
            raise FileStoreError(f"file {file_id!r} does not exist", "file_not_found")
        [(content, num_bytes)] = found
        reader = _Reader(self, content, num_bytes, asyncio.get_running_loop())
        return cast(BinaryIO, io.BufferedReader(reader, PIECE_BYTES))

    async def forget(self, file_id: str) -> None:
        """Delete a file. PostgreSQL's autovacuum reuses its space."""
        try:
            await self._rows(f"{FORGET} RETURNING id", file_id=file_id)
        except ForeignKeyViolation as error:  # of a lease
            raise in_use(file_id) from error

    async def close(self) -> None:
        """Close the connections, which the store of batches has, too."""
        await self._database.close()

    async def _rows(self, statement: str, patience_s: float = 0.0, **values: Any) -> list[Row]:
        try:
            return await self._database.rows(statement, patience_s, **values)
        except JobStoreError as error:
            raise FileStoreError(str(error), error.code, error.retry_after_s) from error


class _NewContent(NewContent):
    """Pieces of PIECE_BYTES, the last one of what is left."""

    def __init__(self, store: PostgresFileStore, content: UUID, batch_id: str | None) -> None:
        self._store, self._content, self._batch_id = store, content, batch_id
        self._place = 0
        self._rest = bytearray()
        self._is_kept = False

    async def write(self, data: bytes) -> None:
        """Add bytes."""
        self._rest += data
        while len(self._rest) >= PIECE_BYTES:
            await self._write_piece()

    async def keep(self, record: FileRecord) -> None:
        """Write what is left, and the record. The answer may have been lost, and the file been kept."""
        if self._rest:
            await self._write_piece()
        values = asdict(record) | {"content": self._content, "batch_id": self._batch_id}
        if not await self._store._rows(KEEP, **values) and not await self._store._rows(IS_KEPT, **values):
            raise _was_away()
        self._is_kept = True

    async def discard(self) -> None:
        """Delete the bytes, and a file of them that nobody has been told of, as the answer was lost."""
        self._rest.clear()
        if not self._is_kept:
            await self._store._rows(f"{DISCARD} RETURNING id", content=self._content)

    async def _write_piece(self) -> None:
        data = bytes(self._rest[:PIECE_BYTES])
        if not await self._store._rows(WRITE, content=self._content, place=self._place, data=data):
            raise _was_away()
        self._place += len(data)
        del self._rest[: len(data)]


class _Reader(io.RawIOBase):
    """Reads pieces for a thread, which waits while the event loop gets one."""

    def __init__(self, store: PostgresFileStore, content: UUID, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._content, self._size, self._loop = store, content, size, loop
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; return it."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read what is left of the piece at this place. Raises OSError if it is not there or cannot be reached."""
        if self._position >= self._size:
            return 0
        call = self._store._rows(READ, PATIENCE_S, content=self._content, place=self._position)
        try:
            rows = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except FileStoreError as error:
            raise OSError(str(error)) from error
        data = b"" if not rows else rows[0][1][self._position - rows[0][0] :]
        if not data:
            raise OSError("the file was deleted")
        taken = data[: len(buffer)]
        buffer[: len(taken)] = taken
        self._position += len(taken)
        return len(taken)


def _was_away() -> FileStoreError:
    return FileStoreError(
        "this server was away from the database of stored completions; try again", JOURNAL_UNAVAILABLE, 5
    )
