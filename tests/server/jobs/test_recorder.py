"""Running background jobs: the journal before the readers, waiting for room, deadlines, failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.request import FinishReason
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import READ_LIMIT
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStoreError
from tests.server.fake_engine import INFO, FakeEngineClient
from tests.server.jobs.server import Clock, Server, find, run, started


def test_what_is_shown_is_in_the_journal_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            job = await server.begin(max_tokens=50)
            reader, hold = aiter(server.jobs.reader(job)), asyncio.Event()
            append = SqliteJobStore.append

            async def append_late(self: SqliteJobStore, *arguments: Any) -> int:
                await hold.wait()
                return await append(self, *arguments)

            monkeypatch.setattr(SqliteJobStore, "append", append_late)
            server.engine.step()
            reading = asyncio.ensure_future(anext(reader))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reading.done()
            assert await server.text(job) == ""
            hold.set()
            (output,) = await reading
            assert (await server.store.batches(job.completion_id, 0, 9)) == [(output,)]

    run(test())


def test_memory_holds_no_outputs_of_what_has_ended() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin(max_tokens=3 * READ_LIMIT)
            slow = aiter(server.jobs.reader(job))
            server.engine.step()
            first = await anext(slow)
            await server.finish(job)
            assert job.running is None
            rest = [output async for outputs in slow for output in outputs]
            assert [*first, *rest] == await server.read(job)
            assert len(first + tuple(rest)) == 3 * READ_LIMIT

    run(test())


def test_what_does_not_fit_into_the_queue_at_a_restart_waits_for_room(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            ids = [(await first.begin(max_tokens=2, n=n)).completion_id for n in (1, 2, 1, 2)]
        second = Server(tmp_path)
        second.engine.max_requests, second.engine.retry_after_s = 2, 3600
        async with started(second):
            jobs = [await second.jobs.find(completion_id, None) for completion_id in ids]
            for job in jobs:
                assert job.running is not None
            while any(job.running is not None for job in jobs):
                assert len(second.engine.live_ids) <= 2
                second.engine.step()
                await asyncio.sleep(0)
            assert [job.status for job in jobs] == ["completed"] * 4

    run(test())


def test_what_can_never_fit_into_the_queue_fails_and_holds_nobody_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            large, small = await first.begin(n=4), await first.begin(max_tokens=1)
        info = replace(INFO, max_num_seqs=1, max_num_queued_reqs=1)
        async with started(Server(tmp_path, engine=FakeEngineClient(info=info))) as second:
            await second.jobs.settle()
            ended = [await find(second, job) for job in (large, small)]
            assert [job.status for job in ended] == ["failed", "completed"]
            assert ended[0].error is not None
            assert ended[0].error.code == "queue_full"

    run(test())


def test_a_waiting_completion_can_be_cancelled(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            completion_id = (await first.begin()).completion_id
        second = Server(tmp_path)
        second.engine.max_requests = 0
        async with started(second):
            job = await second.jobs.find(completion_id, None)
            await second.jobs.cancel(job)
            assert (job.status, second.engine.submitted) == ("cancelled", [])
            with pytest.raises(ServiceError, match="was cancelled"):
                await second.read(job)

    run(test())


@pytest.mark.parametrize("has_room", [True, False])
def test_a_deadline_passes_while_the_server_is_down(tmp_path: Path, has_room: bool) -> None:
    async def test() -> None:
        clock = Clock()
        async with started(Server(tmp_path, clock=clock)) as first:
            job = await first.begin(timeout_ms=60_000)
            first.engine.step()
            await anext(aiter(first.jobs.reader(job)))
        clock.now += 61.0
        second = Server(tmp_path, clock=clock)
        second.engine.max_requests = 10 if has_room else 0
        async with started(second):
            again = await find(second, job)
            outputs = await second.read(again)
            assert [output.token_ids for output in outputs] == [(97,), ()]
            assert outputs[-1].finish_reason is FinishReason.TIMEOUT
            assert (again.status, second.engine.live_ids) == ("completed", [])

    run(test())


@pytest.mark.parametrize("method", ["add", "append", "end"])
def test_what_cannot_be_journaled_fails_and_costs_the_engine_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def fail(*_: object) -> None:
        raise JobStoreError("the journal /j cannot be used: database or disk is full")

    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            with monkeypatch.context() as patch:
                patch.setattr(SqliteJobStore, method, fail)
                if method == "add":
                    with pytest.raises(JobStoreError):
                        await server.begin("key", max_tokens=2)
                    assert server.jobs.counts() == {}
                else:
                    job = await server.begin("key", max_tokens=2)
                    await server.finish(job)
                    assert job.error is not None
                    assert (job.status, job.error.code) == ("failed", "journal_failed")
                    assert await server.text(job) == ("" if method == "append" else "ab")
            assert server.engine.live_ids == []
            assert server.lifecycle.num_active == 0
            retry = await server.begin("key", max_tokens=2)
            await server.finish(retry)
            assert (retry.status, await server.text(retry)) == ("completed", "ab")

    run(test())


def test_an_engine_that_dies_fails_what_is_only_in_memory() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin()
            server.engine.die()
            with pytest.raises(ServiceError, match="the engine has died: killed"):
                await server.read(job)
            assert job.status == "failed"

    run(test())
