"""How long jobs are kept, how many and how many bytes: which go, and how owners share the limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.core.error_responses import status_of
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.index import JobIndex
from gptserve.server.jobs.job import BackgroundJob
from gptserve.server.jobs.records import CompletionRecord
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from tests.server.app_options import app_settings
from tests.server.jobs.server import Clock, Server, found, run, started


async def ended(server: Server, **fields: object) -> BackgroundJob:
    job = await server.begin(max_tokens=1, **fields)
    await server.finish(job)
    return job


def test_results_go_when_their_time_is_over_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.server.jobs.background.EXPIRY_INTERVAL_S", 0.001)
    forgotten, forget = asyncio.Event(), SqliteJobStore.forget

    async def forget_and_tell(self: SqliteJobStore, completion_ids: Sequence[str]) -> None:
        await forget(self, completion_ids)
        forgotten.set()

    async def test() -> None:
        async with started(Server(result_ttl_s=60.0)) as server:
            over = await ended(server)
            job = await server.begin()
            server.clock.now += 61.0
            await forgotten.wait()
            assert await server.store.batches(over.completion_id, 0, 1) == []
            assert (await found(server, over), await found(server, job)) == (False, True)

    monkeypatch.setattr(SqliteJobStore, "forget", forget_and_tell)
    run(test())


def test_a_clock_that_was_ahead_once_keeps_no_result_longer(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with started(Server(tmp_path, clock=clock, result_ttl_s=60.0)) as server:
            clock.now += 86_400.0
            ahead = await ended(server)
            clock.now -= 86_400.0
            later = await ended(server)
            assert await found(server, ahead), "its time begins again when it is seen"
            clock.now += 61.0
            assert [await found(server, job) for job in (ahead, later)] == [False, False]
        clock.now -= 61.0
        async with started(Server(tmp_path, clock=clock, result_ttl_s=60.0)) as server:
            server.jobs.expire()
            clock.now += 61.0
            server.jobs.expire()
            assert server.jobs.counts() == {}

    run(test())


def test_results_that_ended_first_make_room_for_bytes_and_what_runs_never_does(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            size = (await ended(server)).num_bytes
        async with started(Server(tmp_path / "other", max_results_bytes=int(2.5 * size))) as server:
            first, second = await ended(server), await ended(server)
            assert [await found(server, job) for job in (first, second)] == [True, True]
            third = await ended(server)
            assert [await found(server, job) for job in (first, second, third)] == [False, True, True]
            running = await server.begin(prompt=[97] * 40, max_tokens=100)
            assert [await found(server, job) for job in (second, third)] == [False, True], (
                "it is larger than the others"
            )
            while running.num_bytes < 2.5 * size:
                await server.advance(running, 10)
            refusal = "bytes of your running completions are kept, and the limit for all owners is"
            with pytest.raises(ServiceError, match=refusal) as refused:
                await server.begin()
            assert (status_of(refused.value), refused.value.code) == (429, "too_many_kept")
            await server.finish(running)
            assert [await found(server, job) for job in (third, running)] == [False, True], (
                "who has just ended is spared"
            )
            assert await found(server, await ended(server))
            assert not await found(server, running)

    run(test())


def test_what_is_kept_counts_the_same_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin(max_tokens=5)
            await first.advance(job, 5)
            await first.jobs.settle()
        async with started(Server(tmp_path)) as second:
            [again] = await second.jobs.list_jobs(None, is_operator=False)
            assert (again.num_tokens, again.num_prompt_tokens) == (5, 1)
            assert 0 <= job.num_bytes - again.num_bytes < 50

    run(test())


def test_owners_leave_each_other_their_share_of_the_limit() -> None:
    async def test() -> None:
        async with started(Server(max_results=4)) as server:
            greedy = [await server.begin(owner="a", max_tokens=50) for _ in range(4)]
            with pytest.raises(ServiceError) as refused:
                await server.begin(owner="a")
            rule = "4 of your background or keyed completions are running, and the limit for all owners is 4"
            assert (status_of(refused.value), str(refused.value)) == (429, rule)
            of_b = [await server.begin(owner="b", max_tokens=1)]
            for _ in range(2):
                server.engine.step()
                await server.read(of_b[-1])
                of_b.append(await server.begin(owner="b", max_tokens=1))
            server.engine.step()
            await server.read(of_b[-1])
            assert [await found(server, job) for job in of_b] == [False, True, True], "it has its half, and no more"
            running = [await server.begin(owner="b", max_tokens=100) for _ in range(2)]
            with pytest.raises(ServiceError, match="2 of your background") as refused:
                await server.begin(owner="b")
            for job in greedy:
                await server.finish(job)
            assert sum([await found(server, job) for job in greedy]) == 2
            assert all([await found(server, job) for job in running])
            assert [await found(server, job) for job in of_b] == [False, False, False]

    run(test())


def job_of(owner: str, number: int, num_bytes: int) -> BackgroundJob:
    record = CompletionRecord(
        f"cmpl-{number}", "text_completion", 0, "m", "f", True, 0, owner, "t", "", (), 1, None, None, ""
    )
    return BackgroundJob(record, 1, num_bytes)


MAX_RESULTS, MAX_BYTES = 6, 40
CHANGES = st.tuples(st.sampled_from(["begin", "grow", "end"]), st.sampled_from("abc"), st.integers(1, 20))


def excess(jobs: Iterable[BackgroundJob], num_parts: int = 1) -> tuple[int, int]:
    """Return by how much jobs pass each limit, or reach further than one of `num_parts` of it."""
    sizes = [job.num_bytes for job in jobs]
    return len(sizes) * num_parts - MAX_RESULTS, sum(sizes) * num_parts - MAX_BYTES


def check_and_make_room(index: JobIndex, keep: BackgroundJob) -> None:
    """Remove what must go: all that an owner keeps beyond its share where there is too much, and nothing else."""
    owners = {job.record.owner for job in index}
    for gone in index.to_evict(keep):
        own = [job for job in index if job.record.owner == gone.record.owner]
        assert max(excess(index)) > 0, "there is too much"
        assert max(excess(own, len(owners))) > 0, "an owner within its share loses nothing"
        assert gone is next(job for job in own if job.has_ended and job is not keep), "the first to have ended"
        index.remove(gone)
    for owner in owners:
        own = [job for job in index if job.record.owner == owner]
        if any(job.has_ended and job is not keep for job in own):
            assert not any(
                total > 0 and part > 0 for total, part in zip(excess(index), excess(own, len(owners)), strict=True)
            )


@given(st.lists(CHANGES, max_size=60))
def test_whatever_owners_do_none_takes_the_share_of_another(changes: list[tuple[str, str, int]]) -> None:
    index = JobIndex(app_settings(max_results=MAX_RESULTS, max_results_bytes=MAX_BYTES), Clock())
    for number, (change, owner, size) in enumerate(changes):
        running = [job for job in index if not job.has_ended]
        own = [job for job in running if job.record.owner == owner]
        if change == "begin":
            num_owners = len({job.record.owner for job in index} | {owner})
            is_refused = any(
                total >= 0 and part >= 0 for total, part in zip(excess(running), excess(own, num_owners), strict=True)
            )
            with pytest.raises(ServiceError) if is_refused else contextlib.nullcontext():
                index.check_room(owner)
            assert own or not is_refused, "who has none may begin one"
            if not is_refused:
                job = job_of(owner, number, size)
                index.add(job)
                check_and_make_room(index, job)
                assert len(running) < MAX_RESULTS * (1 + 1 / 2 + 1 / 3)
        elif own and change == "grow":
            own[0].num_bytes += size
        elif own:
            own[0].status = "completed"
            index.note_end(own[0])
            check_and_make_room(index, own[0])
