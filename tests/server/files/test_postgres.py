"""Files in a database that servers share: what one keeps and deletes holds for all, and the dead keep nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import psycopg
import pytest

from gptserve.server.files import files as files_module
from gptserve.server.files.files import PIECE_BYTES, FileLimits, Files
from gptserve.server.files.postgres import PostgresFileStore
from gptserve.server.files.store import FileRecord, FileStoreError
from gptserve.server.jobs.postgres.store import PostgresJobStore
from tests.postgres_server import PostgresServer
from tests.server.files.test_files import refused, upload
from tests.server.jobs.server import Clock

SILENCE = "UPDATE gptserve.replicas SET heartbeat_at = '-infinity' WHERE id = %s"
COUNTS = "SELECT (SELECT count(*) FROM gptserve.contents), (SELECT count(*) FROM gptserve.pieces)"


class Server(NamedTuple):
    """One of two servers of a database."""

    jobs: PostgresJobStore
    store: PostgresFileStore
    files: Files


UseServers = Callable[[Callable[[Server, Server], Awaitable[None]]], None]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def use_servers(postgres_url: str, clock: Clock) -> UseServers:
    """Run a test with two servers, whose files have 1 MiB each, and 2 MiB all together."""

    def use(test: Callable[[Server, Server], Awaitable[None]]) -> None:
        async def run() -> None:
            async with AsyncExitStack() as stack:
                servers = []
                for _ in range(2):
                    jobs = PostgresJobStore(postgres_url)
                    stack.push_async_callback(jobs.close)
                    await jobs.open()
                    store = PostgresFileStore(jobs.beside)
                    files = Files(store, FileLimits(2**20, 2**21), clock)
                    stack.push_async_callback(files.close)
                    await files.start()
                    servers.append(Server(jobs, store, files))
                await test(servers[0], servers[1])

        asyncio.run(asyncio.wait_for(run(), 20))

    return use


def test_a_file_is_found_read_listed_and_deleted_at_each_server(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server) -> None:
        record = await upload(first.files, b"abc", "a")
        assert await second.files.find(record.file_id, "a") == record
        await refused(second.files.find(record.file_id, "b"), "file_not_found", "does not exist")
        with await second.files.open(record) as file:
            assert await asyncio.to_thread(file.read) == b"abc"
        other = await upload(second.files, b"de", "a")
        assert await second.files.list_files("a", None) == [record, other]
        assert await first.files.list_files("a", None) == [record, other]
        assert (first.files.num_files, first.files.num_bytes) == (2, 5)
        await second.files.delete(record)
        await refused(first.files.find(record.file_id, "a"), "file_not_found", "does not exist")
        await refused(first.files.open(record), "file_not_found", f"file '{record.file_id}' does not exist")
        assert await first.files.list_files("a", None) == [other]
        assert (first.files.num_files, first.files.num_bytes) == (1, 2)

    use_servers(test)


def test_limits_count_the_files_of_all_servers(use_servers: UseServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILES", 2)

    async def test(first: Server, second: Server) -> None:
        large = await upload(first.files, b"x" * 2**20)
        await refused(upload(second.files, b"x" * (2**20 + 1)), "body_too_large", "at most 1048576 bytes")
        await upload(second.files, b"x" * (2**20 - 1))
        await refused(upload(first.files, b""), "too_many_kept", "at most 2 files may be kept")
        await second.files.delete(large)
        await upload(first.files, b"x" * 2**20)
        monkeypatch.setattr(files_module, "MAX_FILES", 3)
        await refused(upload(second.files, b"xx"), "too_many_kept", "all files may have at most 2097152 bytes")

    use_servers(test)


def test_a_file_expires_at_each_server(use_servers: UseServers, clock: Clock) -> None:
    async def test(first: Server, second: Server) -> None:
        record = await upload(first.files, b"x", keep_s=10)
        assert await second.files.find(record.file_id, None) == record
        clock.now += 10
        await asyncio.gather(first.files.expire(), second.files.expire())
        assert await first.store.load() == []
        assert (first.files.num_bytes, second.files.num_bytes) == (0, 0)

    use_servers(test)


def test_a_server_that_was_reaped_keeps_nothing_of_what_was_arriving(
    use_servers: UseServers, postgres_url: str
) -> None:
    async def test(first: Server, second: Server) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            begun, written = await first.store.begin("file-1"), await first.store.begin("file-2")
            for content in (begun, written):
                await content.write(b"x" * PIECE_BYTES)
            assert connection.execute(COUNTS.encode()).fetchone() == (2, 2)
            connection.execute(SILENCE.encode(), (first.jobs.sharing.me,))  # type: ignore[attr-defined]
            assert await second.jobs.sharing.reap() == 1
            assert connection.execute(COUNTS.encode()).fetchone() == (0, 0), "others have deleted it"
            away = "this server was away from the database of stored completions; try again"
            for rejoins in (False, True):
                if rejoins:
                    await first.jobs.sharing.join()
                await refused(begun.write(b"x" * PIECE_BYTES), "journal_unavailable", away)
            record = FileRecord("file-2", None, "in.jsonl", "batch", PIECE_BYTES, 1, None)
            await refused(written.keep(record), "journal_unavailable", away)
            await begun.discard()
            assert connection.execute(COUNTS.encode()).fetchone() == (0, 0)
            assert await first.store.load() == []
            await upload(first.files, b"abc")

    use_servers(test)


def test_a_repeated_write_or_keep_whose_answer_was_lost_is_no_error(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server) -> None:
        content = await first.store.begin("file-1")
        await content.write(b"x" * PIECE_BYTES)
        content._place, content._rest = 0, bytearray(b"x" * PIECE_BYTES)  # type: ignore[attr-defined]
        await content.write(b"y")
        record = FileRecord("file-1", None, "n", "batch", PIECE_BYTES + 1, 1, None)
        await content.keep(record)
        await content.keep(record)
        with await second.store.open("file-1") as file:
            assert await asyncio.to_thread(file.read) == b"x" * PIECE_BYTES + b"y"

    use_servers(test)


def test_a_file_that_is_deleted_while_it_is_read_ends_in_an_error(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server) -> None:
        record = await upload(first.files, b"x" * 2 * PIECE_BYTES)
        with await second.files.open(record) as file:
            assert len(await asyncio.to_thread(file.read, PIECE_BYTES)) == PIECE_BYTES
            await first.files.delete(record)
            with pytest.raises(OSError, match="the file was deleted"):
                await asyncio.to_thread(file.read)

    use_servers(test)


@pytest.mark.slow
def test_without_the_database_files_are_refused_until_it_is_back(
    use_servers: UseServers, postgres: PostgresServer
) -> None:
    async def test(first: Server, second: Server) -> None:
        record = await upload(first.files, b"abc")
        await asyncio.to_thread(postgres.stop)
        for _ in range(2):
            with pytest.raises(FileStoreError, match="the database of stored completions cannot be reached") as raised:
                await first.files.find(record.file_id, None)
            assert (raised.value.code, raised.value.retry_after_s) == ("journal_unavailable", 5)
        await asyncio.to_thread(postgres.start)
        assert await first.files.find(record.file_id, None) == record

    use_servers(test)
