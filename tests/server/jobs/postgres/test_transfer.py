"""Completions that move between a folder and a database: all of them, or none and a reason."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.server.files.files import PIECE_BYTES
from gptserve.server.jobs.postgres.schema import SCHEMA_VERSION
from gptserve.server.jobs.postgres.store import PostgresJobStore
from gptserve.server.jobs.postgres.transfer import PAGE
from gptserve.server.jobs.records import EndStatus
from gptserve.server.jobs.sqlite.database import FILE_NAME
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStore, JobStoreError
from gptserve.server.stores import export_folder, import_folder, make_stores
from tests.postgres_server import PostgresServer
from tests.server.app_options import app_settings
from tests.server.batches.test_store import FILE
from tests.server.batches.test_store import RECORD as BATCH
from tests.server.jobs.test_store import END, OUTPUTS, RECORD

NUM_BATCHES = 2 * PAGE + 1
COMPLETED, FAILED, RETRIED, RUNNING, QUEUED = (
    replace(RECORD, completion_id=name, key=key, created=created)
    for created, (name, key) in enumerate(
        {"completed": "a", "failed": "b", "retried": "b", "running": "c", "queued": None}.items()
    )
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a completion of each kind."""
    folder = tmp_path / "from"
    asyncio.run(fill(SqliteJobStore(folder)))
    return folder


async def fill(store: JobStore) -> None:
    statuses: dict[str, EndStatus] = {"completed": "completed", "failed": "failed", "retried": "cancelled"}
    for record in (COMPLETED, FAILED, RETRIED, RUNNING, QUEUED):
        await store.add(record)
        if record is QUEUED:
            break
        for n in range(NUM_BATCHES if record is RUNNING else 1):
            await store.append(record.completion_id, n, OUTPUTS[n % 2 :])
        if record.completion_id in statuses:
            error = None if record is COMPLETED else '{"code":"é"}'
            await store.end(record.completion_id, replace(END, status=statuses[record.completion_id], error=error))
    for num_batches in (0, 3, 3):
        stored = {stored.record.completion_id: stored for stored in await store.load()}["running"]
        await store.add_attempt(stored._replace(num_batches=num_batches))
    await store.close()


async def read(store: JobStore) -> list[Any]:
    """Return all that a store has."""
    found: list[Any] = []
    for stored in await store.load():
        completion_id = stored.record.completion_id
        batches = await store.batches(completion_id, 0, 2 * NUM_BATCHES)
        found.append((stored, await store.read_record(completion_id), batches))
    await store.close()
    return found


def test_all_completions_are_in_the_database_and_then_in_another_folder_as_they_were(
    folder: Path, postgres_url: str, tmp_path: Path
) -> None:
    async def test() -> None:
        assert await import_folder(folder, postgres_url) == (5, 2)
        there = await read(PostgresJobStore(postgres_url))
        assert await export_folder(postgres_url, tmp_path / "to") == (5, 2)
        back, kept = await read(SqliteJobStore(tmp_path / "to")), await read(SqliteJobStore(folder))
        assert there == back == kept
        assert len(there[3][2]) == NUM_BATCHES

    asyncio.run(test())
    assert (tmp_path / "to").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "to" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (tmp_path / "to").iterdir()} == {FILE_NAME, "files", "batches"}


def test_the_servers_of_the_database_find_keys_and_go_on_with_what_has_not_ended(
    folder: Path, postgres_url: str
) -> None:
    async def test() -> None:
        await import_folder(folder, postgres_url)
        store = PostgresJobStore(postgres_url)
        await store.open()
        keys = {key: await store.sharing.find_by_key("me", key) for key in ("a", "b", "c")}
        found = {key: job.stored.record.completion_id for key, job in keys.items() if job}
        assert found == {"a": "completed", "b": "retried", "c": "running"}
        assert await store.sharing.claim({"another"}, 9) == []  # whoever has the model has time to come
        assert await store.sharing.claim({RECORD.fingerprint}, 9) == ["running", "queued"]
        await store.append("running", NUM_BATCHES, OUTPUTS)
        await store.close()

    asyncio.run(test())


def test_one_that_was_to_be_cancelled_is_cancelled_in_the_folder(postgres_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        store = PostgresJobStore(postgres_url)
        await store.open()
        await store.add(RECORD)
        await store.append(RECORD.completion_id, 0, OUTPUTS)
        await store.sharing.cancel(RECORD.completion_id)
        await store.close()
        assert await export_folder(postgres_url, tmp_path / "to") == (1, 0)
        [(stored, _, _)] = await read(SqliteJobStore(tmp_path / "to"))
        assert stored.end.status == "cancelled"
        assert "the completion was cancelled" in stored.end.error
        assert (stored.end.num_batches, stored.end.num_tokens) == (1, 3)

    asyncio.run(test())


def in_use(folder: Path, url: str) -> list[JobStore]:
    return [PostgresJobStore(url), SqliteJobStore(folder)]


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, "servers are using the database: 1; end them first"),
        (1, "the journal {folder}/gptserve.sqlite3 cannot be used: another server is using it"),
    ],
)
def test_nothing_moves_while_a_server_runs(folder: Path, postgres_url: str, which: int, message: str) -> None:
    async def test() -> None:
        server = in_use(folder, postgres_url)[which]
        await server.open()
        with pytest.raises(JobStoreError) as raised:
            await import_folder(folder, postgres_url)
        await server.close()
        assert str(raised.value) == message.format(folder=folder)
        assert await import_folder(folder, postgres_url) == (5, 2)

    asyncio.run(test())


