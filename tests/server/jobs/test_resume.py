"""Background jobs after a restart: they go on where they were, unless the model is another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.request import MAX_SCORES_PER_OUTPUT, Request, TokenOutput
from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import READ_LIMIT, BackgroundRequest
from gptserve.server.jobs.records import OutputBatch
from gptserve.server.jobs.resumption import MAX_ATTEMPTS, SUSPECT_AFTER
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStoreError
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient, say
from tests.server.jobs.server import Server, find, run, started


def test_a_restart_goes_on_with_the_very_next_token(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "max_tokens": 6, "stop": "cab", "cache_salt": "s"}

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin("key", **body)
            follower = aiter(first.jobs.reader(job))
            for _ in range(2):
                first.engine.step()
                await anext(follower)
            begun = first.engine.submitted
        with pytest.raises(ServiceError, match="the engine has died"):
            await anext(follower)

        async with started(Server(tmp_path)) as second:
            again = await find(second, job)
            expected = [replace(request, generated_token_ids=tuple(b"ab")) for request in begun]
            assert await second.submitted() == expected
            assert await second.begin("key", **body) is again
            await second.finish(again)
            result: Any = await second.jobs.result(again)
            assert [choice["text"] for choice in result["choices"]] == ["ab"] * 4
            assert result["usage"]["completion_tokens"] == 4 * 5
        async with started(Server(tmp_path)) as third:
            assert await third.jobs.result(await find(third, job)) == result
            assert third.engine.submitted == []

    run(test())


def test_a_restart_goes_on_with_the_parameters_that_were_in_force(tmp_path: Path) -> None:
    body = {"top_k": 7, "min_tokens": 2, "bad_words": ["ab"], "allowed_token_ids": [97, 98], "max_tokens": 4}

    async def test() -> None:
        async with started(Server(tmp_path, sampling_defaults={"temperature": 0.5, "top_k": 3})) as first:
            await first.begin(**body)
            begun = first.engine.submitted
            assert (begun[0].params.temperature, begun[0].params.top_k) == (0.5, 7)
        async with started(Server(tmp_path, sampling_defaults={"top_p": 0.5, "temperature": 1.5})) as second:
            assert await second.submitted() == begun

    run(test())


def test_a_restart_within_a_prompt_goes_on_with_the_next_of_its_scores(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"prompt": [97] * 200, "max_tokens": 2, "prompt_logprobs": 1}

    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            begun = await server.begin(**fields)
            await server.advance(begun, 2)
        async with started(Server(tmp_path)) as server:
            [request] = await server.submitted()
            assert request.num_scored_tokens == 2 * MAX_SCORES_PER_OUTPUT
            resumed = await find(server, begun)
            await server.finish(resumed)
            undisturbed = await server.begin(**fields)
            await server.finish(undisturbed)
            first, second = await server.jobs.result(resumed), await server.jobs.result(undisturbed)
            encode = PiecewiseEncoder(ensure_ascii=True).encode
            assert encode(first["choices"]) == encode(second["choices"])

    run(test())


def test_a_restart_with_the_last_output_already_there_only_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*_: object) -> None:
        raise JobStoreError("lost")

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            with monkeypatch.context() as patch:
                patch.setattr(SqliteJobStore, "end", lose)
                job = await first.begin(max_tokens=2)
                await first.finish(job)
            assert (job.status, job.error and job.error.code) == ("failed", "journal_failed")
        async with started(Server(tmp_path)) as second:
            again = await find(second, job)
            await second.jobs.settle()
            assert (again.status, await second.text(again), second.engine.submitted) == ("completed", "ab", [])

    run(test())


MODEL_CHANGED = {
    "message": "the server now has another model or computes otherwise",
    "type": "server_error",
    "param": None,
    "code": "model_changed",
}


@pytest.mark.parametrize("same_tokenizer", [True, False])
def test_a_model_that_computes_otherwise_ends_what_was_under_way_and_reads_what_its_tokenizer_can(
    tmp_path: Path, same_tokenizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            done, cut = await first.begin("a", max_tokens=2), await first.begin("b")
            await first.advance(done, 2)
            await first.read(done)
            whole = await first.jobs.result(done)
        if not same_tokenizer:
            monkeypatch.setattr(ByteTokenizer, "fingerprint", "other")
        async with started(
            Server(tmp_path, engine=FakeEngineClient(info=replace(INFO, fingerprint="fake-2")))
        ) as second:
            of_done, of_cut = [await second.jobs.result(await find(second, job)) for job in (done, cut)]
            assert (of_cut["status"], of_cut["error"], of_cut["system_fingerprint"]) == (
                "failed",
                MODEL_CHANGED,
                "fake-1",
            )
            assert (await find(second, cut)).num_tokens == 2
            again = await second.begin("a", max_tokens=2)
            if same_tokenizer:
                assert of_done == whole
                assert again.completion_id == done.completion_id
                assert await second.read(again) == await second.read(await find(second, done))
                assert (await second.text(await find(second, cut)))[:2] == "ab"
                assert second.engine.submitted == []
            else:
                assert (of_done["status"], of_done["choices"], of_done["error"]) == ("failed", [], MODEL_CHANGED)
                assert of_cut["choices"] == []
                assert again.completion_id != done.completion_id

    run(test())


def test_what_another_version_was_asked_does_not_hinder_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            record = await first.store.read_record((await first.begin()).completion_id)
            unknown = replace(record, completion_id="cmpl-1", fingerprint="newer", body='{"prompt":"x","newer":1}')
            await first.store.add(unknown)
        async with started(Server(tmp_path)) as second:
            assert (await second.jobs.find("cmpl-1", None)).status == "failed"
            with pytest.raises(ServiceError) as raised:
                await second.jobs.result(await second.jobs.find("cmpl-1", None))
            assert raised.value.code == "model_changed"

    run(test())


async def _all_submitted(server: Server, number: int) -> list[Request]:
    """Return what the engine was given once it has so many requests, and whoever noted an attempt has submitted."""
    await asyncio.to_thread(server.engine.wait_for, lambda: len(server.engine.submitted) >= number)
    await asyncio.sleep(0)  # whose turn it is has an attempt under way to the journal, which writes in turn
    await server.store.forget(["nobody's"])
    await asyncio.sleep(0)
    return server.engine.submitted


async def die_when_submitted(server: Server, num_submitted: int) -> list[int]:
    """Start a server that ends when its engine has so many requests; return the choices' prompts."""
    async with started(server):
        await asyncio.to_thread(server.engine.wait_for, lambda: len(server.engine.submitted) >= num_submitted)
    return [request.prompt_token_ids[0] for request in server.engine.submitted]


