"""Servers with fake engines that share a database: what runs at one, all find, follow, cancel and go on with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from gptserve.engine.request import TokenOutput
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import BackgroundJob
from gptserve.server.jobs.postgres.membership import Membership
from gptserve.server.jobs.postgres.store import PostgresJobStore
from gptserve.server.jobs.resumption import MAX_ATTEMPTS
from tests.postgres_server import PostgresServer
from tests.server.fake_engine import FakeEngineClient
from tests.server.jobs.server import Server, find, found, run, started

Execute = Callable[[str], list[tuple[object, ...]]]
NUM_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
FIRST_IS_REAPED = "DELETE FROM gptserve.replicas WHERE id IN (SELECT replica FROM gptserve.leases)"


@pytest.fixture
def execute(postgres: PostgresServer, postgres_url: str) -> Execute:
    return lambda statement: postgres.execute(statement, postgres_url)


@contextlib.asynccontextmanager
async def two(url: str, **options: object) -> AsyncIterator[tuple[Server, Server]]:
    """Two servers of one database, each with an engine that makes a token at each step."""
    first, second = (Server(store=PostgresJobStore(url), **options) for _ in range(2))  # type: ignore[arg-type]
    async with started(first), started(second):
        yield first, second


async def computed(server: Server, job: BackgroundJob) -> None:
    """Step an engine until a server knows the end of a completion, which any server may compute."""
    there = await find(server, job)
    while not there.has_ended:
        server.engine.step()
        await asyncio.sleep(0)  # with no regard to how many steps pile up


async def submitted(server: Server, number: int = 1) -> None:
    await asyncio.to_thread(server.engine.wait_for, lambda: len(server.engine.submitted) >= number)


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_a_reader_at_another_server_gets_each_output_and_the_end(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=5)
            there = await find(second, job)
            assert (there.status, there.is_elsewhere, there.running) == ("queued", True, None)
            reader = aiter(second.jobs.reader(there))
            read: list[TokenOutput] = []
            for _ in range(5):
                first.engine.step()
                read += await anext(reader)
            with pytest.raises(StopAsyncIteration):
                await anext(reader)
            assert read == await first.read(job)
            assert there.status == "completed"
            assert await second.text(there) == await first.text(job)
            assert second.engine.submitted == []

    run(test())


def test_what_one_does_not_own_the_other_does_not_find(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(owner="a", key="k", max_tokens=1)
            with pytest.raises(ServiceError, match="does not exist"):
                await second.jobs.find(job.completion_id, "b")
            assert await second.jobs.list_jobs("b", is_operator=False) == []
            [listed] = await second.jobs.list_jobs("a", is_operator=False)
            assert listed.completion_id == job.completion_id
            other = await second.begin(owner="b", key="k", max_tokens=1)
            assert other.completion_id != job.completion_id

    run(test())


def test_one_key_begins_one_completion_at_all_servers(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            begun = await asyncio.gather(*(server.begin(key="k", max_tokens=2) for server in (first, second, first)))
            assert len({job.completion_id for job in begun}) == 1
            engines = first.engine, second.engine
            num_live = sum(len(engine.submitted) - len(engine.aborted) for engine in engines)
            assert num_live == 1, "what lost the race is aborted"
            with pytest.raises(ServiceError, match="Idempotency-Key 'k' was used with another request"):
                await second.begin(key="k", max_tokens=3)

    run(test())


def test_a_server_claims_only_what_it_has_seen_to_be_free(
    postgres_url: str, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptserve.server.jobs.replica.CLAIM_INTERVAL_S", 0.01)
    seen: list[str] = []
    seen_often = asyncio.Event()
    for name, method in (("leases", Membership.leases), ("claim", Membership.claim)):

        async def noted(self: Membership, *args: Any, name: str = name, call: Any = method) -> Any:
            seen.append(name)
            if len(seen) == 20:
                seen_often.set()
            return await call(self, *args)

        monkeypatch.setattr(Membership, name, noted)

    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=2)
            await seen_often.wait()
            assert "claim" not in seen
            await asyncio.to_thread(execute, FIRST_IS_REAPED)
            await submitted(second)
            assert "claim" in seen
            await computed(second, job)

    run(test())


def test_a_server_that_was_taken_for_dead_reads_on_what_another_computes(postgres_url: str, execute: Execute) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=6)
            reading = asyncio.create_task(first.read(job))
            await first.advance(job, 2)
            await asyncio.to_thread(execute, FIRST_IS_REAPED)
            first.engine.step()
            await submitted(second)
            assert (second.engine.submitted[0].generated_token_ids, job.running) == (tuple(b"ab"), None)
            await computed(second, job)
            assert tokens(await reading) == list(b"abcabc")
            assert job.status == "completed"

    run(test())


def test_what_is_suspended_here_goes_on_there_at_once_and_readers_are_told(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=4)
            await first.advance(job, 1)
            reading = asyncio.create_task(first.read(job))
            await asyncio.sleep(0)
            await first.jobs.suspend()
            with pytest.raises(ServiceError, match="the server is shutting down"):
                await reading
            await submitted(second)
            await computed(second, job)
            assert await second.text(await find(second, job)) == "abca"

    run(test())


@pytest.mark.parametrize("is_free", [False, True], ids=["which another computes", "which nobody has"])
def test_any_server_cancels_and_deletes_a_completion(postgres_url: str, execute: Execute, is_free: bool) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=100)
            await first.advance(job, 2)
            if is_free:
                await asyncio.to_thread(execute, FIRST_IS_REAPED)
            there = await find(second, job)
            await second.jobs.cancel(there)
            assert there.status == "cancelled"
            assert (await second.text(there))[:2] == "ab"
            while job.running is not None:
                first.engine.step()
                await asyncio.sleep(0)
            assert (await find(first, job)).status == "cancelled"
            await first.jobs.delete(job)
            assert not await found(second, job)

    run(test())


def test_one_that_is_deleted_elsewhere_ends_its_readers(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=100)
            await first.advance(job, 1)
            reader = aiter(second.jobs.reader(await find(second, job)))
            assert tokens(list(await anext(reader))) == list(b"a")
            reading = asyncio.ensure_future(anext(reader))
            await first.store.forget([job.completion_id])
            with pytest.raises(ServiceError, match="does not exist"):
                await reading
            first.engine.step()
            while job.running is not None:
                await job.wait_for_change()
            assert not await found(first, job)

    run(test())


def other_model() -> FakeEngineClient:
    engine = FakeEngineClient(auto=False)
    engine.info = replace(engine.info, fingerprint="another")
    return engine


def test_another_model_waits_for_servers_of_the_former_one_before_it_ends_its_completions(
    postgres_url: str, execute: Execute
) -> None:
    async def test() -> None:
        first = Server(store=PostgresJobStore(postgres_url))
        async with started(first):
            job = await first.begin(max_tokens=100)
            await first.advance(job, 1)
        other = Server(store=PostgresJobStore(postgres_url), engine=other_model())
        async with started(other):
            assert await other.store.sharing.claim({"another"}, 9) == []  # type: ignore[union-attr]
            assert (await find(other, job)).status == "in_progress"
            await asyncio.to_thread(execute, "UPDATE gptserve.fingerprints SET seen_at = '2000-01-01'")
            there = await find(other, job)
            with pytest.raises(ServiceError, match="another model or computes otherwise"):
                await other.read(there)
            assert (there.status, other.engine.submitted) == ("failed", [])

    run(test())


def test_one_that_may_be_what_kills_servers_fails_at_last(postgres_url: str, execute: Execute) -> None:
    async def test() -> None:
        first = Server(store=PostgresJobStore(postgres_url))
        async with started(first):
            job = await first.begin(max_tokens=100)
        for number in range(MAX_ATTEMPTS):
            server = Server(store=PostgresJobStore(postgres_url))
            async with started(server):
                await submitted(server)
                tried = await asyncio.to_thread(execute, "SELECT count(*) FROM gptserve.attempts")
                assert tried == [(number + 1,)]
        last = Server(store=PostgresJobStore(postgres_url))
        async with started(last):
            with pytest.raises(ServiceError, match="4 servers in a row ended while they computed this completion"):
                await last.read(await find(last, job))
            assert last.engine.submitted == []

    run(test())


def test_the_limits_count_what_other_servers_keep(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url, max_results=2) as (first, second):
            for _ in range(2):
                await first.begin(max_tokens=100)
            await second.jobs.list_jobs(None, is_operator=False)
            with pytest.raises(ServiceError, match="the limit for all owners is 2"):
                await second.begin(max_tokens=1)

    run(test())


def test_an_engine_that_is_dead_takes_nothing(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=3)
            await second.engine.close()
            await first.jobs.suspend()
            await asyncio.sleep(0)
            assert (await second.store.sharing.leases(set())).held == {}  # type: ignore[union-attr]
            third = Server(store=PostgresJobStore(postgres_url))
            async with started(third):
                await submitted(third)
                await computed(third, job)

    run(test())


DAMAGES = {
    "its outputs": "UPDATE gptserve.batches SET outputs = '[{'",
    "an output": "DELETE FROM gptserve.batches WHERE n = 0",
    "its body": "UPDATE gptserve.completions SET body = '[]'",
    "a field": """UPDATE gptserve.completions SET body = replace(body, '"seed"', '"n": 0, "seed"')""",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_one_that_cannot_be_read_fails_and_holds_up_nothing(postgres_url: str, execute: Execute, damage: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            damaged = await first.begin(max_tokens=100)
            await first.advance(damaged, 2)
            await asyncio.to_thread(execute, damage)
            whole = await first.begin(max_tokens=2)
            await first.jobs.suspend()
            there = await find(second, damaged)
            while not there.has_ended:
                await there.wait_for_change()
            assert (there.status, there.error is None) == ("failed", False)
            await computed(second, whole)
            [(num_left,)] = await asyncio.to_thread(execute, "SELECT count(*) FROM gptserve.leases")
            assert num_left == 0, "it has ended in the database, too"
            third = Server(store=PostgresJobStore(postgres_url))
            async with started(third):
                last = await second.begin(max_tokens=100)
                await third.jobs.cancel(await find(third, last))
                while last.running is not None:
                    await last.wait_for_change()
                assert last.status == "cancelled"

    run(test())


def test_a_lease_that_is_locked_keeps_no_membership_from_its_renewal(postgres_url: str) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, second):
            job = await first.begin(max_tokens=100)
            there = await find(second, job)
            with psycopg.connect(postgres_url) as locking:
                locking.execute("SELECT FROM gptserve.leases FOR UPDATE")
                with psycopg.connect(postgres_url, autocommit=True) as connection:
                    cancelling = asyncio.create_task(second.jobs.cancel(there))
                    while connection.execute(NUM_WAITING).fetchone() != (1,):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert await second.store.sharing.renew(["f"])  # type: ignore[union-attr]
                assert not cancelling.done()
            await cancelling

    run(test())


def test_who_cancels_is_told_if_the_end_is_not_stored_soon_and_it_is_later(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with two(postgres_url) as (first, _):
            job = await first.begin(max_tokens=100)
            with psycopg.connect(postgres_url) as locking, monkeypatch.context() as patch:
                locking.execute("SELECT FROM gptserve.leases FOR UPDATE")
                patch.setattr("gptserve.server.jobs.background.END_LIMIT_S", 0.1)
                for end in (first.jobs.cancel, first.jobs.delete):
                    with pytest.raises(ServiceError, match="the completion ends once it does") as raised:
                        await end(job)
                    assert (raised.value.code, raised.value.retry_after_s) == ("journal_unavailable", 5)
            await first.jobs.cancel(job)
            assert job.status == "cancelled"
            assert await find(first, job) is job, "it has ended, and is not deleted"

    run(test())


def test_of_all_completions_only_those_that_may_have_changed_are_looked_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    find_some = Membership.find

    async def noted(self: Membership, completion_ids: Any) -> Any:
        asked.extend(completion_ids)
        return await find_some(self, completion_ids)

    async def test() -> None:
        async with two(postgres_url) as (first, second):
            ended, deleted = [await first.begin(max_tokens=1) for _ in range(2)]
            await first.finish(ended)
            await first.finish(deleted)
            running = await first.begin(max_tokens=100)
            for wanted in ({ended, deleted, running}, {running}):
                asked.clear()
                with monkeypatch.context() as patch:
                    patch.setattr(Membership, "find", noted)
                    listed = await second.jobs.list_jobs(None, is_operator=False)
                assert len(listed) == 3
                assert set(asked) == {job.completion_id for job in wanted}
            await first.jobs.delete(deleted)
            left = [job.completion_id for job in await second.jobs.list_jobs(None, is_operator=False)]
            assert sorted(left) == sorted([ended.completion_id, running.completion_id])

    run(test())


def test_a_list_that_was_read_before_a_completion_was_stored_does_not_lose_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ids = Membership.ids

    async def test() -> None:
        has_read, may_go_on = asyncio.Event(), asyncio.Event()

        async def held(self: Membership) -> list[str]:
            found = await read_ids(self)
            has_read.set()
            await may_go_on.wait()
            return found

        async with two(postgres_url) as (first, _):
            monkeypatch.setattr(Membership, "ids", held)
            with psycopg.connect(postgres_url) as locking:
                locking.execute("LOCK TABLE gptserve.completions IN SHARE MODE")
                beginning = asyncio.create_task(first.begin(max_tokens=1))
                while not first.jobs.counts():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                listing = asyncio.create_task(first.jobs.list_jobs(None, is_operator=False))
                await has_read.wait()
            job = await beginning
            await first.finish(job)
            may_go_on.set()
            assert await listing == [job]
            assert tokens(await first.read(job)) == list(b"a")

    run(test())
