"""The store in SQLite: what was written is read back as it was, or there is a sentence that says why not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.request import TokenOutput
from gptserve.server.core.settings import StateSync
from gptserve.server.jobs.records import (
    decode_outputs,
)
from gptserve.server.jobs.sqlite.database import FILE_NAME, SCHEMA_VERSION
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStoreError
from tests.server.jobs.test_store import END, OUTPUTS, RECORD


def use(folder: Path | None, test: Callable[[SqliteJobStore], Awaitable[None]], sync: StateSync = "normal") -> None:
    """Run a test with a journal that is closed after it."""

    async def run() -> None:
        journal = SqliteJobStore(folder, sync)
        try:
            await test(journal)
        finally:
            await journal.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def write_one(folder: Path) -> Path:
    """Make a journal with one completion that ended; return its file."""

    async def write(journal: SqliteJobStore) -> None:
        await journal.add(RECORD)
        for n in range(END.num_batches):
            await journal.append("cmpl-1", n, OUTPUTS)
        await journal.end("cmpl-1", END)

    use(folder, write)
    return folder / FILE_NAME


def refusal(folder: Path) -> str:
    """Return why a journal cannot be opened and read."""

    async def read(journal: SqliteJobStore) -> None:
        await journal.open()
        await journal.load()
        await journal.batches("cmpl-1", 0, 10)

    with pytest.raises(JobStoreError) as raised:
        use(folder, read)
    message = str(raised.value)
    assert message.startswith(f"the journal {folder / FILE_NAME} cannot be used: ")
    return message.partition("used: ")[2]


def change(file: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement)


def test_a_folder_keeps_it_and_memory_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    file = write_one(folder)
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)

    async def stored(journal: SqliteJobStore) -> None:
        assert journal.is_durable
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS, OUTPUTS]

    async def lost(journal: SqliteJobStore) -> None:
        assert not journal.is_durable
        assert await journal.load() == []

    use(folder, stored)
    use(None, lost)


def test_what_is_forgotten_is_gone_with_all_its_rows(tmp_path: Path) -> None:
    write_one(tmp_path)

    async def test(journal: SqliteJobStore) -> None:
        await journal.add(replace(RECORD, completion_id="other"))
        await journal.append("other", 0, OUTPUTS)
        await journal.forget(["cmpl-1", "never there"])
        assert [row.record.completion_id for row in await journal.load()] == ["other"]
        assert await journal.batches("cmpl-1", 0, 10) == []
        assert await journal.batches("other", 0, 10) == [OUTPUTS]
        with pytest.raises(JobStoreError, match="it has no completion 'cmpl-1'"):
            await journal.read_record("cmpl-1")

    use(tmp_path, test)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM ends").fetchall() == [(0,)]


def test_writes_of_a_moment_are_one_transaction_and_the_loop_has_no_part_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[tuple[int, str]] = []
    commit = sys.modules["gptserve.server.jobs.sqlite.store"]._commit  # type: ignore[attr-defined]

    def spy(connection: sqlite3.Connection, statements: list[Any]) -> None:
        commits.append((len(statements), threading.current_thread().name))
        commit(connection, statements)

    async def test(journal: SqliteJobStore) -> None:
        await journal.add(RECORD)
        await asyncio.gather(*(journal.append("cmpl-1", n, OUTPUTS) for n in range(50)))
        assert len(await journal.batches("cmpl-1", 0, 100)) == 50

    monkeypatch.setattr("gptserve.server.jobs.sqlite.store._commit", spy)
    use(tmp_path, test)
    assert commits == [(1, "journal_0"), (50, "journal_0")]


def test_two_journals_in_one_folder_are_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    async def test(journal: SqliteJobStore) -> None:
        await journal.open()
        code = f"""
import asyncio, pathlib
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStoreError
try:
    asyncio.run(SqliteJobStore(pathlib.Path({str(tmp_path)!r})).open())
except JobStoreError as error:
    print(error)
