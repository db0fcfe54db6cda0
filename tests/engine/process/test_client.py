"""What every EngineClient promises, checked on all of them with a fake engine and once with a real one."""

from __future__ import annotations

import asyncio
import functools
import random
from pathlib import Path

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineDiedError, EngineStartError, InvalidRequestError, QueueFullError
from gptserve.engine.process.client import EngineClient, TokenStream
from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.fleet_client import FleetClient
from gptserve.engine.process.loop import EngineFactory
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.supervisor import Supervisor
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.engine.request import FinishReason
from gptserve.engine.scheduling.block_map import BlockMap
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import (
    ENDLESS,
    LIMIT_S,
    Gate,
    MakeClient,
    collect,
    expected,
    first_output,
    last_output,
    make_request,
    run,
    started,
    until_idle,
)
from tests.engine.process.local_fleet import LocalFleet


def supervise(factory: EngineFactory) -> Supervisor:
    """Return a supervisor that lets a dead engine be, as the other clients do."""
    client = functools.partial(ProcessClient, factory)
    return Supervisor(client, max_restarts=0, stall_limit_s=LIMIT_S, load_limit_s=LIMIT_S)


def join_fleet(factory: EngineFactory) -> FleetClient:
    """Return the client of a fleet of one replica that is not replaced."""
    return FleetClient(LocalFleet(factory))


@pytest.fixture(params=[pytest.param(ProcessClient, marks=pytest.mark.slow), ThreadClient, supervise, join_fleet])
def make_client(request: pytest.FixtureRequest, gate: Gate) -> MakeClient:
    return lambda **options: request.param(functools.partial(fake.load, gate.path, **options))


in_a_thread_first = pytest.mark.parametrize(
    "make_client",
    [ThreadClient, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (ProcessClient, supervise, join_fleet))],
    indirect=True,
)
"""For what does not depend on where the engine runs."""


