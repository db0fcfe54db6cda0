"""Readers of a background job: how much at a time, in turn with others, to the end or to an error."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import READ_LIMIT, BackgroundRequest
from tests.server.fake_engine import FakeEngineClient
from tests.server.jobs.server import Server, found, run, started


def test_a_reader_takes_a_bounded_piece_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(Server(tmp_path)) as server:
            job = await server.begin(max_tokens=200)
            await server.advance(job, 2 * READ_LIMIT)
            late = server.jobs.reader(job)
            pieces = aiter(late)
            assert len(await anext(pieces)) == READ_LIMIT
            await server.finish(job)
            assert len(await anext(pieces)) == READ_LIMIT
            late.close()
            assert [outputs async for outputs in pieces] == []

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
            reader = aiter(server.jobs.reader(job))
            for _ in range(3):
                asyncio.get_running_loop().call_soon(turns.append, len(pieces))
                pieces.append(await anext(reader))
            assert [len(piece) for piece in pieces] == [READ_LIMIT] * 3
            assert turns == [0, 1, 2]

    run(test())


def test_the_digest_of_a_request_is_the_same_however_it_was_sent_and_in_every_version() -> None:
    fields: dict[str, object] = {"prompt": ["é", [1, 2.5]], "n": 1, "logit_bias": {"2": -1, "10": None}, "echo": True}
    turned = {"echo": True, "logit_bias": {"10": None, "2": -1}, "n": 1, "prompt": ["é", [1, 2.5]]}
    digests = {BackgroundRequest.of("/v1/completions", f, None, "k", 0.0).digest for f in (fields, turned)}
    spelled = '{"echo":true,"logit_bias":{"10":null,"2":-1},"n":1,"prompt":["\\u00e9",[1,2.5]]}'
    assert digests == {hashlib.sha256(f"/v1/completions\n{spelled}".encode()).hexdigest()}


def test_a_reader_of_a_result_whose_time_is_over_is_told_so() -> None:
    async def test() -> None:
        async with started(Server(result_ttl_s=60.0)) as server:
            job = await server.begin(max_tokens=2 * READ_LIMIT)
            await server.advance(job, 2 * READ_LIMIT)
            await server.jobs.settle()
            reader = aiter(server.jobs.reader(job))
            assert len(await anext(reader)) == READ_LIMIT
            server.clock.now += 61.0
            assert not await found(server, job)
            server.jobs.expire()
            await server.jobs.settle()
            with pytest.raises(ServiceError) as raised:
                await anext(reader)
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
                with pytest.raises(ServiceError, match="it broke"):
                    await server.read(job)
            assert job.error is not None
            assert job.error.__traceback__ is None

    run(test())