"""
        command = [sys.executable, "-c", code]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert done.stdout.strip().endswith("cannot be used: another server is using it"), done.stderr
        await journal.add(RECORD)

    use(tmp_path, test)
    use(tmp_path, SqliteJobStore.open)


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def overwrite_its_text(file: Path) -> None:
    """Change one digit of an output, which SQLite does not notice."""
    content = file.read_bytes()
    overwrite(file, content.index(b'"token_ids":[5,6]') + len(b'"token_ids":['), b"8")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda file: file.write_bytes(b"no database at all, " * 500), ""),  # the cause is in the words of SQLite
        (lambda file: overwrite(file, 4096, b"\xff" * 3 * 4096), "malformed|damaged"),
        (lambda file: os.truncate(file, 4096 * 2), "malformed|damaged"),
        (overwrite_its_text, "it is damaged: the row of 'cmpl-1' has another checksum"),
        (lambda file: change(file, "UPDATE completions SET seed = 3"), "the row of 'cmpl-1' has another checksum"),
        (lambda file: change(file, "UPDATE ends SET status = 'failed'"), "the row of 'cmpl-1' has another checksum"),
        (lambda file: change(file, "DELETE FROM batches WHERE n = 0"), "it is damaged: 'cmpl-1' lacks batch 0"),
        (
            lambda file: change(file, "PRAGMA user_version = 1"),
            f"its format is version 1, of older servers, and this one reads version {SCHEMA_VERSION}; "
            "move it away to start without it",
        ),
        (
            lambda file: change(file, f"PRAGMA user_version = {SCHEMA_VERSION + 1}"),
            f"its format is version {SCHEMA_VERSION + 1}, of newer servers, and this one reads version",
        ),
        (
            lambda file: change(file, "DELETE FROM completions"),
            "belongs to no completion",
        ),
        (lambda file: change(file, "PRAGMA application_id = 1"), "it is a database of something else"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_with_the_cause(
    tmp_path: Path, damage: Callable[[Path], object], expected: str
) -> None:
    file = write_one(tmp_path)
    damage(file)
    assert any(part in refusal(tmp_path) for part in expected.split("|"))


def test_a_database_without_a_version_is_not_taken_over(tmp_path: Path) -> None:
    change(tmp_path / FILE_NAME, "CREATE TABLE mine (x)")
    assert refusal(tmp_path) == "it is a database of something else"


def test_a_folder_that_is_none_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == "File exists"
    assert refusal(tmp_path / "file" / "below") == "Not a directory"


@contextlib.contextmanager
def no_file_grows_beyond(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_fails_what_was_to_be_written_and_nothing_else(tmp_path: Path) -> None:
    big = tuple(TokenOutput("cmpl-1-0", tuple(range(100_000))) for _ in range(20))

    async def test(journal: SqliteJobStore) -> None:
        await journal.add(RECORD)
        await journal.append("cmpl-1", 0, OUTPUTS)
        with no_file_grows_beyond(2**20), pytest.raises(JobStoreError, match=r"full|I/O"):
            await journal.append("cmpl-1", 1, big)
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS]
        await journal.append("cmpl-1", 1, big)
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS, big]

    use(tmp_path, test)
    use(tmp_path, SqliteJobStore.open)


def test_bytes_in_the_place_of_a_text_are_damage(tmp_path: Path) -> None:
    path = write_one(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE completions SET body = CAST(body AS BLOB)")

    async def test(journal: SqliteJobStore) -> None:
        with pytest.raises(JobStoreError, match="it is damaged"):
            await journal.load()

    use(tmp_path, test)


def test_a_write_that_fails_in_no_foreseen_way_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    async def test(journal: SqliteJobStore) -> None:
        await journal.open()
        with monkeypatch.context() as patch:
            patch.setattr("gptserve.server.jobs.sqlite.store._commit", fail)
            with pytest.raises(JobStoreError):
                await asyncio.wait_for(journal.add(RECORD), 20)
        await journal.add(RECORD)

    use(None, test)


def test_outputs_are_decoded_where_no_write_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, may_go_on = threading.Event(), threading.Event()

    def decode_slowly(text: str) -> tuple[TokenOutput, ...]:
        decoding.set()
        assert may_go_on.wait(60)
        return decode_outputs(text)

    async def test(journal: SqliteJobStore) -> None:
        await journal.add(RECORD)
        await journal.append("cmpl-1", 0, OUTPUTS)
        monkeypatch.setattr("gptserve.server.jobs.sqlite.rows.decode_outputs", decode_slowly)
        reading = asyncio.create_task(journal.batches("cmpl-1", 0, 9))
        await asyncio.to_thread(decoding.wait, 20)
        try:
            await asyncio.wait_for(journal.append("cmpl-1", 1, OUTPUTS), 20)
        finally:
            may_go_on.set()
        assert await reading == [OUTPUTS]

    use(None, test)


def test_what_was_being_written_when_it_closed_is_there_at_the_next_start(tmp_path: Path) -> None:
    async def write(store: SqliteJobStore) -> None:
        await store.add(RECORD)
        writing = asyncio.create_task(store.append("cmpl-1", 0, OUTPUTS))
        await asyncio.sleep(0)
        await store.close()
        await writing

    async def stored(store: SqliteJobStore) -> None:
        assert await store.batches("cmpl-1", 0, 9) == [OUTPUTS]

    use(tmp_path, write)
    use(tmp_path, stored)
