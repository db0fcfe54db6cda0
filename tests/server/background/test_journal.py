"""The journal: what was written is read back as it was, or there is a sentence that says why not."""

from __future__ import annotations

import asyncio
import contextlib
import math
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

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.server.background.database import FILE_NAME, SCHEMA_VERSION
from gptserve.server.background.journal import Journal, JournalError
from gptserve.server.background.records import (
    CompletionRecord,
    EndRecord,
    IndexRow,
    decode_outputs,
    encode_outputs,
)
from gptserve.server.core.settings import StateSync

RECORD = CompletionRecord(
    completion_id="cmpl-1",
    kind="text_completion",
    created=1_700_000_000,
    model="m",
    fingerprint="f",
    batch_invariant=True,
    seed=2**63 - 1,
    owner="me",
    tokenizer="t",
    body='{"prompt":"é\\u2028"}',
    prompts=((1, 2, 3), (), (4,)),
    max_tokens=7,
    deadline=1_700_000_000.123456789,
    key="k",
    digest="d",
)
STRIPPED = replace(RECORD, body="", prompts=())
END = EndRecord("completed", None, 1_700_000_001.5, 2, 8, "5.0.1")
OUTPUTS = (
    TokenOutput(
        "cmpl-1-0",
        (5, 6),
        logprobs=(TokenLogprobs(5, -0.1, 1, ((5, -0.1), (7, -math.inf))), TokenLogprobs(6, -1 / 3, 7)),
        prompt_logprobs=(None, TokenLogprobs(2, -1e-300, 3)),
        finish_reason=FinishReason.STOP,
        stop_token_id=0,
        num_cached_tokens=16,
        error="é",
    ),
    TokenOutput("cmpl-1-1", ()),
    TokenOutput("cmpl-1-2", (0,), finish_reason=FinishReason.TIMEOUT),
)


def use(folder: Path | None, test: Callable[[Journal], Awaitable[None]], sync: StateSync = "normal") -> None:
    """Run a test with a journal that is closed after it."""

    async def run() -> None:
        journal = Journal(folder, sync)
        try:
            await test(journal)
        finally:
            await journal.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def write_one(folder: Path) -> Path:
    """Make a journal with one completion that ended; return its file."""

    async def write(journal: Journal) -> None:
        await journal.add(RECORD)
        for n in range(END.num_batches):
            await journal.append("cmpl-1", n, OUTPUTS)
        await journal.end("cmpl-1", END)

    use(folder, write)
    return folder / FILE_NAME


def refusal(folder: Path) -> str:
    """Return why a journal cannot be opened and read."""

    async def read(journal: Journal) -> None:
        await journal.open()
        await journal.load()
        await journal.batches("cmpl-1", 0, 10)

    with pytest.raises(JournalError) as raised:
        use(folder, read)
    message = str(raised.value)
    assert message.startswith(f"the journal {folder / FILE_NAME} cannot be used: ")
    return message.partition("used: ")[2]


def change(file: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement)


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_was_written_is_read_back_as_it_was(tmp_path: Path, in_memory: bool) -> None:
    async def test(journal: Journal) -> None:
        size = await journal.add(RECORD) + await journal.append("cmpl-1", 0, OUTPUTS)
        assert await journal.read_record("cmpl-1") == RECORD
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS]
        assert await journal.load() == [IndexRow(STRIPPED, 4, size, num_batches=1)]
        await journal.add_attempt((await journal.load())[0])
        size += await journal.append("cmpl-1", 1, OUTPUTS[1:]) + await journal.append("cmpl-1", 2, OUTPUTS[2:])
        await journal.end("cmpl-1", END)
        assert await journal.batches("cmpl-1", 1, 1) == [OUTPUTS[1:]]
        assert await journal.batches("cmpl-1", 1, 10) == [OUTPUTS[1:], OUTPUTS[2:]]
        assert await journal.batches("cmpl-1", 3, 10) == []
        assert await journal.load() == [IndexRow(STRIPPED, 4, size, num_batches=3, attempts=(1,), end=END)]

    use(None if in_memory else tmp_path, test)


def test_a_folder_keeps_it_and_memory_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    file = write_one(folder)
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)

    async def stored(journal: Journal) -> None:
        assert journal.is_durable
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS, OUTPUTS]

    async def lost(journal: Journal) -> None:
        assert not journal.is_durable
        assert await journal.load() == []

    use(folder, stored)
    use(None, lost)


def test_floats_come_back_bit_for_bit() -> None:
    values = [-0.1, -1 / 3, -5e-324, -1.7976931348623157e308, -math.inf, 0.0]
    outputs = (TokenOutput("a", (1,) * len(values), tuple(TokenLogprobs(1, value, 1) for value in values)),)
    assert [entry.logprob.hex() for entry in decode_outputs(encode_outputs(outputs))[0].logprobs] == [
        value.hex() for value in values
    ]


@pytest.mark.parametrize("text", ["{}1", "[1]", '[{"token_ids": 1}]', '[{"request_id": "a", "token_ids": [], "x": 1}]'])
def test_what_are_no_outputs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_outputs(text)


def test_those_that_ended_come_first_in_the_order_of_their_ends(tmp_path: Path) -> None:
    async def test(journal: Journal) -> None:
        for i in range(4):
            await journal.add(replace(RECORD, completion_id=str(i), created=i))
        await journal.end("3", replace(END, finished_at=10.0))
        await journal.end("0", replace(END, finished_at=20.0))
        assert [row.record.completion_id for row in await journal.load()] == ["3", "0", "1", "2"]

    use(tmp_path, test)


