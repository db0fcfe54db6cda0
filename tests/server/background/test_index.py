"""How long jobs are kept and how many bytes: those whose time is over and those that ended first go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from gptserve.server.api.errors import status_of
from gptserve.server.background.job import BackgroundJob
from gptserve.server.background.journal import Journal
from gptserve.server.errors import ServiceError
from tests.server.background.server import Clock, Server, found, run, started


async def ended(server: Server, **fields: object) -> BackgroundJob:
    job = await server.begin(max_tokens=1, **fields)
    await server.finish(job)
    return job


def test_results_go_when_their_time_is_over_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.server.background.store.EXPIRY_INTERVAL_S", 0.001)
    forgotten, forget = asyncio.Event(), Journal.forget

    async def forget_and_tell(self: Journal, completion_ids: Sequence[str]) -> None:
        await forget(self, completion_ids)
        forgotten.set()

    async def test() -> None:
        async with started(Server(result_ttl_s=60.0)) as server:
            over = await ended(server)
            job = await server.begin()
            server.clock.now += 61.0
            await forgotten.wait()
            assert await server.journal.batches(over.completion_id, 0, 1) == []
            assert (found(server, over), found(server, job)) == (False, True)

    monkeypatch.setattr(Journal, "forget", forget_and_tell)
    run(test())


def test_a_clock_that_was_ahead_once_keeps_no_result_longer(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with started(Server(tmp_path, clock=clock, result_ttl_s=60.0)) as server:
            clock.now += 86_400.0
            ahead = await ended(server)
            clock.now -= 86_400.0
            later = await ended(server)
            assert found(server, ahead), "its time begins again when it is seen"
            clock.now += 61.0
            assert [found(server, job) for job in (ahead, later)] == [False, False]
        clock.now -= 61.0
        async with started(Server(tmp_path, clock=clock, result_ttl_s=60.0)) as server:
            server.store.expire()
            clock.now += 61.0
            server.store.expire()
            assert server.store.counts() == {}

    run(test())


def test_results_that_ended_first_make_room_for_bytes_and_what_runs_never_does(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            size = (await ended(server)).num_bytes
        async with started(Server(tmp_path / "other", max_results_bytes=int(2.5 * size))) as server:
            first, second = await ended(server), await ended(server)
            assert [found(server, job) for job in (first, second)] == [True, True]
            third = await ended(server)
            assert [found(server, job) for job in (first, second, third)] == [False, True, True]
            running = await server.begin(prompt=[97] * 40, max_tokens=100)
            assert [found(server, job) for job in (second, third)] == [False, True], "it is larger than the others"
            while running.num_bytes < 2.5 * size:
                await server.advance(running, 10)
            refusal = "bytes of background or keyed completions that run are kept, and the limit is"
            with pytest.raises(ServiceError, match=refusal) as refused:
                await server.begin()
            assert (status_of(refused.value), refused.value.code) == (429, "too_many_kept")
            await server.finish(running)
            assert [found(server, job) for job in (third, running)] == [False, True], "who has just ended is spared"
            assert found(server, await ended(server))
            assert not found(server, running)

    run(test())


def test_what_is_kept_counts_the_same_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin(max_tokens=5)
            await first.advance(job, 5)
            await first.store.settle()
        async with started(Server(tmp_path)) as second:
            [again] = second.store.list_jobs(None, is_operator=False)
            assert (again.num_tokens, again.num_prompt_tokens) == (5, 1)
            assert 0 <= job.num_bytes - again.num_bytes < 50

    run(test())
