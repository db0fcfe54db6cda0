"""The index of background jobs: how long results live, who keeps a key, what an unusable journal costs."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gptserve.engine.errors import InvalidRequestError, QueueFullError
from gptserve.engine.request import TokenOutput
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.core.error_responses import status_of
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import BackgroundRequest
from gptserve.server.jobs.sqlite.database import FILE_NAME
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStoreError
from tests.server.jobs.memory_store import MemoryJobStore
from tests.server.jobs.server import Clock, Server, find, found, run, started


@pytest.mark.parametrize("durable", [True, False])
def test_a_result_lives_for_its_time_after_its_end(tmp_path: Path, durable: bool) -> None:
    async def test() -> None:
        async with started(Server(tmp_path if durable else None, result_ttl_s=60.0)) as server:
            job = await server.begin("key", max_tokens=1)
            server.clock.now += 1000.0
            assert await found(server, job), "its time begins with its end"
            await server.finish(job)
            server.clock.now += 59.9
            assert await found(server, job)
            assert await server.begin("key", max_tokens=1) is job
            server.clock.now += 0.2
            assert not await found(server, job)
            server.jobs.expire()
            await server.jobs.settle()
            assert await server.store.batches(job.completion_id, 0, 1) == []
            assert await server.begin("key", max_tokens=1) is not job, "its key is free again"
            assert server.jobs.counts() == {"queued": 1}

    run(test())


def test_a_result_whose_time_ended_while_the_server_was_down_is_gone(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with started(Server(tmp_path, clock=clock, result_ttl_s=60.0)) as server:
            early = await server.begin(max_tokens=1)
            await server.finish(early)
            clock.now += 30.0
            late = await server.begin(max_tokens=1)
            await server.finish(late)
        clock.now += 31.0
        async with started(Server(tmp_path, clock=clock, result_ttl_s=60.0)) as server:
            assert [await found(server, job) for job in (early, late)] == [False, True]

    run(test())


def test_the_first_to_have_ended_makes_room_and_what_is_under_way_never_does() -> None:
    async def test() -> None:
        async with started(Server(max_results=3)) as server:
            endless = await server.begin(max_tokens=100)
            second, third = await server.begin(max_tokens=2), await server.begin(max_tokens=1)
            for ending in (third, second):
                server.engine.step()
                await server.read(ending)
            fourth = await server.begin(max_tokens=100)
            assert [await found(server, job) for job in (endless, second, third, fourth)] == [True, True, False, True]
            fifth = await server.begin(max_tokens=100)
            assert [await found(server, job) for job in (endless, second, fourth, fifth)] == [True, False, True, True]
            with pytest.raises(ServiceError) as refused:
                await server.begin()
            assert (status_of(refused.value), refused.value.code) == (429, "too_many_kept")
            rejections = 'gptserve_admission_rejections_total{code="too_many_kept",model_name="m"} 1.0'
            assert rejections in server.service.metrics.render().decode()
            assert len(server.engine.live_ids) == 3
            assert sum(server.jobs.counts().values()) == 3

    run(test())


def test_a_request_that_is_refused_costs_nobody_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with started(Server(tmp_path, max_results=1)) as server:
            job = await server.begin(max_tokens=1)
            await server.finish(job)
            with pytest.raises(InvalidRequestError):
                await server.begin(max_tokens=1000)
            server.engine.max_requests = 0
            with pytest.raises(QueueFullError):
                await server.begin()
            server.engine.max_requests = 9
            with monkeypatch.context() as patch:
                patch.setattr(SqliteJobStore, "add", AsyncMock(side_effect=JobStoreError("the disk is full")))
                with pytest.raises(JobStoreError):
                    await server.begin()
            assert await server.text(job) == "a"

    run(test())


def test_whoever_waits_for_a_completion_that_cannot_be_journaled_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with started(Server()) as server:
            reached, hold = asyncio.Event(), asyncio.Event()

            async def add_late(*_: Any) -> int:
                reached.set()
                await hold.wait()
                raise JobStoreError("the disk is full")

            monkeypatch.setattr(SqliteJobStore, "add", add_late)
            beginning = asyncio.create_task(server.begin())
            await reached.wait()
            [listed] = await server.jobs.list_jobs(None, is_operator=False)
            waiting = [asyncio.create_task(wait) for wait in (server.read(listed), server.jobs.cancel(listed))]
            await asyncio.sleep(0)
            hold.set()
            with pytest.raises(JobStoreError, match="the disk is full"):
                await beginning
            with pytest.raises(ServiceError, match="the disk is full"):
                await waiting[0]
            await waiting[1]
            with pytest.raises(ServiceError, match="does not exist"):
                await server.jobs.result(listed)

    run(test())


def test_what_is_refused_in_one_request_alone_is_not_in_another_of_its_key() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            reached, hold = asyncio.Event(), asyncio.Event()

            async def refuse() -> CompletionPlan:
                reached.set()
                await hold.wait()
                raise ServiceError("invalid_value", "its event id", param="Last-Event-ID")

            fields = {"prompt": "x", "seed": 1}
            request = BackgroundRequest.of("/v1/completions", fields, None, "key", 0.0)
            refused = asyncio.create_task(server.jobs.begin_or_find(request, refuse))
            await reached.wait()
            other = asyncio.create_task(server.begin("key"))
            await asyncio.sleep(0)
            hold.set()
            with pytest.raises(ServiceError, match="its event id"):
                await refused
            assert await found(server, await other)

    run(test())


def test_a_lower_limit_holds_from_the_start_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            jobs = []
            for _ in range(3):
                first.clock.now += 1.0
                jobs.append(await first.begin(max_tokens=1))
                await first.finish(jobs[-1])
        async with started(Server(tmp_path, clock=first.clock, max_results=2)) as second:
            assert [await found(second, job) for job in jobs] == [False, True, True]
            await second.jobs.settle()
            assert len(await second.store.load()) == 2

    run(test())


def test_suspending_leaves_it_in_the_journal_and_frees_the_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin()
            reader = aiter(first.jobs.reader(job))
            first.engine.step()
            await anext(reader)
            await first.jobs.suspend()
            assert first.engine.live_ids == []
            with pytest.raises(ServiceError) as raised:
                await anext(reader)
            assert (status_of(raised.value), raised.value.code) == (503, "draining")
            result = await first.jobs.result(job)
            assert (result["status"], result["error"], await first.text(job)) == ("in_progress", None, "a")
            assert first.lifecycle.num_active == 0
        async with started(Server(tmp_path)) as second:
            await second.finish(await find(second, job))
            assert (await second.text(await find(second, job)))[:3] == "abc"

    run(test())


def test_in_memory_there_is_nothing_to_suspend_and_it_counts_as_running() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin(max_tokens=1)
            assert server.lifecycle.num_active == 1
            await server.jobs.suspend()
            assert job.running is not None
            await server.finish(job)
            assert (job.status, server.lifecycle.num_active) == ("completed", 0)

    run(test())


def test_a_damaged_row_is_an_error_and_no_wrong_text(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin(max_tokens=2)
            await first.finish(job)
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
            connection.execute("UPDATE batches SET outputs = replace(outputs, '97', '98')")
        async with started(Server(tmp_path)) as second:
            with pytest.raises(JobStoreError, match="it is damaged"):
                await second.jobs.result(await find(second, job))

    run(test())


def test_after_a_restart_a_key_leads_to_what_its_retry_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            failed = await first.begin("k", max_tokens=3)
            with monkeypatch.context() as patch:
                for name in ("append", "end"):
                    patch.setattr(SqliteJobStore, name, AsyncMock(side_effect=JobStoreError("the disk is full")))
                await first.finish(failed)
            told = await first.begin("k", max_tokens=3)
            await first.finish(told)
        async with started(Server(tmp_path)) as second:
            assert (await second.begin("k", max_tokens=3)).completion_id == told.completion_id

    run(test())


def test_a_result_that_lacks_its_end_is_an_error_and_no_shorter_text(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin(max_tokens=3)
            await first.advance(job, 2)
            await first.finish(job)
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
            connection.execute("DELETE FROM batches WHERE n = ?", (job.num_batches - 1,))
        async with started(Server(tmp_path)) as second:
            with pytest.raises(JobStoreError, match="lacks the end"):
                await second.jobs.result(await find(second, job))

    run(test())


def test_a_result_that_is_dropped_while_it_is_read_is_not_found_and_no_empty_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with started(Server(max_results=1)) as server:
            job = await server.begin(max_tokens=3)
            await server.finish(job)
            batches = SqliteJobStore.batches

            async def batches_late(self: SqliteJobStore, *arguments: Any) -> list[tuple[TokenOutput, ...]]:
                await server.begin()
                await asyncio.sleep(0)  # what was dropped is being deleted
                return await batches(self, *arguments)

            monkeypatch.setattr(SqliteJobStore, "batches", batches_late)
            with pytest.raises(ServiceError) as raised:
                await server.jobs.result(job)
            assert raised.value.code == "completion_not_found"

    run(test())


def test_jobs_need_nothing_of_sqlite() -> None:
    async def test() -> None:
        async with started(Server(store=MemoryJobStore())) as server:
            job = await server.begin("key", max_tokens=3)
            await server.finish(job)
            assert await server.begin("key", max_tokens=3) is job
            assert sum(len(output.token_ids) for output in await server.read(job)) == 3
            assert (await server.jobs.result(job))["status"] == "completed"
            await server.jobs.delete(job)
            assert not await found(server, job)
            assert await server.store.load() == []

    run(test())
