"""The store in PostgreSQL: who may write what, whatever comes between, and what is said when it cannot be used."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import psycopg
import pytest

from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.jobs.postgres.connections import UNAVAILABLE
from gptserve.server.jobs.postgres.schema import SCHEMA_VERSION, STEPS
from gptserve.server.jobs.postgres.store import PostgresJobStore
from gptserve.server.jobs.records import EndStatus
from gptserve.server.jobs.store import JobStoreError, KeyTakenError, LeaseLostError, StoreUnavailableError
from tests.postgres_server import PostgresServer
from tests.server.jobs.test_store import END, OUTPUTS, RECORD

Execute = Callable[[str], list[tuple[object, ...]]]
FINGERPRINTS = {"f"}
KEYLESS = replace(RECORD, key=None)
SILENT = "UPDATE gptserve.replicas SET heartbeat_at = heartbeat_at - interval '1 hour'"


@pytest.fixture
def execute(postgres: PostgresServer, postgres_url: str) -> Execute:
    return lambda statement: postgres.execute(statement, postgres_url)


@pytest.fixture
def with_stores(postgres_url: str) -> Callable[[Callable[[PostgresJobStore, PostgresJobStore], Awaitable[None]]], None]:
    """Run a test with the stores of two servers, which are closed after it."""

    def use(test: Callable[[PostgresJobStore, PostgresJobStore], Awaitable[None]]) -> None:
        async def run() -> None:
            stores = [PostgresJobStore(postgres_url, patience_s=5.0) for _ in range(2)]
            try:
                for store in stores:
                    await store.open()
                await test(*stores)
            finally:
                for store in stores:
                    await store.close()

        asyncio.run(asyncio.wait_for(run(), 60))

    return use


UseStores = Callable[[Callable[[PostgresJobStore, PostgresJobStore], Awaitable[None]]], None]


async def reap(by: PostgresJobStore, execute: Execute) -> None:
    """Let all servers but one be dead for long, and have that one end their memberships."""
    await asyncio.to_thread(execute, SILENT)
    assert await by.sharing.renew(FINGERPRINTS)
    assert await by.sharing.reap() == 1


async def waits_for_lock(execute: Execute, statement: str) -> None:
    """Return when a statement of a client waits for a lock."""
    waiting = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{statement}%'"
    while await asyncio.to_thread(execute, waiting) == [(0,)]:
        pass


def test_what_one_server_has_no_other_writes(with_stores: UseStores) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        await first.append("cmpl-1", 0, OUTPUTS)
        [stored] = await second.load()
        for write in (second.append("cmpl-1", 1, OUTPUTS), second.end("cmpl-1", END), second.add_attempt(stored)):
            with pytest.raises(LeaseLostError, match="another server goes on with the completion"):
                await write
        assert await second.sharing.claim(FINGERPRINTS, 10) == []
        assert await first.sharing.leases(FINGERPRINTS) == ({"cmpl-1": False}, False)
        assert await first.load() == [stored]

    with_stores(test)


def test_a_dead_server_writes_nothing_once_another_may_go_on(with_stores: UseStores, execute: Execute) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        await first.append("cmpl-1", 0, OUTPUTS)
        await reap(second, execute)
        for write in (first.append("cmpl-1", 1, OUTPUTS), first.end("cmpl-1", END)):
            with pytest.raises(LeaseLostError):
                await write
        with pytest.raises(StoreUnavailableError, match="this server was away from the database of stored comp"):
            await first.add(replace(KEYLESS, completion_id="new"))
        assert not await first.sharing.renew(FINGERPRINTS)
        assert await first.sharing.claim(FINGERPRINTS, 10) == []
        assert await second.sharing.claim(FINGERPRINTS, 10) == ["cmpl-1"]
        await second.append("cmpl-1", 1, OUTPUTS[1:])
        await second.end("cmpl-1", END)
        await first.sharing.join()
        assert await first.sharing.leases(FINGERPRINTS) == ({}, False)
        assert await first.batches("cmpl-1", 0, 10) == [OUTPUTS, OUTPUTS[1:]]

    with_stores(test)


def test_an_append_that_waits_while_its_server_is_reaped_writes_nothing(
    with_stores: UseStores, execute: Execute, postgres_url: str
) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        with psycopg.connect(postgres_url) as reaper:
            reaper.execute("DELETE FROM gptserve.replicas WHERE id = (SELECT replica FROM gptserve.leases)")
            appending = asyncio.create_task(first.append("cmpl-1", 0, OUTPUTS))
            await waits_for_lock(execute, "INSERT INTO gptserve.batches")
            reaper.commit()
        with pytest.raises(LeaseLostError):
            await appending
        assert await second.batches("cmpl-1", 0, 10) == []

    with_stores(test)


def test_without_the_fence_that_append_would_be_written(
    with_stores: UseStores, execute: Execute, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test before."""
    module = "gptserve.server.jobs.postgres.statements"
    unfenced = __import__(module, fromlist=["APPEND"]).APPEND.replace("FOR KEY SHARE", "")
    assert unfenced.count("WHERE id = %(me)s") == 1
    monkeypatch.setattr(f"{module}.APPEND", unfenced)

    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        with psycopg.connect(postgres_url) as reaper:
            reaper.execute("DELETE FROM gptserve.replicas WHERE id = (SELECT replica FROM gptserve.leases)")
            await first.append("cmpl-1", 0, OUTPUTS)
            reaper.commit()
        assert await second.sharing.claim(FINGERPRINTS, 1) == ["cmpl-1"]
        assert await second.batches("cmpl-1", 0, 10) == [OUTPUTS], "written after it was reaped"

    with_stores(test)


