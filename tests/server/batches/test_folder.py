"""Batches in a folder: records and results outlive their server, and half a result is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest

from gptserve.server.batches.folder import FolderBatchStore
from gptserve.server.batches.store import BatchRecord, BatchStoreError, LineError, Results

RECORD = BatchRecord(
    "batch_1", "a", "/v1/completions", "file-1", 1_700_000_000, 1_700_086_400, {"k": "v"}, errors=(LineError("c", "m"),)
)


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def in_order(store: FolderBatchStore, *, failed: bool) -> list[tuple[int, bytes]]:
    with await store.read_results("batch_1", failed=failed) as results:
        return list(results)


def test_a_record_and_its_results_outlive_their_server(tmp_path: Path) -> None:
    async def test() -> None:
        first = FolderBatchStore(tmp_path / "state" / "batches", "full")
        assert await first.load() == []
        await first.put(RECORD)
        changed = replace(RECORD, status="in_progress", times={"in_progress": 5}, num_lines=9)
        await first.put(changed)
        await asyncio.gather(
            *(first.add_result("batch_1", n, f'{{"n":{n}}}', failed=n == 3) for n in (7, 3, 12)),
        )
        await first.close()
        await first.close()
        second = FolderBatchStore(tmp_path / "state" / "batches")
        assert await second.load() == [changed]
        assert await second.results("batch_1") == Results(bytearray(b"\0\0\0\2\0\0\0\1\0\0\0\0\1"), 38)
        assert await in_order(second, failed=False) == [(7, b'{"n":7}\n'), (12, b'{"n":12}\n')]
        assert await in_order(second, failed=True) == [(3, b'{"n":3}\n')]
        await second.drop_results("batch_1")
        assert await second.results("batch_1") == Results(bytearray())
        assert await in_order(second, failed=False) == []
        await second.forget("batch_1")
        await second.forget("batch_1")
        assert await second.load() == []
        await second.close()

    run(test())


def test_half_a_result_is_none_and_the_next_follows_the_last_whole_one(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderBatchStore(tmp_path)
        await store.put(RECORD)
        await store.add_result("batch_1", 1, "{}", failed=False)
        await store.close()
        with (tmp_path / "batch_1.results").open("ab") as file:
            file.write(b"2 0 {")
        store = FolderBatchStore(tmp_path)
        assert (await store.results("batch_1")).state == bytearray(b"\0\1")
        await store.add_result("batch_1", 2, '"x"', failed=True)
        await store.close()

    run(test())
    assert (tmp_path / "batch_1.results").read_bytes() == b'1 0 {}\n2 1 "x"\n'


def test_what_was_begun_counts_until_it_has_a_result_or_the_server_ends_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        for begun in ({1: 1, 2: 1}, {2: 2, 3: 1}):
            store = FolderBatchStore(tmp_path)
            for n in (1, 2) if 1 in begun else (2, 3):
                await store.begin_line("batch_1", n)
            if 3 in begun:
                await store.add_result("batch_1", 1, "{}", failed=False)
            assert (await store.results("batch_1")).begun == begun
            await store.close()
        store = FolderBatchStore(tmp_path)
        await store.forget_begun("batch_1")
        assert await store.results("batch_1") == Results(bytearray(b"\0\1"), 7)
        assert await in_order(store, failed=False) == [(1, b"{}\n")]
        await store.close()

    run(test())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store = FolderBatchStore(tmp_path)
        await store.add_result("batch_1", 1, "{}", failed=False)
        with monkeypatch.context() as patched:
            write = __import__("os").write
            patched.setattr("os.write", lambda descriptor, data: write(descriptor, data[:3]))
            with pytest.raises(BatchStoreError, match=f"{tmp_path} cannot be used: the disk is full"):
                await store.add_result("batch_1", 2, "{}", failed=False)
        await store.add_result("batch_1", 3, "{}", failed=False)
        assert (await store.results("batch_1")).state == bytearray(b"\0\1\0\1")
        await store.close()
        with pytest.raises(BatchStoreError, match="is closed"):
            await store.put(RECORD)

    run(test())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"errors": [], "batch_id": "x"}'])
def test_a_damaged_record_is_an_error_in_words(tmp_path: Path, text: str) -> None:
    async def test() -> None:
        store = FolderBatchStore(tmp_path)
        with pytest.raises(BatchStoreError, match=r"cannot be used: batch_1.json is damaged"):
            await store.load()
        await store.close()

    (tmp_path / "batch_1.json").write_text(text)
    run(test())


def test_damaged_results_are_an_error_in_words(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderBatchStore(tmp_path)
        with pytest.raises(BatchStoreError, match=r"batch_1.results is damaged at byte 7"):
            await store.results("batch_1")
        await store.close()

    (tmp_path / "batch_1.results").write_bytes(b"1 0 {}\nhello\n")
    run(test())