def test_a_completion_at_which_servers_end_is_tried_alone_and_then_fails_and_the_others_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            jobs = {ord(prompt): await first.begin(prompt=prompt) for prompt in "ab"}
        for _ in range(SUSPECT_AFTER):
            assert sorted(await die_when_submitted(Server(tmp_path), 2)) == [*b"ab"]
        [tried] = await die_when_submitted(Server(tmp_path), 1)
        guilty, innocent = jobs.pop(tried), *jobs.values()
        for _ in range(SUSPECT_AFTER + 1, MAX_ATTEMPTS):
            assert await die_when_submitted(Server(tmp_path), 1) == [tried], "it is tried alone"
        async with started(Server(tmp_path)) as last:
            failed = await find(last, guilty)
            assert failed.error is not None
            assert (failed.status, failed.error.code) == ("failed", "generation_failed")
            assert str(failed.error) == (
                "4 servers in a row ended while they computed this completion, without a token of it"
            )
            await last.finish(await find(last, innocent))
            assert [request.prompt_token_ids for request in last.engine.submitted] == [tuple(jobs)]
        async with started(Server(tmp_path)) as after:
            assert ((await find(after, guilty)).status, after.engine.submitted) == ("failed", [])

    run(test())


def test_a_suspect_that_makes_a_token_is_cleared_and_lets_the_others_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            jobs = {ord(prompt): await first.begin(prompt=prompt) for prompt in "ab"}
        for _ in range(SUSPECT_AFTER):
            await die_when_submitted(Server(tmp_path), 2)
        async with started(Server(tmp_path)) as second:
            [tried] = [request.prompt_token_ids[0] for request in await second.submitted()]
            await second.advance(await find(second, jobs[tried]), 1)
            await asyncio.to_thread(second.engine.wait_for, lambda: len(second.engine.submitted) == 2)
        async with started(Server(tmp_path)) as third:
            [request, *_] = await third.submitted()
            assert request.prompt_token_ids[0] != tried, "the one that had no token"

    run(test())


def test_one_that_only_waited_while_servers_ended_is_not_blamed(tmp_path: Path) -> None:
    """The engine computes eight choices at once: those of two jobs. The third is submitted when one of them ends."""

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            jobs = {ord(prompt): await first.begin(prompt=prompt, n=4, max_tokens=MAX_ATTEMPTS + 2) for prompt in "abc"}
        for _ in range(MAX_ATTEMPTS + 1):
            async with started(Server(tmp_path)) as server:
                begun = {request.prompt_token_ids[0] for request in await _all_submitted(server, 8)}
                assert len(begun) == 2, "negative control: their servers end as often"
                await server.advance(await find(server, jobs[min(begun)]), 1)
        [waiting] = {*jobs} - begun
        async with started(Server(tmp_path)) as server:
            assert waiting not in {request.prompt_token_ids[0] for request in await _all_submitted(server, 8)}
            await server.finish(last := await find(server, jobs[waiting]))
            assert last.status == "completed"

    run(test())


