"""Batches in a database that servers share: who has the lease of one writes what is of it, and nobody else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest

from gptserve.server.batches import postgres as sql
from gptserve.server.batches.postgres import PostgresBatchStore
from gptserve.server.batches.store import BatchCancelledError, BatchLostError, BatchStoreError
from gptserve.server.files.postgres import PostgresFileStore
from gptserve.server.files.store import FileStoreError
from gptserve.server.jobs.postgres.statements import REAP
from gptserve.server.jobs.postgres.store import PostgresJobStore
from gptserve.server.jobs.sharing import FORGOTTEN_AFTER_S
from tests.postgres_server import PostgresServer
from tests.server.batches.test_store import FILE, RECORD

WAITS = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
Connection = psycopg.Connection[tuple[Any, ...]]


class Server(NamedTuple):
    """One of two servers of a database."""

    jobs: PostgresJobStore
    files: PostgresFileStore
    batches: PostgresBatchStore

    @property
    def me(self) -> UUID:
        me = self.jobs.sharing.me  # type: ignore[attr-defined]
        assert isinstance(me, UUID)
        return me


UseServers = Callable[[Callable[[Server, Server, Connection], Awaitable[None]]], None]


@pytest.fixture
def use_servers(postgres_url: str) -> UseServers:
    """Run a test with two servers, of which the first has begun a batch, and a connection."""

    def use(test: Callable[[Server, Server, Connection], Awaitable[None]]) -> None:
        async def run() -> None:
            async with AsyncExitStack() as stack:
                servers = []
                for _ in range(2):
                    jobs = PostgresJobStore(postgres_url, lease_ttl_s=3600)
                    stack.push_async_callback(jobs.close)
                    await jobs.open()
                    await jobs.sharing.renew(["f"])
                    servers.append(Server(jobs, PostgresFileStore(jobs.beside), PostgresBatchStore(jobs.beside)))
                await (await servers[0].files.begin("file-1")).keep(FILE)
                await servers[0].batches.add(RECORD, "f")
                with psycopg.connect(postgres_url, autocommit=True) as connection:
                    await test(servers[0], servers[1], connection)

        asyncio.run(asyncio.wait_for(run(), 20))

    return use


async def reap(silent: Server, by: Server, connection: Connection) -> None:
    connection.execute("UPDATE gptserve.replicas SET heartbeat_at = '-infinity' WHERE id = %s", (silent.me,))
    assert await by.jobs.sharing.reap() == 1


def writes_of(server: Server) -> list[Callable[[], Awaitable[object]]]:
    """Return all that a server writes of its batch."""
    batches = server.batches
    return [
        lambda: batches.begin_line("batch_1", 2),
        lambda: batches.add_result("batch_1", 2, "{}", failed=False),
        lambda: batches.put(replace(RECORD, status="in_progress", num_lines=3)),
        lambda: batches.put(replace(RECORD, status="completed")),
    ]


@pytest.mark.parametrize("rejoins", [False, True])
def test_a_server_that_was_reaped_writes_nothing_of_its_batch(use_servers: UseServers, *, rejoins: bool) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        await first.batches.add_result("batch_1", 1, "{}", failed=False)
        output = await first.files.begin("file-2", "batch_1")
        await output.write(b"half of it")
        await reap(first, second, connection)
        if rejoins:
            await first.jobs.sharing.join()
            output = await first.files.begin("file-2", "batch_1")
            await output.write(b"half of it")
        for write in writes_of(first):
            with pytest.raises(BatchLostError, match="another server goes on with the batch"):
                await write()
        with pytest.raises(FileStoreError, match="this server was away"):
            await output.keep(replace(FILE, file_id="file-2"))
        assert await second.batches.hold(["f"], 1) == {"batch_1": False}
        assert await second.batches.results("batch_1") == sql.Results(bytearray(b"\0\1"), 2)
        assert await second.files.load() == [FILE]
        for write in writes_of(second):
            await write()
        assert (await second.batches.find(["batch_1"]))[0].record == replace(RECORD, status="completed")

    use_servers(test)


def test_without_the_fence_a_server_that_was_reaped_writes(
    use_servers: UseServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = "SELECT id FROM gptserve.replicas WHERE id = %(me)s FOR KEY SHARE"  # with the lease
    assert fence in sql.ADD_RESULT
    without = sql.ADD_RESULT.replace(fence, "SELECT %(me)s::uuid AS id").replace("AND l.replica = me.id", "")
    monkeypatch.setattr(sql, "ADD_RESULT", without)

    async def test(first: Server, second: Server, connection: Connection) -> None:
        await reap(first, second, connection)
        assert await second.batches.hold(["f"], 1) == {"batch_1": False}
        await first.batches.add_result("batch_1", 2, "of the dead", failed=False)
        await second.batches.add_result("batch_1", 2, "of who has it", failed=False)
        with await second.batches.read_results("batch_1", failed=False) as results:
            assert await asyncio.to_thread(list, results) == [(2, b"of the dead\n")]

    use_servers(test)


def test_a_free_lease_is_taken_by_one_server_with_the_model(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        assert await first.batches.hold(["f"], 0) == {"batch_1": False}
        assert await second.batches.hold(["f"], 1) == {}, "the first has it"
        await first.batches.release()
        assert await second.batches.hold(["g"], 1) == {}, "another model"
        assert await second.batches.hold(["f"], 0) == {}, "no room"
        both = await asyncio.gather(first.batches.hold(["f"], 1), second.batches.hold(["f"], 1))
        assert sorted(map(len, both)) == [0, 1]
        await first.batches.release()
        await second.batches.release()
        long_ago = "UPDATE gptserve.fingerprints SET seen_at = clock_timestamp() - make_interval(secs => %s)"
        connection.execute(long_ago, (FORGOTTEN_AFTER_S,))
        assert await second.batches.hold(["g"], 1) == {"batch_1": False}, "nobody has had its model for long"

    use_servers(test)


def test_a_batch_is_cancelled_from_elsewhere_or_finalized_whichever_is_first(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        running = replace(RECORD, status="in_progress")
        await first.batches.put(running)
        await second.batches.cancel("batch_1", 7)
        [(seen, *_)] = await second.batches.find(["batch_1"])
        assert seen == replace(running, status="cancelling", times={"cancelling": 7})
        assert await first.batches.hold(["f"], 1) == {"batch_1": True}
        with pytest.raises(BatchCancelledError, match="the batch is to be cancelled"):
            await first.batches.put(replace(RECORD, status="finalizing"))
        await second.batches.cancel("batch_1", 8)
        assert (await second.batches.find(["batch_1"]))[0].record == seen
        await first.batches.put(replace(RECORD, status="cancelling"))
        await first.batches.put(replace(RECORD, status="cancelled"))
        await first.batches.add(replace(RECORD, batch_id="batch_2"), "f")
        done = replace(RECORD, batch_id="batch_2", status="finalizing")
        await first.batches.put(done)
        await second.batches.cancel("batch_2", 9)
        assert (await second.batches.find(["batch_2"]))[0].record == done
        assert await first.batches.hold(["f"], 1) == {"batch_2": False}

    use_servers(test)


def test_the_input_of_a_batch_is_kept_until_it_ends(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        with pytest.raises(FileStoreError, match="file 'file-1' is the input of a batch that has not ended") as raised:
            await second.files.forget("file-1")
        assert (raised.value.code, raised.value.param) == ("file_in_use", "id")
        await first.batches.put(replace(RECORD, status="failed"))
        await second.files.forget("file-1")
        with pytest.raises(BatchStoreError, match="file 'file-1' does not exist") as missing:
            await first.batches.add(replace(RECORD, batch_id="batch_2"), "f")
        assert missing.value.code == "file_not_found"
        assert await first.batches.ids() == {"batch_1"}

    use_servers(test)


def test_a_write_whose_answer_was_lost_is_made_once(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        ended = replace(RECORD, status="completed", num_completed=1)
        for _ in range(2):
            await first.batches.add(RECORD, "f")
            await first.batches.add_result("batch_1", 1, "{}", failed=True)
        [found] = await second.batches.find(["batch_1"])
        assert found == (RECORD, 0, 1, 2)
        for _ in range(2):
            await first.batches.put(ended)

    use_servers(test)


def test_what_was_being_written_for_a_caller_who_has_gone_is_there_before_the_next_record(
    use_servers: UseServers,
) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        adding = asyncio.create_task(first.batches.add_result("batch_1", 1, "{}", failed=False))
        await asyncio.sleep(0)
        adding.cancel()
        await first.batches.put(replace(RECORD, status="finalizing"))
        assert (await first.batches.results("batch_1")).num_completed == 1
        ended = replace(RECORD, status="completed", num_completed=1)
        await first.batches.put(ended)
        with pytest.raises(BatchLostError):
            await first.batches.put(replace(ended, num_completed=2))

    use_servers(test)


@pytest.mark.slow
@pytest.mark.parametrize("status", ["in_progress", "completed"])
def test_a_database_that_crashes_at_once_has_the_record_and_all_before_it(
    use_servers: UseServers, postgres: PostgresServer, postgres_url: str, status: Any
) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        record = replace(RECORD, status=status)
        await first.batches.add_result("batch_1", 1, "{}", failed=False)
        await first.batches.put(record)
        await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
        await asyncio.to_thread(postgres.start)
        assert (await first.batches.results("batch_1")).num_completed == 1
        assert [found.record for found in await second.batches.find(["batch_1"])] == [record]

    use_servers(test)


def test_the_next_server_drops_what_a_dead_one_has_left_of_an_ended_batch(use_servers: UseServers) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        ended = replace(RECORD, status="cancelled", num_completed=1)
        await first.batches.add_result("batch_1", 1, "{}", failed=False)
        await first.batches.begin_line("batch_1", 2)
        await first.batches.put(ended)
        assert (await first.batches.results("batch_1")) == sql.Results(bytearray(b"\0\1"))
        assert await second.batches.load() == [ended]
        assert (await second.batches.results("batch_1")) == sql.Results(bytearray())

    use_servers(test)


@contextmanager
def two(url: str) -> Iterator[tuple[Connection, Connection]]:
    with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as other:
        yield one, other


def until_done_or_waiting(running: Future[int], pid: int, connection: Connection) -> None:
    while not running.done() and connection.execute(WAITS.encode(), (pid,)).fetchone() != (True,):
        pass


FINALIZE = (sql.PUT, {"status": "finalizing", "record": "finalizing"})
END = (sql.END, {"status": "completed", "record": "completed"})
RESULT = (sql.ADD_RESULT, {"n": 1, "failed": False, "result": "{}", "num_bytes": 2})
LINE = (sql.BEGIN_LINE, {"n": 1})
CANCEL = (sql.CANCEL, {"now": 7})
REAPED = (REAP, {})
CLAIM = (sql.CLAIM, {"fingerprints": ["f"], "limit": 9, "forgotten_after_s": FORGOTTEN_AFTER_S})
STATE = """
SELECT r.status, r.cancelled_at, l.replica, coalesce(l.num_completed, -1), ARRAY(SELECT n FROM gptserve.batch_results)
FROM gptserve.batch_records r LEFT JOIN gptserve.batch_leases l ON l.batch_id = r.batch_id
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("earlier", "later", "num_later", "state"),
    [
        (FINALIZE, CANCEL, 0, ("finalizing", None, True, 0, [])),
        (CANCEL, FINALIZE, 0, ("in_progress", 7, True, 0, [])),
        (CANCEL, END, 1, ("completed", 7, None, -1, [])),
        (END, CANCEL, 0, ("completed", None, None, -1, [])),
        (REAPED, FINALIZE, 0, ("in_progress", None, None, 0, [])),
        (REAPED, END, 0, ("in_progress", None, None, 0, [])),
        (REAPED, RESULT, 0, ("in_progress", None, None, 0, [])),
        (REAPED, LINE, 0, ("in_progress", None, None, 0, [])),
        (RESULT, REAPED, 0, ("in_progress", None, True, 1, [1])),
        (END, REAPED, 0, ("completed", None, None, -1, [])),
        (FINALIZE, REAPED, 0, ("finalizing", None, True, 0, [])),
        (RESULT, END, 1, ("completed", None, None, -1, [1])),
        (END, RESULT, 0, ("completed", None, None, -1, [])),
        (END, CLAIM, 0, ("completed", None, None, -1, [])),
    ],
)
def test_of_two_writes_at_once_the_later_sees_the_earlier(
    use_servers: UseServers,
    postgres_url: str,
    earlier: tuple[str, dict[str, Any]],
    later: tuple[str, dict[str, Any]],
    num_later: int,
    state: tuple[Any, ...],
) -> None:
    async def test(first: Server, second: Server, connection: Connection) -> None:
        await first.batches.put(replace(RECORD, status="in_progress"))
        connection.execute("UPDATE gptserve.replicas SET heartbeat_at = '-infinity' WHERE id = %s", (first.me,))

        def execute(by: Connection, write: tuple[str, dict[str, Any]]) -> int:
            values = {"me": second.me if write is CLAIM else first.me, "batch_id": "batch_1", **write[1]}
            return by.execute(write[0].encode(), values).rowcount

        with two(postgres_url) as (one, other), ThreadPoolExecutor(1) as thread:
            with one.transaction():
                assert execute(one, earlier) == 1
                running: Future[int] = thread.submit(execute, other, later)
                await asyncio.to_thread(until_done_or_waiting, running, other.info.backend_pid, connection)
            assert await asyncio.wrap_future(running) == num_later
        found = connection.execute(STATE.encode()).fetchone()
        assert found is not None
        assert (*found[:2], found[2] and found[2] == first.me, *found[3:]) == state

    use_servers(test)
