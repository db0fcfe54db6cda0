"""Background jobs after a restart: they go on where they were, unless the model is another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.request import MAX_SCORES_PER_OUTPUT
from gptserve.server.background.journal import Journal, JournalError
from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.errors import ServiceError
from tests.server.background.server import Server, run, started
from tests.server.fake_engine import INFO, FakeEngineClient


def test_a_restart_goes_on_with_the_very_next_token(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "max_tokens": 6, "stop": "cab", "cache_salt": "s"}

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin("key", **body)
            follower = aiter(first.store.reader(job))
            for _ in range(2):
                first.engine.step()
                await anext(follower)
            begun = first.engine.submitted
        with pytest.raises(ServiceError, match="the engine has died"):
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
            with pytest.raises(ServiceError) as raised:
                await second.store.result(second.store.find("cmpl-1"))
            assert raised.value.code == "model_changed"

    run(test())