def test_nothing_is_exported_while_a_server_runs_but_of_a_silent_one(postgres_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        server = PostgresJobStore(postgres_url, lease_ttl_s=3600)
        await server.open()
        await server.add(RECORD)
        with pytest.raises(JobStoreError, match=r"^servers are using the database: 1; end them first$"):
            await export_folder(postgres_url, tmp_path / "to")
        assert list((tmp_path / "to").iterdir()) == []
        await asyncio.to_thread(PostgresServer.execute_at, postgres_url, "UPDATE gptserve.replicas SET ttl_s = 0")
        assert await export_folder(postgres_url, tmp_path / "to") == (1, 1)
        with pytest.raises(JobStoreError):  # it was alive all the same, and is told
            await server.append(RECORD.completion_id, 0, OUTPUTS)
        await server.close()

    asyncio.run(test())


def test_neither_side_is_written_over(folder: Path, postgres_url: str) -> None:
    async def test() -> None:
        await import_folder(folder, postgres_url)
        with pytest.raises(
            JobStoreError, match=r"^the database has completions, files or batches already; name an empty one$"
        ):
            await import_folder(folder, postgres_url)
        with pytest.raises(JobStoreError) as raised:
            await export_folder(postgres_url, folder)
        assert str(raised.value) == f"{folder} has a journal already; name another folder"

    asyncio.run(test())


def test_a_folder_without_a_journal_is_none_to_import_from(postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises(JobStoreError) as raised:
        asyncio.run(import_folder(tmp_path / "none", postgres_url))
    assert str(raised.value) == f"{tmp_path / 'none'} has no journal"
    assert not (tmp_path / "none").exists()


def newer(folder: Path, url: str) -> str:
    PostgresServer.execute_at(url, "UPDATE gptserve.meta SET version = 99")
    return (
        "the journal in PostgreSQL cannot be used: its format is version 99, of newer servers, and this one reads "
        f"version {SCHEMA_VERSION}; name another database"
    )


def older_folder(folder: Path, url: str) -> str:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("PRAGMA user_version = 1")
    return (
        f"the journal {folder / FILE_NAME} cannot be used: its format is version 1, of older servers, and this one "
        "reads version 2; move it away to start without it"
    )


def damaged(folder: Path, url: str) -> str:
    with closing(sqlite3.connect(folder / FILE_NAME, isolation_level=None)) as connection:
        connection.execute("UPDATE batches SET outputs = '[]' WHERE completion_id = 'running' AND n = 70")
    return f"the journal {folder / FILE_NAME} cannot be used: it is damaged: the row of 'running' has another checksum"


@pytest.mark.parametrize("broken", [newer, older_folder, damaged])
def test_of_what_cannot_be_read_nothing_is_moved(
    folder: Path, postgres_url: str, broken: Callable[[Path, str], str]
) -> None:
    async def test() -> None:
        store = PostgresJobStore(postgres_url)
        await store.open()
        await store.close()
        message = broken(folder, postgres_url)
        with pytest.raises(JobStoreError) as raised:
            await import_folder(folder, postgres_url)
        assert str(raised.value) == message

    asyncio.run(test())
    assert PostgresServer.execute_at(postgres_url, "SELECT count(*) FROM gptserve.completions") == [(0,)]


def test_files_and_batches_move_there_and_back(folder: Path, postgres_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        data = b"x" * (2 * PIECE_BYTES + 1)
        files = [replace(FILE, file_id="file-0", num_bytes=0), replace(FILE, num_bytes=len(data), expires_at=9)]
        ended = replace(BATCH, batch_id="batch_0", status="completed", times={"completed": 5}, output_file_id="file-0")
        running = replace(BATCH, status="in_progress", num_lines=50)
        _, of_files, of_batches = make_stores(app_settings(state_dir=folder))
        for record, content in zip(files, (b"", data), strict=True):
            new = await of_files.begin(record.file_id)
            await new.write(content)
            await new.keep(record)
        for batch in (ended, running):
            await of_batches.add(batch, "f")
        for n in range(1, 40):
            await of_batches.add_result("batch_1", n, f'{{"n":{n}}}', failed=n % 4 == 3)
        for n in (41, 42, 42):
            await of_batches.begin_line("batch_1", n)
        before = await of_batches.results("batch_1")
        await of_files.close()
        await of_batches.close()

        assert await import_folder(folder, postgres_url) == (5, 2)
        with pytest.raises(JobStoreError, match="the database has completions, files or batches already"):
            await import_folder(folder, postgres_url)
        assert await export_folder(postgres_url, tmp_path / "to") == (5, 2)

        for settings in (app_settings(state_dir=tmp_path / "to"), app_settings(state_url=postgres_url)):
            jobs, of_files, of_batches = make_stores(settings)
            await jobs.open()
            assert await of_files.load() == files
            with await of_files.open("file-1") as file:
                assert await asyncio.to_thread(file.read) == data
            assert await of_batches.load() == [ended, running]
            found = await of_batches.results("batch_1")
            assert (found.state, found.begun) == (before.state, before.begun)
            with await of_batches.read_results("batch_1", failed=True) as lines:
                assert await asyncio.to_thread(list, lines) == [(n, b'{"n":%d}\n' % n) for n in range(3, 40, 4)]
            if of_batches.sharing is not None:
                [found_running] = await of_batches.sharing.find(["batch_1"])
                assert found_running[:3] == (running, 29, 10)
                assert await of_batches.sharing.hold([], 1) == {"batch_1": False}, "whoever comes goes on with it"
            for store in (jobs, of_files, of_batches):
                await store.close()

    asyncio.run(test())