def test_what_is_forgotten_is_gone_with_all_its_rows(tmp_path: Path) -> None:
    write_one(tmp_path)

    async def test(journal: Journal) -> None:
        await journal.add(replace(RECORD, completion_id="other"))
        await journal.append("other", 0, OUTPUTS)
        await journal.forget(["cmpl-1", "never there"])
        assert [row.record.completion_id for row in await journal.load()] == ["other"]
        assert await journal.batches("cmpl-1", 0, 10) == []
        assert await journal.batches("other", 0, 10) == [OUTPUTS]
        with pytest.raises(JournalError, match="it has no completion 'cmpl-1'"):
            await journal.read_record("cmpl-1")

    use(tmp_path, test)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM ends").fetchall() == [(0,)]


def test_writes_of_a_moment_are_one_transaction_and_the_loop_has_no_part_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[tuple[int, str]] = []
    commit = sys.modules["gptserve.server.background.journal"]._commit  # type: ignore[attr-defined]

    def spy(connection: sqlite3.Connection, statements: list[Any]) -> None:
        commits.append((len(statements), threading.current_thread().name))
        commit(connection, statements)

    async def test(journal: Journal) -> None:
        await journal.add(RECORD)
        await asyncio.gather(*(journal.append("cmpl-1", n, OUTPUTS) for n in range(50)))
        assert len(await journal.batches("cmpl-1", 0, 100)) == 50

    monkeypatch.setattr("gptserve.server.background.journal._commit", spy)
    use(tmp_path, test)
    assert commits == [(1, "journal_0"), (50, "journal_0")]


def test_two_journals_in_one_folder_are_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    async def test(journal: Journal) -> None:
        await journal.open()
        code = f"""
import asyncio, pathlib
from gptserve.server.background.journal import Journal, JournalError
try:
    asyncio.run(Journal(pathlib.Path({str(tmp_path)!r})).open())
except JournalError as error:
    print(error)
"""
        command = [sys.executable, "-c", code]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert done.stdout.strip().endswith("cannot be used: another server is using it"), done.stderr
        await journal.add(RECORD)

    use(tmp_path, test)
    use(tmp_path, Journal.open)


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
        (lambda file: file.write_bytes(b"no database at all, " * 500), "file is not a database"),
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


def test_a_full_disk_fails_what_was_to_be_written_and_nothing_else(tmp_path: Path) -> None:
    big = tuple(TokenOutput("cmpl-1-0", tuple(range(100_000))) for _ in range(20))

    async def test(journal: Journal) -> None:
        await journal.add(RECORD)
        await journal.append("cmpl-1", 0, OUTPUTS)
        with no_file_grows_beyond(2**20), pytest.raises(JournalError, match=r"full|I/O"):
            await journal.append("cmpl-1", 1, big)
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS]
        await journal.append("cmpl-1", 1, big)
        assert await journal.batches("cmpl-1", 0, 10) == [OUTPUTS, big]

    use(tmp_path, test)
    use(tmp_path, Journal.open)


def test_bytes_in_the_place_of_a_text_are_damage(tmp_path: Path) -> None:
    path = write_one(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE completions SET body = CAST(body AS BLOB)")

    async def test(journal: Journal) -> None:
        with pytest.raises(JournalError, match="it is damaged"):
            await journal.load()

    use(tmp_path, test)


def test_a_write_that_fails_in_no_foreseen_way_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    async def test(journal: Journal) -> None:
        await journal.open()
        with monkeypatch.context() as patch:
            patch.setattr("gptserve.server.background.journal._commit", fail)
            with pytest.raises(JournalError):
                await asyncio.wait_for(journal.add(RECORD), 20)
        await journal.add(RECORD)

    use(None, test)


def test_outputs_are_decoded_where_no_write_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, may_go_on = threading.Event(), threading.Event()

    def decode_slowly(text: str) -> tuple[TokenOutput, ...]:
        decoding.set()
        assert may_go_on.wait(60)
        return decode_outputs(text)

    async def test(journal: Journal) -> None:
        await journal.add(RECORD)
        await journal.append("cmpl-1", 0, OUTPUTS)
        monkeypatch.setattr("gptserve.server.background.records.decode_outputs", decode_slowly)
        reading = asyncio.create_task(journal.batches("cmpl-1", 0, 9))
        await asyncio.to_thread(decoding.wait, 20)
        try:
            await asyncio.wait_for(journal.append("cmpl-1", 1, OUTPUTS), 20)
        finally:
            may_go_on.set()
        assert await reading == [OUTPUTS]

    use(None, test)


def test_a_closed_journal_is_closed_again_in_peace_and_says_what_it_is() -> None:
    async def test(journal: Journal) -> None:
        await journal.add(RECORD)
        await journal.close()
        with pytest.raises(JournalError, match="closed"):
            await journal.read_record("cmpl-1")

    use(None, test)


def test_closing_waits_for_what_is_being_written(tmp_path: Path) -> None:
    async def test(journal: Journal) -> None:
        await journal.add(RECORD)
        writing = asyncio.create_task(journal.append("cmpl-1", 0, OUTPUTS))
        await asyncio.sleep(0)
        await journal.close()
        await writing
        with pytest.raises(JournalError, match="after shutdown"):
            await journal.append("cmpl-1", 1, OUTPUTS)

    async def run() -> None:
        await test(Journal(tmp_path))

    async def stored(journal: Journal) -> None:
        assert await journal.batches("cmpl-1", 0, 9) == [OUTPUTS]

    asyncio.run(asyncio.wait_for(run(), 20))
    use(tmp_path, stored)
