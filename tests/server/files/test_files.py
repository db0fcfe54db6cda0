"""Files belong to owners, within limits that owners share, until they expire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gptserve.server.core.errors import ServiceError
from gptserve.server.files import files as files_module
from gptserve.server.files.files import KEPT_S, FileLimits, Files
from gptserve.server.files.folder import FolderFileStore
from gptserve.server.files.store import FileRecord
from tests.server.jobs.server import Clock


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


Make = Callable[..., Files]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make the files of a store that is closed at the end of the test."""
    stores: list[FolderFileStore] = []

    def make_files(*, several: bool = False, clock: Clock | None = None) -> Files:
        stores.append(FolderFileStore(tmp_path))
        return Files(stores[-1], FileLimits(10, 20, lambda: several), clock or Clock())

    yield make_files
    for store in stores:
        run(store.close())


async def upload(files: Files, data: bytes, owner: str | None = None, keep_s: int | None = None) -> FileRecord:
    async with files.upload(owner) as arriving:
        await arriving.write(data)
        return await arriving.keep("in.jsonl", "batch", keep_s)


async def refused(awaitable: Awaitable[object], code: str, says: str) -> None:
    with pytest.raises(ServiceError, match=says) as raised:
        await awaitable
    assert raised.value.code == code


def test_only_its_owner_finds_a_file(make: Make) -> None:
    async def test() -> None:
        files = make()
        record = await upload(files, b"x", "a")
        assert await files.find(record.file_id, "a") == record
        for owner in ("b", None):
            with pytest.raises(ServiceError, match=f"file '{record.file_id}' does not exist"):
                await files.find(record.file_id, owner)
        listed = [await files.list_files(*asked) for asked in (("a", None), ("a", "batch_output"), ("b", None))]
        assert listed == [[record], [], []]

    run(test())


def test_bytes_count_from_their_arrival_and_no_more_once_they_are_gone(make: Make, tmp_path: Path) -> None:
    async def test() -> None:
        files = make()
        await refused(upload(files, b"x" * 11), "body_too_large", "a file may have at most 10 bytes")
        first = await upload(files, b"x" * 10)
        async with files.upload(None) as arriving:
            await arriving.write(b"x" * 9)
            assert (files.num_files, files.num_bytes) == (1, 19)
            await refused(upload(files, b"xx"), "too_many_kept", "all files may have at most 20 bytes")
        assert (files.num_files, files.num_bytes) == (1, 10), "it was not kept"
        await files.delete(first)
        assert (files.num_files, files.num_bytes) == (0, 0)

    run(test())
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_no_owner_has_more_than_half_where_there_are_several(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILES", 4)

    async def test() -> None:
        files = make(several=True)
        await upload(files, b"x" * 9, "a")
        await refused(upload(files, b"xx", "a"), "too_many_kept", "of a key 10: delete some, as yours would have 11")
        await upload(files, b"", "a")
        await refused(upload(files, b"", "a"), "too_many_kept", "at most 4 files may be kept, 2 of yours are")
        await upload(files, b"x" * 10, "b")

    run(test())


def test_so_many_may_arrive_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_UPLOADS", 2)

    async def test() -> None:
        files = make(several=True)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(files.upload("a"))
            await refused(upload(files, b"", "a"), "rate_limit_exceeded", "of a key 1; 1 of yours do")
            await stack.enter_async_context(files.upload("b"))
            await refused(upload(files, b"", "c"), "rate_limit_exceeded", "at most 2 files may arrive at once")
        await upload(files, b"", "a")

    run(test())


def test_a_file_expires_unless_a_batch_needs_it(make: Make) -> None:
    async def test() -> None:
        clock = Clock()
        files = make(clock=clock)
        short, long = await upload(files, b"x", keep_s=10), await upload(files, b"y")
        assert (short.expires_at, long.expires_at) == (int(clock()) + 10, int(clock()) + KEPT_S)
        files.hold(short.file_id)
        await refused(files.delete(short), "file_in_use", "is the input of a batch that has not ended")
        clock.now += 10
        await files.expire()
        assert await files.find(short.file_id, None) == short
        files.let_go(short.file_id)
        with pytest.raises(ServiceError, match="does not exist"):
            await files.find(short.file_id, None)
        assert await files.list_files(None, None) == [long]
        await files.expire()
        assert (files.num_files, files.num_bytes) == (1, 1)

    run(test())


def test_files_are_found_again_by_the_next_server(make: Make) -> None:
    async def test() -> None:
        clock = Clock()
        first = make(clock=clock)
        records = [await upload(first, b"abc", "a"), await upload(first, b"de", "b", keep_s=5)]
        await first._store.close()
        clock.now += 5
        second = make(clock=clock)
        await second.start()
        assert await second.find(records[0].file_id, "a") == records[0]
        await second.expire()
        assert (second.num_files, second.num_bytes) == (1, 3)
        await second.close()

    run(test())
