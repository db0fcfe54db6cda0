"""The journal's database: lost commits are noticed, deleted rows take no space, and `full` syncs every commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gptserve.engine.request import TokenOutput
from gptserve.server.core.settings import StateSync
from gptserve.server.jobs.sqlite.database import FILE_NAME
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from tests.server.jobs.sqlite.test_store import overwrite, use
from tests.server.jobs.test_store import END, OUTPUTS, RECORD

WAL = f"{FILE_NAME}-wal"


def killed(folder: Path) -> Path:
    """Return the folder of a server that was killed: five completions, each begun and ended in commits of their own."""
    live, dead = folder / "live", folder / "dead"

    async def write(journal: SqliteJobStore) -> None:
        for i in range(5):
            await journal.add(replace(RECORD, completion_id=str(i)))
            await journal.append(str(i), 0, OUTPUTS)
            await journal.end(str(i), END)
        shutil.copytree(live, dead)

    use(live, write)
    return dead


def num_ended(folder: Path) -> int:
    ended: list[bool] = []

    async def load(journal: SqliteJobStore) -> None:
        ended.extend(row.end is not None for row in await journal.load())

    use(folder, load)
    return sum(ended)


def flip(file: Path, offset: int) -> None:
    content = file.read_bytes()
    overwrite(file, offset, bytes([content[offset] ^ 1]))


def empty_wal(folder: Path) -> None:
    os.truncate(folder / WAL, 0)


def remove_wal(folder: Path) -> None:
    (folder / WAL).unlink()


def flip_in_frame(folder: Path) -> None:
    flip(folder / WAL, (folder / WAL).stat().st_size // 2)


def flip_in_head(folder: Path) -> None:
    flip(folder / WAL, 17)


def flip_in_first_frame(folder: Path) -> None:
    flip(folder / WAL, 32 + 24 + 100)


@pytest.mark.parametrize("damage", [empty_wal, remove_wal, flip_in_frame, flip_in_head, flip_in_first_frame])
def test_a_log_that_lost_commits_is_noticed_and_what_is_left_is_read(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = killed(tmp_path)
    damage(folder)
    assert num_ended(folder) < 5
    [warning] = [record.message for record in caplog.records]
    assert warning == (
        f"the journal has lost its last commits: {WAL} is missing, cut or damaged, as after a power cut; the "
        "completions in them are unknown, or are computed again"
    )
    caplog.clear()
    assert num_ended(folder) < 5
    assert not caplog.records, "it is said once"


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_log_that_lost_nothing_is_no_news(tmp_path: Path, was_killed: bool, caplog: pytest.LogCaptureFixture) -> None:
    dead = killed(tmp_path)
    assert num_ended(dead if was_killed else tmp_path / "live") == 5
    assert not caplog.records


def test_a_commit_that_was_never_whole_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = killed(tmp_path)
    with (folder / WAL).open("rb") as file:
        head, frame = file.read(32), file.read(24 + 4096)
    with (folder / WAL).open("ab") as file:
        file.write(frame[:4] + bytes(4) + head[16:24] + frame[16:])  # it ends no commit
    assert num_ended(folder) == 5
    assert not caplog.records


def test_what_is_forgotten_takes_no_space_on_the_disk(tmp_path: Path) -> None:
    big = tuple(TokenOutput("0-0", tuple(range(100_000))) for _ in range(10))
    sizes: list[int] = []

    def measure() -> None:
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))

    async def test(journal: SqliteJobStore) -> None:
        await journal.add(replace(RECORD, completion_id="0"))
        await journal.add(RECORD)
        measure()
        await journal.append("0", 0, big)
        measure()
        await journal.forget(["0"])
        await journal.append("cmpl-1", 0, OUTPUTS)  # begins the log anew, which cuts its file
        measure()
        assert await journal.batches("cmpl-1", 0, 9) == [OUTPUTS]

    use(tmp_path, test)
    before, full, after = sizes
    assert full - before > 5_000_000
    assert after - before < 4.5 * 2**20, "the log keeps some room"
    assert (tmp_path / FILE_NAME).stat().st_size < 100_000


@pytest.mark.parametrize(("sync", "level"), [("normal", 1), ("full", 2)])
def test_the_promise_to_a_power_cut_is_sqlites(tmp_path: Path, sync: StateSync, level: int) -> None:
    async def test(journal: SqliteJobStore) -> None:
        levels = await journal._run(lambda connection: connection.execute("PRAGMA synchronous").fetchall())
        assert levels == [(level,)]

    use(tmp_path, test, sync)