def test_whoever_writes_now_is_not_reaped(with_stores: UseStores, execute: Execute, postgres_url: str) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        await asyncio.to_thread(execute, SILENT)
        await second.sharing.renew(FINGERPRINTS)
        with psycopg.connect(postgres_url) as writer:
            writer.execute("SELECT id FROM gptserve.replicas r JOIN gptserve.leases ON replica = id FOR KEY SHARE OF r")
            assert await second.sharing.reap() == 0
        assert await second.sharing.reap() == 1

    with_stores(test)


def test_a_key_begins_one_completion_until_that_has_failed(with_stores: UseStores) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        other = replace(RECORD, completion_id="cmpl-2")
        with pytest.raises(KeyTakenError, match="another server begins or has just ended a completion with this Idem"):
            await second.add(other)
        found = await second.sharing.find_by_key("me", "k")
        assert found is not None
        assert found.stored.record.completion_id == "cmpl-1"
        assert await second.sharing.find_by_key(None, "k") is None
        for owner in (None, "", "other"):
            await second.add(replace(RECORD, completion_id=f"cmpl-{owner}", owner=owner))
        await first.end("cmpl-1", replace(END, status="failed", error="{}"))
        assert await second.sharing.find_by_key("me", "k") is None
        await second.add(other)

    with_stores(test)


def test_of_two_that_begin_with_one_key_at_once_one_begins(with_stores: UseStores) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        begun = [store.add(replace(RECORD, completion_id=str(i))) for i, store in enumerate((first, second) * 4)]
        results = await asyncio.gather(*begun, return_exceptions=True)
        assert sum(isinstance(result, KeyTakenError) for result in results) == 7
        assert len(await first.load()) == 1

    with_stores(test)


def test_free_leases_go_to_whoever_claims_first_and_the_oldest_first(with_stores: UseStores) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        for i in range(6):
            await first.add(replace(KEYLESS, completion_id=str(i), created=10 - i, fingerprint="f" if i else "other"))
        await first.sharing.renew({"other"})
        await first.sharing.release(map(str, range(6)))
        assert await second.sharing.claim(FINGERPRINTS, 2) == ["5", "4"]
        claims = await asyncio.gather(*(store.sharing.claim(FINGERPRINTS, 9) for store in (first, second)))
        assert sorted(itertools.chain(*claims)) == ["1", "2", "3"], "a model that was here a moment ago may come back"
        await first.sharing.cancel("0")
        assert (await second.sharing.leases({"another"})).are_some_free
        assert await second.sharing.claim(FINGERPRINTS, 0) == ["0"], "anybody can end it"
        assert (await second.sharing.leases(FINGERPRINTS)).held["0"]

    with_stores(test)


def test_a_model_that_nobody_has_had_for_long_is_claimed_to_be_ended(with_stores: UseStores, execute: Execute) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        await first.sharing.renew(FINGERPRINTS)
        await first.sharing.release(["cmpl-1"])
        assert not (await second.sharing.leases({"g"})).are_some_free
        assert await second.sharing.claim({"g"}, 9) == []
        await asyncio.to_thread(execute, "UPDATE gptserve.fingerprints SET seen_at = seen_at - interval '601 s'")
        assert (await second.sharing.leases({"g"})).are_some_free
        assert await second.sharing.claim({"g"}, 9) == ["cmpl-1"]

    with_stores(test)