def test_outputs_arrive_in_order_and_complete(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            request = make_request("a", 200)
            outputs = [output async for batch in client.submit([request]) for output in batch]
            assert [token for output in outputs for token in output.token_ids] == expected(request)
            assert [output.finish_reason for output in outputs] == [None] * 199 + [FinishReason.LENGTH]
            assert client.stats.num_steps == 200

    run(test())


@in_a_thread_first
def test_requests_of_one_submit_share_a_stream_and_others_do_not(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            requests = [make_request("a" * n, 10 * n) for n in range(1, 6)]
            streams = [client.submit(requests[:3]), client.submit(requests[3:4]), client.submit(requests[4:])]
            merged, *single = await asyncio.gather(*map(collect, streams))
            assert merged == {request.request_id: expected(request) for request in requests[:3]}
            assert single == [{request.request_id: expected(request)} for request in requests[3:]]

    run(test())


def test_aborted_request_ends_and_leaves_the_others_alone(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            other = make_request("other", 100)
            stream = client.submit([make_request("endless", ENDLESS), other])
            others = client.submit([make_request("bystander", 100)])
            got = [output for output in await anext(stream) if output.request_id == "other"]
            stream.abort(["endless"])
            rest = [output async for outputs in stream for output in outputs]
            assert {output.request_id for output in rest} == {"other"}
            assert [token for output in got + rest for token in output.token_ids] == expected(other)
            assert len((await collect(others))["bystander"]) == 100
            await until_idle(client)

    run(test())


@in_a_thread_first
def test_abort_is_idempotent_and_drops_what_had_arrived(make_client: MakeClient, gate: Gate) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            stream = client.submit([make_request("a", ENDLESS)])
            await first_output(stream)
            waiting = client.submit([make_request("b", 1, fake.WAIT)])
            stream.abort()  # an output of it is on the wire once the gate opens
            stream.abort()
            stream.abort(["a", "never there"])
            gate.open()
            assert await collect(stream) == {}
            assert await collect(waiting) == {"b": [fake.token(make_request("b"), 0)]}
            waiting.abort()
            await until_idle(client)

    run(test())


@in_a_thread_first
def test_request_that_fails_in_a_step_ends_alone(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            good = make_request("good", 100)
            stream = client.submit([good])
            output = await last_output(client.submit([make_request("bad", first=fake.FAIL)]))
            assert (output.finish_reason, output.error) == (FinishReason.ERROR, "told to fail")
            assert await collect(stream) == {"good": expected(good)}

    run(test())


@in_a_thread_first
def test_request_the_engine_refuses_ends_alone_with_the_reason(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            output = await last_output(client.submit([make_request("bad", first=fake.REFUSE)]))
            assert (output.finish_reason, output.error) == (FinishReason.ERROR, "prompt begins with the refused id")
            assert client.is_alive

    run(test())


@in_a_thread_first
def test_invalid_request_is_refused_with_all_that_came_along(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client(max_num_seqs=2)) as client:
            with pytest.raises(InvalidRequestError, match=r"in \[0, 100\), got 100"):
                client.submit([make_request("good"), make_request("bad", first=100)])
            assert len(await collect(client.submit([make_request("good"), make_request("better")]))) == 2

    run(test())


@in_a_thread_first
def test_full_queue_takes_all_requests_of_a_submit_or_none(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client(max_num_seqs=2, max_num_queued_reqs=1)) as client:
            stream = client.submit([make_request("a", ENDLESS), make_request("b", ENDLESS)])
            with pytest.raises(QueueFullError, match="at most 3 requests may run or wait, 2 do, got 2 more") as full:
                client.submit([make_request("c"), make_request("d")])
            assert full.value.retry_after_s >= 1
            third = client.submit([make_request("c", ENDLESS)])
            with pytest.raises(QueueFullError):
                client.submit([make_request("d")])
            stream.abort(["a"])
            assert len(await collect(client.submit([make_request("d")]))) == 1  # its running slot was free at once
            third.abort()
            stream.abort()

    run(test())


@in_a_thread_first
def test_request_id_in_use_is_our_fault(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            stream = client.submit([make_request("a", ENDLESS)])
            for requests in ([make_request("a")], [make_request("b"), make_request("b")]):
                with pytest.raises(AssertionError, match="used once"):
                    client.submit(requests)
            stream.abort()

    run(test())


def test_engine_that_raises_ends_every_stream_with_the_cause(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            stream = client.submit([make_request("a", ENDLESS), make_request("b", ENDLESS)])
            await first_output(stream)
            for victim in (client.submit([make_request("c", first=fake.RAISE)]), stream):
                with pytest.raises(EngineDiedError, match=r"^the engine raised ValueError: told to raise$"):
                    await collect(victim)
            assert str(await client.wait_until_dead()) == "the engine raised ValueError: told to raise"
            assert not client.is_alive
            with pytest.raises(EngineDiedError, match="told to raise"):
                client.submit([make_request("d")])
            stream.abort()

    run(test())


def test_close_ends_streams_and_is_no_death(make_client: MakeClient) -> None:
    async def test() -> None:
        client = make_client()
        await client.start()
        assert client.is_alive
        stream = client.submit([make_request("a", ENDLESS)])
        reader, death = asyncio.create_task(collect(stream)), asyncio.create_task(client.wait_until_dead())
        await asyncio.gather(client.close(), client.close())
        await client.close()
        with pytest.raises(EngineDiedError, match="the engine was closed"):
            await reader
        with pytest.raises(EngineDiedError, match="the engine was closed"):
            client.submit([make_request("b")])
        assert not client.is_alive
        assert not death.done()
        death.cancel()

    run(test())


def test_200_clients_that_hang_up_leave_nothing_in_client_or_engine(make_client: MakeClient) -> None:
    dice = random.Random(0)

    async def hang_up(client: EngineClient, number: int) -> None:
        requests = [make_request(f"{number}-{i}", dice.randint(1, 60)) for i in range(dice.randint(1, 3))]
        stream = client.submit(requests)
        try:
            for _ in range(dice.randint(0, 30)):
                await anext(stream, None)
        finally:
            stream.abort()

    async def test() -> None:
        async with started(make_client(max_num_seqs=600)) as client:
            async with asyncio.TaskGroup() as clients:
                for number in range(200):
                    clients.create_task(hang_up(client, number))
                    await asyncio.sleep(0)
            await until_idle(client)
            full = [make_request(str(number)) for number in range(600)]
            assert len(await collect(client.submit(full))) == 600  # every running slot is free

    run(test())


def test_event_loop_stays_free_while_the_engine_does_not_listen(make_client: MakeClient, gate: Gate) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            stuck = client.submit([make_request("stuck", 1, fake.WAIT)])
            streams = [client.submit([make_request(f"{i}", 1, num_prompt=5_000)]) for i in range(1_000)]
            assert client.stats.num_steps == 0
            gate.open()
            await collect(stuck)
            assert all([len(await collect(stream)) == 1 for stream in streams])

    run(test())


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("loading", "cause"),
    [
        ("refuses", r"^config.json: n_layer must be at least 1, got 0$"),
        ("raises", r"^the engine raised ZeroDivisionError: told to raise$"),
    ],
)
def test_engine_that_cannot_load_fails_the_start_with_the_cause(
    make_client: MakeClient, loading: str, cause: str
) -> None:
    async def test() -> None:
        client = make_client(loading=loading)
        with pytest.raises(EngineStartError, match=cause):
            await client.start()
        assert not client.is_alive
        with pytest.raises(EngineDiedError, match=cause):
            client.submit([make_request("a")])

    run(test())  # without close: a failed start leaves nothing


@in_a_thread_first
def test_close_before_start_forbids_it(make_client: MakeClient) -> None:
    async def test() -> None:
        client = make_client()
        await client.close()
        with pytest.raises(EngineStartError, match="the engine was closed"):
            await client.start()
        with pytest.raises(EngineDiedError):
            client.submit([make_request("a")])

    run(test())


def test_close_ends_a_start_under_way(make_client: MakeClient, gate: Gate) -> None:
    async def test() -> None:
        client = make_client(loading="waits")
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        with pytest.raises(EngineDiedError, match="not been started"):
            client.submit([make_request("a")])
        closing = asyncio.create_task(client.close())
        if isinstance(client, ThreadClient | FleetClient):
            gate.open()  # a thread cannot be killed
        await closing
        with pytest.raises(EngineStartError, match="the engine was closed"):
            await starting

    run(test())


def test_cancelled_start_can_be_closed(make_client: MakeClient, gate: Gate) -> None:
    async def test() -> None:
        client = make_client(loading="waits")
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        starting.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await client.close()

    run(test())


def test_real_engine_answers_alike_in_both_clients(tiny_gpt2: Path) -> None:
    async def tokens(client: EngineClient) -> dict[str, list[int]]:
        async with started(client):
            return await collect(client.submit([make_request(name, 20) for name in ("a", "bc", "def")]))

    async def test() -> None:
        factory = functools.partial(load_engine, EngineConfig(tiny_gpt2, num_blocks=64))
        in_process, in_thread = await tokens(ProcessClient(factory)), await tokens(ThreadClient(factory))
        assert in_process == in_thread
        assert [len(ids) for ids in in_process.values()] == [20, 20, 20]

    run(test())


@in_a_thread_first
def test_expired_requests_end_with_what_they_had_and_cost_nothing_more(make_client: MakeClient) -> None:
    async def test() -> None:
        async with started(make_client()) as client:
            requests = [make_request("brief", 1), make_request("b", ENDLESS), make_request("a", ENDLESS)]
            stream = client.submit(requests)
            outputs = list(await anext(stream))
            stream.expire()
            stream.expire()
            async for arrived in stream:
                outputs += arrived
            ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
            assert ends == {
                "brief": FinishReason.LENGTH,
                "a": FinishReason.TIMEOUT,
                "b": FinishReason.TIMEOUT,
            }
            assert [o.request_id for o in outputs[-2:]] == ["a", "b"], "in an order that does not change"
            assert outputs[-1].token_ids == ()
            await until_idle(client)

    run(test())


@in_a_thread_first
def test_a_stream_that_failed_does_not_expire(make_client: MakeClient) -> None:
    async def test() -> None:
        reasons = []

        async def read(stream: TokenStream) -> None:
            async for outputs in stream:
                reasons.extend(output.finish_reason for output in outputs)

        async with started(make_client()) as client:
            stream = client.submit([make_request("a", ENDLESS)])
        stream.expire()
        with pytest.raises(EngineDiedError, match="the engine was closed"):
            await read(stream)
        assert FinishReason.TIMEOUT not in reasons

    run(test())


def test_a_look_shows_the_blocks_between_two_steps_whether_the_engine_is_busy_or_not(make_client: MakeClient) -> None:
    async def look(client: EngineClient) -> BlockMap:
        found: asyncio.Future[BlockMap] = asyncio.get_running_loop().create_future()
        client.look(found.set_result)
        return await found

    async def test() -> None:
        async with started(make_client()) as client:
            assert await look(client) == BlockMap(1, "0")
            stream = client.submit([make_request("a", ENDLESS)])
            await first_output(stream)
            assert await look(client) == BlockMap(1, "1")
            stream.abort()
            await until_idle(client)

    run(test())
