"""What every store of batches promises, tried with each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from gptserve.server.batches.folder import FolderBatchStore
from gptserve.server.batches.postgres import PostgresBatchStore
from gptserve.server.batches.store import BatchRecord, BatchStore, LineError
from gptserve.server.files.postgres import PostgresFileStore
from gptserve.server.files.store import FileRecord
from tests.server.stores import open_jobs, use_stores

FILE = FileRecord("file-1", "a", "in.jsonl", "batch", 0, 1_700_000_000, None)
RECORD = BatchRecord(
    "batch_1", "a", "/v1/completions", "file-1", 1_700_000_000, 1_700_086_400, {"k": "é"}, errors=(LineError("c", "m"),)
)
Make = Callable[[], Awaitable[BatchStore]]
UseStore = Callable[[Callable[[Make], Awaitable[None]]], None]


@pytest.fixture(params=["a folder", "PostgreSQL"])
def use_store(request: pytest.FixtureRequest) -> UseStore:
    """Run a test with a function that makes the next server's store, after that of the one before is closed."""

    async def open_store(last: AsyncExitStack) -> BatchStore:
        if request.param == "a folder":
            return FolderBatchStore(request.getfixturevalue("tmp_path"))
        jobs = await open_jobs(request.getfixturevalue("postgres_url"), last)
        files = PostgresFileStore(jobs.beside)
        if not await files.load():
            await (await files.begin("file-1")).keep(FILE)
        return PostgresBatchStore(jobs.beside)

    return lambda test: use_stores(test, open_store)


async def take(store: BatchStore) -> None:
    if store.sharing is not None:
        assert await store.sharing.hold(["f"], 1) == {"batch_1": False}


async def in_order(store: BatchStore, *, failed: bool) -> list[tuple[int, bytes]]:
    with await store.read_results("batch_1", failed=failed) as results:
        return await asyncio.to_thread(list, results)


def test_a_batch_and_its_results_outlive_their_server(use_store: UseStore) -> None:
    async def test(make: Make) -> None:
        first = await make()
        assert await first.load() == []
        await first.add(RECORD, "f")
        changed = replace(RECORD, status="in_progress", times={"in_progress": 5}, num_lines=50)
        await first.put(changed)
        await asyncio.gather(*(first.begin_line("batch_1", n) for n in range(1, 46)))
        await asyncio.gather(
            *(first.add_result("batch_1", n, f'{{"n":"\u2028{n}"}}', failed=n % 4 == 3) for n in range(40, 1, -1))
        )
        second = await make()
        assert await second.load() == [changed]
        await take(second)
        results = await second.results("batch_1")
        assert results.state == bytearray([0, 0, *(1 + (n % 4 == 3) for n in range(2, 41))])
        assert (results.num_completed, results.num_failed, results.num_bytes > 0) == (29, 10, True)
        assert results.begun == dict.fromkeys((1, *range(41, 46)), 1)
        for failed in (False, True):
            wanted = [n for n in range(2, 41) if (n % 4 == 3) == failed]
            assert await in_order(second, failed=failed) == [(n, f'{{"n":"\u2028{n}"}}\n'.encode()) for n in wanted]
        await second.put(replace(changed, status="completed"))
        await second.drop_results("batch_1")
        results = await second.results("batch_1")
        assert (results.state, results.num_bytes) == (bytearray(), 0)
        assert await in_order(second, failed=False) == []
        await second.forget("batch_1")
        await second.forget("batch_1")
        assert await second.load() == []

    use_store(test)


def test_what_servers_began_and_left_in_order_is_not_counted(use_store: UseStore) -> None:
    async def test(make: Make) -> None:
        store = await make()
        await store.load()
        await store.add(RECORD, "f")
        for num_before in range(3):
            await store.begin_line("batch_1", 1)
            await store.begin_line("batch_1", 2)
            store = await make()
            await store.load()
            await take(store)
            assert (await store.results("batch_1")).begun == {1: num_before + 1, 2: num_before + 1}
        await store.add_result("batch_1", 2, "{}", failed=False)
        await store.begin_line("batch_1", 3)
        await store.forget_begun("batch_1")
        store = await make()
        await store.load()
        assert 3 not in (await store.results("batch_1")).begun
        assert 2 not in (await store.results("batch_1")).begun

    use_store(test)