def test_whoever_leaves_frees_its_leases_at_once_and_its_attempts_stay(with_stores: UseStores) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        await first.add_attempt((await first.load())[0])
        await first.close()
        assert await second.sharing.claim(FINGERPRINTS, 9) == ["cmpl-1"]
        [shared] = await second.sharing.find(["cmpl-1", "unknown"])
        assert (shared.stored.num_failed_resumes, shared.num_tokens, shared.is_cancelled) == (1, 0, False)
        await second.add_attempt(shared.stored)
        await second.clear_attempts()
        assert [stored.attempts for stored in await second.load()] == [(0,)]

    with_stores(test)


def test_a_write_is_repeated_when_its_answer_is_lost_and_counts_once(with_stores: UseStores, execute: Execute) -> None:
    """Each first use of a connection does its work, and then the connection is cut."""

    def losing(store: PostgresJobStore) -> None:
        for connections in (store._all, store._of_batches):
            use, lost = connections._use, []

            async def lose(call, lent, *, is_repeated, use=use, lost=lost):  # type: ignore[no-untyped-def]
                async def cut(connection, is_repeated):  # type: ignore[no-untyped-def]
                    result = await call(connection, is_repeated)
                    if not is_repeated:
                        lost.append(connection.info.backend_pid)
                        await asyncio.to_thread(execute, f"SELECT pg_terminate_backend({lost[-1]}, 5000)")
                        await connection.execute("SELECT 1")
                    return result

                return await use(cut, lent, is_repeated=is_repeated)

            connections._use = lose  # type: ignore[method-assign]

    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first._all.run(lambda connection, _: connection.execute("SELECT 1"), 5.0)
        losing(first)
        await first.add(RECORD)
        await first.append("cmpl-1", 0, OUTPUTS)
        await first.append("cmpl-1", 1, OUTPUTS[1:])
        await first.end("cmpl-1", END)
        assert await second.batches("cmpl-1", 0, 10) == [OUTPUTS, OUTPUTS[1:]]
        [stored] = await second.load()
        assert stored.end == END
        with pytest.raises(LeaseLostError):  # another end is none that was written
            await first.end("cmpl-1", replace(END, finished_at=0.0))

    with_stores(test)


def test_a_batch_whose_predecessors_are_lost_is_not_written(with_stores: UseStores, execute: Execute) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        for n in range(3):
            await first.append("cmpl-1", n, OUTPUTS)
        await asyncio.to_thread(execute, "DELETE FROM gptserve.batches WHERE n > 0")
        with pytest.raises(LeaseLostError):
            await first.append("cmpl-1", 3, OUTPUTS)
        assert await second.batches("cmpl-1", 0, 10) == [OUTPUTS]

    with_stores(test)


def test_what_clients_wait_for_is_written_at_once_and_with_it_what_would_wait(
    with_stores: UseStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptserve.server.jobs.postgres.store.INTERVAL_S", 3600)
    between = (TokenOutput("r", (1,)),)

    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        for i in "ab":
            await first.add(replace(KEYLESS, completion_id=i))
        await first.append("a", 0, between)
        waiting = asyncio.create_task(first.append("a", 1, between))
        await asyncio.sleep(0)
        await first.append("b", 0, between)  # its first
        await waiting
        waiting = asyncio.create_task(first.append("b", 1, between))
        await asyncio.sleep(0)
        await first.append("a", 2, (replace(between[0], finish_reason=FinishReason.LENGTH),))
        await waiting
        assert await second.batches("b", 0, 9) == [between, between]

    with_stores(test)


def test_one_that_was_deleted_takes_no_batch_and_the_others_do(with_stores: UseStores) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        for i in range(3):
            await first.add(replace(KEYLESS, completion_id=str(i)))
        await second.forget(["1"])
        written = await asyncio.gather(*(first.append(str(i), 0, OUTPUTS) for i in range(3)), return_exceptions=True)
        assert [isinstance(result, LeaseLostError) for result in written] == [False, True, False]

    with_stores(test)


def test_of_many_ends_at_once_each_is_written_as_it_is_but_of_those_that_another_may_end(
    with_stores: UseStores,
) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        errors = [None, '{"code":"x"}', None, '{"code":"cancelled"}']
        statuses: list[EndStatus] = ["completed", "failed", "completed", "cancelled"]
        ends = {
            str(i): replace(END, status=statuses[i], error=errors[i], num_tokens=i, position=None if i else "1")
            for i in range(4)
        }
        for i in ends:
            await first.add(replace(RECORD, completion_id=i, key=i))
        await second.forget(["2"])
        ended = await asyncio.gather(*(first.end(i, end) for i, end in ends.items()), return_exceptions=True)
        assert [isinstance(result, LeaseLostError) for result in ended] == [False, False, True, False]
        stored = {job.record.completion_id: job.end for job in await second.load()}
        assert stored == {i: end for i, end in ends.items() if i != "2"}
        await second.add(replace(RECORD, completion_id="4", key="1"))  # the key of the one that failed
        for i in ("0", "3"):
            with pytest.raises(KeyTakenError):
                await second.add(replace(RECORD, completion_id="5", key=i))

    with_stores(test)


@pytest.mark.slow
def test_a_database_that_is_away_is_told_of_in_time_and_used_again_when_it_is_back(
    with_stores: UseStores, postgres: PostgresServer
) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)
        await asyncio.to_thread(postgres.stop, signal.SIGINT)
        try:
            appending = asyncio.create_task(first.append("cmpl-1", 0, OUTPUTS))
            for use in (
                first.add(replace(KEYLESS, completion_id="2")),
                first.batches("cmpl-1", 0, 1),
                first.sharing.renew([]),
                second.sharing.find(["cmpl-1"]),
            ):
                with pytest.raises(StoreUnavailableError) as raised:
                    await use
                assert raised.value.fields() == {
                    "code": "journal_unavailable",
                    "message": UNAVAILABLE,
                    "param": None,
                    "retry_after_s": 5,
                }
            assert not appending.done()
        finally:
            await asyncio.to_thread(postgres.start)
        await appending
        assert await second.batches("cmpl-1", 0, 1) == [OUTPUTS]

    with_stores(test)