def test_one_that_only_waited_for_blocks_while_servers_ended_is_not_blamed(tmp_path: Path) -> None:
    """The cache holds the prompts of two jobs. The third is submitted when one of them ends."""
    info = replace(INFO, num_blocks=16, max_num_seqs=8)

    def server() -> Server:
        return Server(tmp_path, engine=FakeEngineClient(auto=False, info=info))

    async def test() -> None:
        async with started(server()) as first:
            jobs = {ord(text): await first.begin(prompt=text * 100, max_tokens=MAX_ATTEMPTS + 2) for text in "abc"}
        for _ in range(MAX_ATTEMPTS + 1):
            async with started(server()) as next_one:
                begun = {request.prompt_token_ids[0] for request in await _all_submitted(next_one, 2)}
                assert len(begun) == 2, "negative control: their servers end as often"
                await next_one.advance(await find(next_one, jobs[min(begun)]), 1)
        [waiting] = {*jobs} - begun
        async with started(server()) as last:
            assert waiting not in {request.prompt_token_ids[0] for request in await _all_submitted(last, 2)}
            await last.finish(job := await find(last, jobs[waiting]))
            assert job.status == "completed"

    run(test())


def test_the_seats_of_choices_that_stop_early_are_taken_at_once(tmp_path: Path) -> None:
    """Seven of eight choices end by a stop string, of which the engine knows nothing, while the last goes on."""

    def reply(request: Request) -> Iterator[TokenOutput]:
        return say("a" if request.choice_index == 0 else "z")(request)

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            jobs = {ord("a"): await first.begin(prompt="a", n=8, stop="z", max_tokens=50)}
            jobs[ord("b")] = await first.begin(prompt="b", n=8, stop="z", max_tokens=50)
        async with started(Server(tmp_path, engine=FakeEngineClient(reply, auto=False))) as second:
            begun = (await _all_submitted(second, 8))[0].prompt_token_ids[0]
            assert len(second.engine.submitted) == 8, "negative control: the other waits"
            await second.advance(await find(second, jobs[begun]), 1)
            assert len(await _all_submitted(second, 16)) == 16

    run(test())


def test_a_server_that_ends_in_order_blames_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        job = None
        for _ in range(MAX_ATTEMPTS + 2):
            async with started(Server(tmp_path)) as server:
                job = job or await server.begin()
                await server.submitted()
                await server.jobs.suspend()
        async with started(Server(tmp_path)) as server:
            assert job is not None
            await server.finish(await find(server, job))
            assert (await find(server, job)).status == "completed"

    run(test())


def test_what_an_earlier_server_made_is_read_page_by_page_and_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[tuple[int, int]] = []
    batches = SqliteJobStore.batches

    async def spy(self: SqliteJobStore, completion_id: str, first: int, limit: int) -> list[OutputBatch]:
        pages.append((first, limit))
        return await batches(self, completion_id, first, limit)

    async def test() -> None:
        async with started(Server(tmp_path)) as first:
            job = await first.begin(max_tokens=200)
            await first.advance(job, 150)
        monkeypatch.setattr(SqliteJobStore, "batches", spy)
        async with started(Server(tmp_path)) as second:
            assert pages == [(first, READ_LIMIT) for first in (0, 64, 128)]
            again = await find(second, job)
            await second.submitted()
            assert again.running is not None
            assert (again.running.num_stored, again.running.batches) == (150, [])
            reader = asyncio.create_task(second.read(again))
            await second.finish(again)
            assert [token for output in await reader for token in output.token_ids] == [*(b"abc" * 67)[:200]]
            assert await second.text(again) == ("abc" * 67)[:200]

    run(test())


def test_the_prompt_is_kept_once_as_tokens_and_what_a_template_read_is_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            job = await server.begin(prompt="secret " * 10)
            record = await server.store.read_record(job.completion_id)
            assert "secret" not in record.body
            assert bytes(record.prompts[0]) == b"secret " * 10
            assert json.loads(record.body)["seed"] == 1
        fields = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": "y" * 100}, "n": 2}
        request = BackgroundRequest.of("/v1/chat/completions", fields, None, None, 0.0)
        assert request.fields == {
            "messages": [{"role": "user", "content": ""}],
            "chat_template_kwargs": {},
            "n": 2,
        }

    run(test())
