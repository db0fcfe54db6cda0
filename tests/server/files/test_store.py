"""What every store of files promises, tried with each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from gptserve.server.files.files import PIECE_BYTES
from gptserve.server.files.folder import FolderFileStore
from gptserve.server.files.postgres import PostgresFileStore
from gptserve.server.files.store import FileRecord, FileStore, FileStoreError
from tests.server.stores import open_jobs, use_stores

RECORD = FileRecord("file-1", "a", "in\u2028é.jsonl", "batch", 6, 1_700_000_000, None)
Make = Callable[[], Awaitable[FileStore]]
UseStore = Callable[[Callable[[Make], Awaitable[None]]], None]


@pytest.fixture(params=["a folder", "PostgreSQL"])
def use_store(request: pytest.FixtureRequest) -> UseStore:
    """Run a test with a function that makes the next server's store, after that of the one before is closed."""

    async def open_store(last: AsyncExitStack) -> FileStore:
        if request.param == "a folder":
            return FolderFileStore(request.getfixturevalue("tmp_path"))
        jobs = await open_jobs(request.getfixturevalue("postgres_url"), last)
        return PostgresFileStore(jobs.beside)

    return lambda test: use_stores(test, open_store)


async def keep(store: FileStore, record: FileRecord, *pieces: bytes) -> None:
    content = await store.begin(record.file_id)
    for piece in pieces:
        await content.write(piece)
    await content.keep(replace(record, num_bytes=sum(map(len, pieces))))
    await content.discard()


def test_a_file_that_was_kept_outlives_its_server(use_store: UseStore) -> None:
    async def test(make: Make) -> None:
        first = await make()
        assert await first.load() == []
        await keep(first, RECORD, b"abc", b"\0ef")
        await keep(first, replace(RECORD, file_id="file-0", owner=None, expires_at=5))
        second = await make()
        empty = replace(RECORD, file_id="file-0", owner=None, expires_at=5, num_bytes=0)
        assert await second.load() == [empty, RECORD]
        for file_id, data in (("file-1", b"abc\0ef"), ("file-0", b"")):
            with await second.open(file_id) as file:
                assert await asyncio.to_thread(file.read) == data
        await second.forget("file-1")
        await second.forget("file-1")
        with pytest.raises(FileStoreError):
            await second.open("file-1")
        assert await second.load() == [empty]

    use_store(test)


def test_a_file_of_many_pieces_is_read_line_by_line_from_any_place(use_store: UseStore) -> None:
    lines = [b"%d" % n * (n % 997) + b"\n" for n in range(1000)]
    data = b"".join(lines)
    assert len(data) > 3 * PIECE_BYTES

    async def test(make: Make) -> None:
        store = await make()
        await keep(store, RECORD, *(data[n : n + 99_991] for n in range(0, len(data), 99_991)))
        with await store.open("file-1") as file:
            assert await asyncio.to_thread(file.readlines) == lines
            for place in (0, PIECE_BYTES - 1, 2 * PIECE_BYTES):
                file.seek(place)
                assert await asyncio.to_thread(file.read, PIECE_BYTES) == data[place : place + PIECE_BYTES]
            file.seek(len(data))
            assert await asyncio.to_thread(file.read) == b""

    use_store(test)


def test_what_was_not_kept_is_no_file_and_its_id_is_free(use_store: UseStore) -> None:
    async def test(make: Make) -> None:
        store = await make()
        await store.load()
        discarded = await store.begin("file-1")
        await discarded.write(b"half")
        await discarded.discard()
        await discarded.discard()
        assert await store.load() == []
        await keep(store, RECORD, b"whole!")
        assert await store.load() == [RECORD]

    use_store(test)