def test_a_database_that_takes_connections_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.server.jobs.postgres.store.LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://someone:secret@127.0.0.1:{silent.getsockname()[1]}/x"

        async def test() -> None:
            store = PostgresJobStore(url)
            with pytest.raises(StoreUnavailableError):
                await store.open()
            await store.close()

        asyncio.run(asyncio.wait_for(test(), 20))


def test_a_statement_that_hangs_is_given_up_though_the_server_lives(
    with_stores: UseStores, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        with psycopg.connect(postgres_url) as other, monkeypatch.context() as patch:
            other.execute("LOCK TABLE gptserve.completions")
            patch.setattr("gptserve.server.jobs.postgres.store.LIMIT_S", 0.2)
            with pytest.raises(StoreUnavailableError):
                await first.read_record("cmpl-1")
        await first.add(RECORD)
        assert await first.read_record("cmpl-1") == RECORD

    with_stores(test)


def test_tables_of_the_first_version_get_what_later_ones_have_beside_their_rows(
    postgres_url: str, with_stores: UseStores, execute: Execute
) -> None:
    execute("; ".join(STEPS[0].split(";")))

    async def add(first: PostgresJobStore, second: PostgresJobStore) -> None:
        await first.add(RECORD)

    tables = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'gptserve'"
    [(num_before,)] = execute(tables)
    assert execute("SELECT version FROM gptserve.meta") == [(1,)]
    with_stores(add)
    assert execute("SELECT version FROM gptserve.meta") == [(SCHEMA_VERSION,)]
    num_added = sum(step.count("CREATE TABLE") for step in STEPS[1:])
    assert num_added > 0
    assert execute(tables) == [(num_before + num_added,)]  # type: ignore[operator]

    async def read(first: PostgresJobStore, second: PostgresJobStore) -> None:
        assert await second.read_record(RECORD.completion_id) == RECORD

    with_stores(read)


def test_tables_of_a_newer_version_are_refused(postgres_url: str, with_stores: UseStores, execute: Execute) -> None:
    async def make(first: PostgresJobStore, second: PostgresJobStore) -> None: ...

    with_stores(make)
    version = SCHEMA_VERSION + 1
    execute(f"UPDATE gptserve.meta SET version = {version}")

    async def test() -> None:
        store = PostgresJobStore(postgres_url)
        with pytest.raises(JobStoreError) as raised:
            await store.open()
        await store.close()
        assert str(raised.value) == (
            f"the journal in PostgreSQL cannot be used: its format is version {version}, of newer servers, and "
            f"this one reads version {SCHEMA_VERSION}; name another database"
        )

    asyncio.run(test())


def test_a_database_that_leaves_bytes_as_they_are_keeps_every_text(postgres: PostgresServer) -> None:
    async def test() -> None:
        store = PostgresJobStore(postgres.empty_database("SQL_ASCII"))
        await store.open()
        record = replace(RECORD, key="schlüssel \N{SNOWMAN}")
        await store.add(record)
        assert await store.read_record("cmpl-1") == record
        await store.close()

    postgres.start()
    asyncio.run(test())


def test_a_database_that_lacks_characters_is_refused(postgres: PostgresServer) -> None:
    async def test() -> None:
        store = PostgresJobStore(postgres.empty_database("LATIN1"))
        with pytest.raises(JobStoreError) as raised:
            await store.open()
        await store.close()
        assert str(raised.value) == (
            "the journal in PostgreSQL cannot be used: its encoding is LATIN1, which lacks characters; name a database "
            "in UTF8"
        )

    postgres.start()
    asyncio.run(test())


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("postgresql://me:secret@host/x?sslmod=1", 'invalid URI query parameter: "sslmod"'),
        ("postgresql://me@host/x?password=its&secret=1", 'invalid URI query parameter: "***"'),
    ],
)
def test_a_url_that_libpq_cannot_read_is_an_error_without_its_password(url: str, cause: str) -> None:
    async def test() -> None:
        store = PostgresJobStore(url)
        with pytest.raises(JobStoreError) as raised:
            await store.open()
        await store.close()
        assert str(raised.value) == f"the journal in PostgreSQL cannot be used: {cause}"

    asyncio.run(test())


