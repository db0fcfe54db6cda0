"""Files in a folder: what is kept outlives its server, what is not is deleted, and one server at a time has it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from gptserve.server.files.folder import FolderFileStore
from gptserve.server.files.locked_folder import LockedFolder
from gptserve.server.files.store import FileRecord, FileStoreError

RECORD = FileRecord("file-1", "a", "in.jsonl", "batch", 6, 1_700_000_000, None)


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def keep(store: FolderFileStore, record: FileRecord = RECORD) -> None:
    content = await store.begin(record.file_id)
    await content.write(b"abc")
    await content.write(b"def")
    await content.keep(record)
    await content.discard()


def test_a_file_that_was_kept_outlives_its_server(tmp_path: Path) -> None:
    async def test() -> None:
        first = FolderFileStore(tmp_path / "state" / "files")
        assert await first.load() == []
        await keep(first)
        await first.close()
        second = FolderFileStore(tmp_path / "state" / "files")
        assert await second.load() == [RECORD]
        with await second.open("file-1") as file:
            await second.forget("file-1")
            assert file.read() == b"abcdef"
        await second.forget("file-1")
        with pytest.raises(FileStoreError, match="cannot be used: No such file or directory"):
            await second.open("file-1")
        await second.close()
        assert names(tmp_path / "state" / "files") == ["lock"]

    run(test())


def test_what_was_not_kept_is_deleted(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderFileStore(tmp_path)
        await keep(store)
        killed = await store.begin("file-2")
        await killed.write(b"half")
        discarded = await store.begin("file-3")
        await discarded.discard()
        await discarded.discard()
        (tmp_path / "file-4.new").write_text("{")
        await store.close()
        later = FolderFileStore(tmp_path)
        assert await later.load() == [RECORD]
        await later.close()
        assert names(tmp_path) == ["file-1.bytes", "file-1.json", "lock"]
        killed._file.close()  # type: ignore[attr-defined]

    run(test())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "file-1.bytes").write_bytes(b"short"), "it is not the record of the bytes beside it"),
        (lambda folder: (folder / "file-1.json").write_text("{"), "file-1.json is damaged: Expecting"),
        (lambda folder: (folder / "file-1.json").write_text("{}"), "file-1.json is damaged: .*missing"),
        (lambda folder: (folder / "file-1.bytes").unlink(), "file-1.json is damaged: .*No such file"),
        (lambda folder: (folder / "file-1.json").rename(folder / "file-2.json"), "file-2.json is damaged"),
    ],
)
def test_damage_is_an_error_in_words(tmp_path: Path, damage: object, says: str) -> None:
    async def test() -> None:
        store = FolderFileStore(tmp_path)
        await keep(store)
        await store.close()
        damage(tmp_path)  # type: ignore[operator]
        with pytest.raises(FileStoreError, match=says):
            await store.load()
        await store.close()

    run(test())


def test_a_folder_has_one_server_at_a_time(tmp_path: Path) -> None:
    folder = LockedFolder(tmp_path)
    assert folder.lock() == folder.lock() == tmp_path
    other = FolderFileStore(tmp_path)
    with pytest.raises(FileStoreError, match=f"{tmp_path} cannot be used: another server is using it"):
        run(other.load())  # type: ignore[arg-type]
    folder.close()
    folder.close()
    run(other.load())  # type: ignore[arg-type]
    run(other.close())


def test_a_temporary_folder_ends_with_its_server_and_those_left_behind_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os; from gptserve.server.files.locked_folder import LockedFolder as F; F(None).lock(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, check=False).returncode == 9
    [left] = tmp_path.iterdir()

    async def test() -> None:
        store, other = FolderFileStore(None), FolderFileStore(None)
        assert await store.load() == []
        assert names(tmp_path) == [left.name], "it is made with the first file"
        await keep(store)
        await keep(other)
        assert len(set(names(tmp_path)) - {left.name}) == 2
        assert not left.exists()
        await store.close()
        await other.close()
        assert names(tmp_path) == []

    run(test())


def test_a_file_is_closed_for_whoever_was_cancelled_while_it_was_opened(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderFileStore(tmp_path)
        await keep(store)
        for _ in range(10):
            opening = asyncio.create_task(store.open("file-1"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        await store.close()

    run(test())
    gc.collect()  # a file that is still open would warn


def test_a_caller_who_is_cancelled_while_a_file_is_kept_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there, may_go_on = threading.Event(), threading.Event()
    sync = os.fsync

    def wait(descriptor: int) -> None:
        sync(descriptor)
        is_there.set()
        assert may_go_on.wait(20)

    async def test() -> None:
        store = FolderFileStore(tmp_path)
        content = await store.begin("file-1")
        await content.write(b"abcdef")
        monkeypatch.setattr(os, "fsync", wait)
        keeping = asyncio.create_task(content.keep(RECORD))
        assert await asyncio.to_thread(is_there.wait, 20)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        discarding = asyncio.create_task(content.discard())
        await asyncio.sleep(0)
        may_go_on.set()
        await discarding
        await store.close()

    run(test())
    assert names(tmp_path) == ["lock"]


def test_who_is_cancelled_while_a_file_is_begun_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderFileStore(tmp_path)
        for _ in range(10):
            beginning = asyncio.create_task(store.begin("file-1"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            beginning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await beginning
        assert names(tmp_path) in ([], ["lock"])
        await store.close()

    run(test())
    gc.collect()  # a file that is still open would warn


def test_only_their_owner_can_read_the_files(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderFileStore(tmp_path / "files")
        await keep(store)
        await store.close()

    run(test())
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "files").iterdir()}
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    assert json.loads((tmp_path / "files" / "file-1.json").read_text())["filename"] == "in.jsonl"
