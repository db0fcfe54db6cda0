"""The store by itself: how long results live, what a restart resumes, what happens without a usable journal."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gptserve.engine.errors import InvalidRequestError, QueueFullError
from gptserve.engine.request import MAX_SCORES_PER_OUTPUT, FinishReason, Request, TokenOutput
from gptserve.server.api.schemas import CompletionRequest
from gptserve.server.background.job import READ_LIMIT, BackgroundJob, BackgroundRequest
from gptserve.server.background.journal import FILE_NAME, Journal, JournalError
from gptserve.server.background.store import BackgroundStore
from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.plan import CompletionPlan, plan_completion, restore_completion
from gptserve.server.completions.service import AppOptions, Service
from gptserve.server.completions.shapes import TEXT_SHAPE
from gptserve.server.errors import ApiError
from gptserve.server.operations.lifecycle import Lifecycle
from gptserve.server.operations.metrics import Metrics
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A store around a fake engine; the next one with the same folder is the server started again."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        clock: Clock | None = None,
        engine: FakeEngineClient | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or FakeEngineClient(auto=False)
        self.clock = clock or Clock()
        self.journal = Journal(folder)
        self.lifecycle = Lifecycle()
        metrics = Metrics(self.engine, "m")
        self.service = Service(self.engine, ByteTokenizer(), AppOptions("m", **options), self.lifecycle, metrics)
        self.store = BackgroundStore(
            self.service, self.journal, {TEXT_SHAPE.object: restore_completion}, clock=self.clock
        )

    async def begin(self, key: str | None = None, **fields: Any) -> BackgroundJob:
        fields = {"prompt": "x", "seed": 1, **fields}

        async def plan() -> CompletionPlan:
            return await plan_completion(CompletionRequest.parse(fields), self.service)

        request = BackgroundRequest.of("/v1/completions", fields, key, time.perf_counter())
        return await self.store.begin_or_find(request, plan)

    async def read(self, job: BackgroundJob) -> list[TokenOutput]:
        """Return all outputs of a completion, which it follows to its end. Raises ApiError."""
        reader = self.store.reader(job)
        return [output async for outputs in reader for output in outputs]

    async def finish(self, job: BackgroundJob) -> None:
        """Step the engine until a completion has ended, with no regard to how many steps pile up."""
        while job.running is not None:
            self.engine.step()
            await asyncio.sleep(0)

    async def advance(self, job: BackgroundJob, num_steps: int) -> None:
        """Make that many steps, each a batch of its own."""
        reader = self.store.reader(job)
        for _ in range(num_steps):
            self.engine.step()
            await anext(reader)
        reader.close()

    async def text(self, job: BackgroundJob) -> str:
        choices: Any = (await self.store.result(job))["choices"]
        return str(choices[0]["text"])


@contextlib.asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    """A server from its start to a death at which its engine goes first."""
    await server.store.start()
    try:
        yield server
    finally:
        await server.engine.close()
        await server.store.settle()
        await server.journal.close()


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def found(server: Server, job: BackgroundJob) -> bool:
    try:
        server.store.find(job.completion_id)
    except ApiError as error:
        return {"completion_not_found": False}[error.code]
    return True


@pytest.mark.parametrize("durable", [True, False])
def test_a_result_lives_for_its_time_after_its_end(tmp_path: Path, durable: bool) -> None:
    async def test() -> None:
        async with started(Server(tmp_path if durable else None, result_ttl_s=60.0)) as server:
            job = await server.begin("key", max_tokens=1)
            server.clock.now += 1000.0
            assert found(server, job), "its time begins with its end"
            await server.finish(job)
            server.clock.now += 59.9
            assert found(server, job)
            assert await server.begin("key", max_tokens=1) is job
            server.clock.now += 0.2
            assert not found(server, job)
            await server.store.settle()
            assert await server.journal.batches(job.completion_id, 0, 1) == []
            assert await server.begin("key", max_tokens=1) is not job, "its key is free again"
            assert server.store.counts() == {"queued": 1}

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
            assert [found(server, job) for job in (early, late)] == [False, True]

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
            assert [found(server, job) for job in (endless, second, third, fourth)] == [True, True, False, True]
            fifth = await server.begin(max_tokens=100)
            assert [found(server, job) for job in (endless, second, fourth, fifth)] == [True, False, True, True]
            with pytest.raises(ApiError) as refused:
                await server.begin()
            assert (refused.value.status, refused.value.code) == (429, "too_many_kept")
            rejections = 'gptserve_admission_rejections_total{code="too_many_kept",model_name="m"} 1.0'
            assert rejections in server.service.metrics.render().decode()
            assert len(server.engine.live_ids) == 3
            assert sum(server.store.counts().values()) == 3

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
                patch.setattr(Journal, "add", AsyncMock(side_effect=JournalError("the disk is full")))
                with pytest.raises(JournalError):
                    await server.begin()
            assert await server.text(job) == "a"

    run(test())


def test_a_lower_limit_holds_from_the_next_completion_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            jobs = []
            for _ in range(3):
                first.clock.now += 1.0
                jobs.append(await first.begin(max_tokens=1))
                await first.finish(jobs[-1])
        async with started(Server(tmp_path, clock=first.clock, max_results=2)) as second:
            last = await second.begin()
            assert [found(second, job) for job in (*jobs, last)] == [False, False, True, True]

    run(test())


def test_what_is_shown_is_in_the_journal_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            job = await server.begin(max_tokens=50)
            reader, hold = server.store.reader(job), asyncio.Event()
            append = Journal.append

            async def append_late(self: Journal, *arguments: Any) -> None:
                await hold.wait()
                await append(self, *arguments)

            monkeypatch.setattr(Journal, "append", append_late)
            server.engine.step()
            reading = asyncio.ensure_future(anext(reader))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reading.done()
            assert await server.text(job) == ""
            hold.set()
            (output,) = await reading
            assert (await server.journal.batches(job.completion_id, 0, 9)) == [(output,)]
            reader.close()

    run(test())


def test_memory_holds_no_outputs_of_what_has_ended() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin(max_tokens=3 * READ_LIMIT)
            slow = server.store.reader(job)
            server.engine.step()
            first = await anext(slow)
            await server.finish(job)
            assert job.running is None
            rest = [output async for outputs in slow for output in outputs]
            assert [*first, *rest] == await server.read(job)
            assert len(first + tuple(rest)) == 3 * READ_LIMIT

    run(test())


def test_a_reader_takes_a_bounded_piece_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            job = await server.begin(max_tokens=200)
            await server.advance(job, 2 * READ_LIMIT)
            late = server.store.reader(job)
            assert len(await anext(late)) == READ_LIMIT
            await server.finish(job)
            assert len(await anext(late)) == READ_LIMIT
            late.close()
            assert [outputs async for outputs in late] == []

    run(test())


@pytest.mark.parametrize("is_live", [True, False])
def test_many_choices_in_memory_are_read_in_small_pieces_between_which_others_have_their_turn(is_live: bool) -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin(n=16, max_tokens=16)
            await server.advance(job, 15)
            if not is_live:
                await server.finish(job)
            pieces, turns = [], []
            reader = server.store.reader(job)
            for _ in range(3):
                asyncio.get_running_loop().call_soon(turns.append, len(pieces))
                pieces.append(await anext(reader))
            assert [len(piece) for piece in pieces] == [READ_LIMIT] * 3
            assert turns == [0, 1, 2]
            reader.close()

    run(test())


def test_a_reader_of_a_result_whose_time_is_over_is_told_so() -> None:
    async def test() -> None:
        async with started(Server(result_ttl_s=60.0)) as server:
            job = await server.begin(max_tokens=2 * READ_LIMIT)
            await server.advance(job, 2 * READ_LIMIT)
            await server.store.settle()
            reader = server.store.reader(job)
            assert len(await anext(reader)) == READ_LIMIT
            server.clock.now += 61.0
            assert not found(server, job)
            await server.store.settle()
            with pytest.raises(ApiError) as raised:
                await anext(reader)
            assert raised.value.code == "completion_not_found"

    run(test())


def test_a_restart_goes_on_with_the_very_next_token(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "max_tokens": 6, "stop": "cab", "cache_salt": "s"}

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin("key", **body)
            follower = first.store.reader(job)
            for _ in range(2):
                first.engine.step()
                await anext(follower)
            begun = first.engine.submitted
        with pytest.raises(ApiError, match="the engine has died"):
            await anext(follower)

        async with started(Server(tmp_path)) as second:
            again = second.store.find(job.completion_id)
            await asyncio.sleep(0)
            expected = [replace(request, generated_token_ids=tuple(b"ab")) for request in begun]
            assert second.engine.submitted == expected
            assert await second.begin("key", **body) is again
            await second.finish(again)
            result: Any = await second.store.result(again)
            assert [choice["text"] for choice in result["choices"]] == ["ab"] * 4
            assert result["usage"]["completion_tokens"] == 4 * 5
        async with started(Server(tmp_path)) as third:
            assert await third.store.result(third.store.find(job.completion_id)) == result
            assert third.engine.submitted == []

    run(test())


def test_a_restart_within_a_prompt_goes_on_with_the_next_of_its_scores(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"prompt": [97] * 200, "max_tokens": 2, "prompt_logprobs": 1}

    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            begun = await server.begin(**fields)
            await server.advance(begun, 2)
        async with started(Server(tmp_path)) as server:
            await asyncio.sleep(0)
            [request] = server.engine.submitted
            assert request.num_scored_tokens == 2 * MAX_SCORES_PER_OUTPUT
            resumed = server.store.find(begun.completion_id)
            await server.finish(resumed)
            undisturbed = await server.begin(**fields)
            await server.finish(undisturbed)
            first, second = await server.store.result(resumed), await server.store.result(undisturbed)
            encode = PiecewiseEncoder(ensure_ascii=True).encode
            assert encode(first["choices"]) == encode(second["choices"])

    run(test())


def test_a_restart_with_the_last_output_already_there_only_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*_: object) -> None:
        raise JournalError("lost")

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            with monkeypatch.context() as patch:
                patch.setattr(Journal, "end", lose)
                job = await first.begin(max_tokens=2)
                await first.finish(job)
            assert (job.status, job.error and job.error.code) == ("failed", "journal_failed")
        async with started(Server(tmp_path)) as second:
            again = second.store.find(job.completion_id)
            await second.store.settle()
            assert (again.status, await second.text(again), second.engine.submitted) == ("completed", "ab", [])

    run(test())


def test_what_does_not_fit_into_the_queue_at_a_restart_waits_for_room(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            ids = [(await first.begin(max_tokens=2, n=n)).completion_id for n in (1, 2, 1, 2)]
        second = Server(tmp_path)
        second.engine.max_requests, second.engine.retry_after_s = 2, 3600
        async with started(second):
            jobs = [second.store.find(completion_id) for completion_id in ids]
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
            await second.store.settle()
            ended = [second.store.find(job.completion_id) for job in (large, small)]
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
            job = second.store.find(completion_id)
            await second.store.cancel(job)
            assert (job.status, second.engine.submitted) == ("cancelled", [])
            with pytest.raises(ApiError, match="was cancelled"):
                await second.read(job)

    run(test())


@pytest.mark.parametrize("has_room", [True, False])
def test_a_deadline_passes_while_the_server_is_down(tmp_path: Path, has_room: bool) -> None:
    async def test() -> None:
        clock = Clock()
        async with started(Server(tmp_path, clock=clock)) as first:
            job = await first.begin(timeout_ms=60_000)
            first.engine.step()
            await anext(first.store.reader(job))
        clock.now += 61.0
        second = Server(tmp_path, clock=clock)
        second.engine.max_requests = 10 if has_room else 0
        async with started(second):
            again = second.store.find(job.completion_id)
            outputs = await second.read(again)
            assert [output.token_ids for output in outputs] == [(97,), ()]
            assert outputs[-1].finish_reason is FinishReason.TIMEOUT
            assert (again.status, second.engine.live_ids) == ("completed", [])

    run(test())


def test_a_model_that_computes_otherwise_ends_what_was_under_way(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            done, cut = await first.begin("a", max_tokens=1), await first.begin("b")
            await first.finish(done)
        async with started(
            Server(tmp_path, engine=FakeEngineClient(info=replace(INFO, fingerprint="fake-2")))
        ) as second:
            for job in (done, cut):
                result = await second.store.result(second.store.find(job.completion_id))
                assert (result["status"], result["choices"], result["system_fingerprint"]) == ("failed", [], "fake-1")
                assert result["error"] == {
                    "message": "the server now has another model or computes otherwise",
                    "type": "server_error",
                    "param": None,
                    "code": "model_changed",
                }
            assert second.engine.submitted == []
            assert (await second.begin("a", max_tokens=1)).completion_id != done.completion_id

    run(test())


def test_what_another_version_was_asked_does_not_hinder_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            record = await first.journal.read_record((await first.begin()).completion_id)
            unknown = replace(record, completion_id="cmpl-1", fingerprint="newer", body='{"prompt":"x","newer":1}')
            await first.journal.add(unknown)
        async with started(Server(tmp_path)) as second:
            assert second.store.find("cmpl-1").status == "failed"
            with pytest.raises(ApiError) as raised:
                await second.store.result(second.store.find("cmpl-1"))
            assert raised.value.code == "model_changed"

    run(test())


def test_suspending_leaves_it_in_the_journal_and_frees_the_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin()
            reader = first.store.reader(job)
            first.engine.step()
            await anext(reader)
            await first.store.suspend()
            assert first.engine.live_ids == []
            with pytest.raises(ApiError) as raised:
                await anext(reader)
            assert (raised.value.status, raised.value.code) == (503, "draining")
            result = await first.store.result(job)
            assert (result["status"], result["error"], await first.text(job)) == ("in_progress", None, "a")
            assert first.lifecycle.num_active == 0
        async with started(Server(tmp_path)) as second:
            await second.finish(second.store.find(job.completion_id))
            assert (await second.text(second.store.find(job.completion_id)))[:3] == "abc"

    run(test())


def test_in_memory_there_is_nothing_to_suspend_and_it_counts_as_running() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin(max_tokens=1)
            assert server.lifecycle.num_active == 1
            await server.store.suspend()
            assert job.running is not None
            await server.finish(job)
            assert (job.status, server.lifecycle.num_active) == ("completed", 0)

    run(test())


@pytest.mark.parametrize("method", ["add", "append", "end"])
def test_what_cannot_be_journaled_fails_and_costs_the_engine_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def fail(*_: object) -> None:
        raise JournalError("the journal /j cannot be used: database or disk is full")

    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            with monkeypatch.context() as patch:
                patch.setattr(Journal, method, fail)
                if method == "add":
                    with pytest.raises(JournalError):
                        await server.begin("key", max_tokens=2)
                    assert server.store.counts() == {}
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


def test_a_damaged_row_is_an_error_and_no_wrong_text(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin(max_tokens=2)
            await first.finish(job)
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
            connection.execute("UPDATE batches SET outputs = replace(outputs, '97', '98')")
        async with started(Server(tmp_path)) as second:
            with pytest.raises(JournalError, match="it is damaged"):
                await second.store.result(second.store.find(job.completion_id))

    run(test())


def test_after_a_restart_a_key_leads_to_what_its_retry_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            failed = await first.begin("k", max_tokens=3)
            with monkeypatch.context() as patch:
                for name in ("append", "end"):
                    patch.setattr(Journal, name, AsyncMock(side_effect=JournalError("the disk is full")))
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
            with pytest.raises(JournalError, match="lacks the end"):
                await second.store.result(second.store.find(job.completion_id))

    run(test())


def test_a_result_that_is_dropped_while_it_is_read_is_not_found_and_no_empty_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with started(Server(max_results=1)) as server:
            job = await server.begin(max_tokens=3)
            await server.finish(job)
            batches = Journal.batches

            async def batches_late(self: Journal, *arguments: Any) -> list[tuple[TokenOutput, ...]]:
                await server.begin()
                await asyncio.sleep(0)  # what was dropped is being deleted
                return await batches(self, *arguments)

            monkeypatch.setattr(Journal, "batches", batches_late)
            with pytest.raises(ApiError) as raised:
                await server.store.result(job)
            assert raised.value.code == "completion_not_found"

    run(test())


def test_an_error_holds_nothing_of_those_who_met_it() -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="it broke")

    async def test() -> None:
        async with started(Server(engine=FakeEngineClient(reply, auto=False))) as server:
            job = await server.begin()
            await server.finish(job)
            for _ in range(3):
                with pytest.raises(ApiError, match="it broke"):
                    await server.read(job)
            assert job.error is not None
            assert job.error.__traceback__ is None

    run(test())


def test_an_engine_that_dies_fails_what_is_only_in_memory() -> None:
    async def test() -> None:
        async with started(Server()) as server:
            job = await server.begin()
            server.engine.die()
            with pytest.raises(ApiError, match="the engine has died: killed"):
                await server.read(job)
            assert job.status == "failed"

    run(test())