def test_a_database_that_only_reads_is_written_to_once_it_may_be_again(
    with_stores: UseStores, postgres: PostgresServer, execute: Execute, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that begin while it only reads would do so for ever."""
    of_database = "ALTER DATABASE {} SET default_transaction_read_only = {}"
    ending = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'gptserve'"

    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        [(name,)] = await asyncio.to_thread(execute, "SELECT current_database()")
        await first.add(RECORD)
        await asyncio.to_thread(execute, f"{of_database.format(name, 'on')}; {ending}")
        appending = asyncio.create_task(first.append("cmpl-1", 0, OUTPUTS))
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                await first.add(KEYLESS)
            assert await first.read_record("cmpl-1") == RECORD
        assert not appending.done()
        await asyncio.to_thread(postgres.execute, of_database.format(name, "off"))
        await appending
        await first.add(replace(KEYLESS, completion_id="2"))
        assert await first.sharing.renew(FINGERPRINTS)

    with_stores(test)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2, "one of new completions and one of outputs, however often they fail"
    assert all("read-only transaction" in message for message in told)


def test_a_server_for_which_a_database_has_one_connection_works_over_that(
    with_stores: UseStores, execute: Execute, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        [(name,)] = await asyncio.to_thread(execute, "SELECT current_database()")
        role = f"CREATE ROLE {name} LOGIN; GRANT ALL ON SCHEMA gptserve TO {name}; ALTER ROLE {name} CONNECTION LIMIT 1"
        await asyncio.to_thread(execute, f"{role}; GRANT ALL ON ALL TABLES IN SCHEMA gptserve TO {name}")
        few = PostgresJobStore(postgres_url.replace("postgres@", f"{name}@"), patience_s=1.0)
        try:
            await few.open()
            records = [replace(KEYLESS, completion_id=str(i)) for i in range(8)]
            await asyncio.gather(*map(few.add, records))
            await asyncio.gather(*(few.append(record.completion_id, 0, OUTPUTS) for record in records))
            assert await few.beside.rows("SELECT 1") == [(1,)]
            assert await few.sharing.renew(FINGERPRINTS)
        finally:
            await few.close()
        assert await second.batches("7", 0, 1) == [OUTPUTS]

    with_stores(test)
    assert any("all goes over one connection" in record.message for record in caplog.records)


def test_what_a_role_has_as_its_defaults_changes_nothing(
    with_stores: UseStores, execute: Execute, postgres_url: str
) -> None:
    [(name,)] = execute("SELECT current_database()")
    for default in (
        "lock_timeout = '1ms'",
        "statement_timeout = '20ms'",
        "default_transaction_isolation = serializable",
    ):
        execute(f"ALTER DATABASE {name} SET {default}")

    async def test(first: PostgresJobStore, second: PostgresJobStore) -> None:
        shown = await first.beside.rows("SELECT current_setting('transaction_isolation')")
        assert shown == [("read committed",)]
        with psycopg.connect(postgres_url) as other:
            other.execute("SET lock_timeout = 0; SET statement_timeout = 0; LOCK TABLE gptserve.completions")
            adding = asyncio.create_task(first.add(RECORD))
            await waits_for_lock(execute, "INSERT INTO gptserve.completions")
            await asyncio.to_thread(other.execute, "SELECT pg_sleep(0.1)")  # longer than either
        await adding

    with_stores(test)
