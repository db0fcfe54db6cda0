"""Requests go on at their next token at another replica, whichever one is lost and whenever."""

from __future__ import annotations

import asyncio
import functools

import pytest

from gptserve.engine.errors import DeathKind, EngineDiedError
from gptserve.engine.process.fleet_client import FleetClient
from gptserve.engine.request import FinishReason
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import ENDLESS, Gate, collect, expected, make_request, run, started, until, until_idle
from tests.engine.process.local_fleet import LocalFleet


def make_fleet(gate: Gate, num_replicas: int = 2, **options: object) -> LocalFleet:
    return LocalFleet(*[functools.partial(fake.load, gate.path, **options)] * num_replicas)


def test_streams_of_a_lost_replica_go_on_at_another_one(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate)
        async with started(FleetClient(fleet)) as client:
            requests = [make_request("a" * n, 300) for n in range(1, 17)]
            streams = [client.submit(requests[i : i + 2]) for i in range(0, 16, 2)]
            firsts = [await anext(stream) for stream in streams]
            fleet.lose(0)
            rests = await asyncio.gather(*map(collect, streams))
            found: dict[str, list[int]] = {}
            for first, rest in zip(firsts, rests, strict=True):
                for output in first:
                    found.setdefault(output.request_id, []).extend(output.token_ids)
                for request_id, token_ids in rest.items():
                    found.setdefault(request_id, []).extend(token_ids)
            assert found == {request.request_id: expected(request) for request in requests}
            assert client.is_alive

    run(test())


def test_an_aborted_choice_leaves_its_siblings_whole(gate: Gate) -> None:
    async def test() -> None:
        async with started(FleetClient(make_fleet(gate))) as client:
            requests = [make_request("a" * n, 200) for n in range(1, 4)]
            stream = client.submit(requests)
            first = await anext(stream)
            stream.abort(["aa"])
            rest = await collect(stream)
            for request in (requests[0], requests[2]):
                name = request.request_id
                got = [token for output in first if output.request_id == name for token in output.token_ids]
                assert got + rest[name] == expected(request)
            assert "aa" not in rest

    run(test())


def test_a_request_that_replicas_die_of_ends_alone(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate, 5)
        async with started(FleetClient(fleet)) as client:
            stream = client.submit([make_request("poison", 5, fake.WAIT)])
            lost = fleet.lost
            for _ in range(4):
                await until(lambda: any(not lost[i].is_set() and r._live for i, r in enumerate(fleet.engines)))
                busy = next(i for i, r in enumerate(fleet.engines) if not lost[i].is_set() and r._live)
                fleet.lose(busy)
            (output,) = await anext(stream)
            assert output.finish_reason is FinishReason.ERROR
            assert str(output.error).startswith("replicas died each time they computed this request; the last time: ")
            closing = asyncio.create_task(client.close())
            await until(lambda: gate.open() or closing.done())  # an engine may read several bytes at once

    run(test())


def test_a_replica_with_other_numbers_takes_over_nothing(gate: Gate) -> None:
    async def test() -> None:
        fleet = LocalFleet(
            functools.partial(fake.load, gate.path), functools.partial(fake.load, gate.path, fingerprint="other")
        )
        async with started(FleetClient(fleet)) as client:
            stream = client.submit([make_request("a", 100_00)])
            await anext(stream)
            fleet.lose(0)
            with pytest.raises(EngineDiedError) as died:
                await collect(stream)
            assert str(died.value) == "replica 1 computes other numbers: other instead of fake"
            assert died.value.kind is DeathKind.LOAD

    run(test())


def test_a_replica_that_is_lost_after_the_client_has_died_fails_nothing(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fleet = LocalFleet(
            functools.partial(fake.load, gate.path), functools.partial(fake.load, gate.path, fingerprint="other")
        )
        async with started(FleetClient(fleet)) as client:
            assert isinstance(client, FleetClient)
            streams = [client.submit([make_request("a", 5, fake.WAIT)]), client.submit([make_request("b", 5)])]
            for stream in streams:
                with pytest.raises(EngineDiedError, match="computes other numbers"):
                    await collect(stream)
            fleet.lose(0)
            await until(lambda: len(client._tasks) == 1)  # only the one that watches replicas is left
            closing = asyncio.create_task(client.close())
            await until(lambda: gate.open() or closing.done())

    run(test())
    assert [record.message for record in caplog.records] == []


def test_nothing_is_kept_of_replicas_that_are_gone(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate, 7)
        async with started(FleetClient(fleet)) as client:
            assert isinstance(client, FleetClient)
            stream, num_steps = client.submit([make_request("a", ENDLESS)]), 0
            for _ in range(6):
                await until(lambda: bool(client._readers))
                for _ in range(3):
                    await anext(stream)
                [replica] = client._readers
                assert client.stats.num_running == 1
                assert client.stats.num_steps > num_steps
                num_steps = client.stats.num_steps
                fleet.lose(int(replica))
                await until(lambda replica=replica: replica not in client._readers)
            await until(lambda: bool(client._readers))
            assert len(client._readers) == len(client._latest) == 1
            stream.abort()
            fleet.lose(int(next(iter(client._latest))))
            fleet.asked.set()
            await until(lambda: not client._latest)
            assert not client.is_ready
            assert client.is_alive
            assert client.stats.num_running == 0
            assert client.stats.num_steps >= num_steps

    run(test())


def test_replicas_tell_what_they_do_for_others(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate)
        async with started(FleetClient(fleet)) as client:
            strangers = [engine.submit([make_request("a", ENDLESS)]) for engine in fleet.engines]
            for stream in strangers:
                await anext(stream)
            assert not client.is_ready
            fleet.asked.set()
            await until(lambda: client.is_ready)
            assert client.stats.num_running == 2
            strangers[0].abort()
            await until_idle(fleet.engines[0])
            fleet.asked.set()
            await until(lambda: client.stats.num_running == 1)
            strangers[1].abort()

    run(test())


def test_a_message_of_a_replica_carries_what_all_requests_got_in_a_step(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate, 1)
        async with started(FleetClient(fleet)) as client:
            ends = [client.submit([make_request("a" * n, 3, fake.WAIT, 2)]) for n in range(1, 9)]
            closing = asyncio.gather(*map(collect, ends))
            await until(lambda: gate.open() or closing.done())
            assert [len(tokens) for found in closing.result() for tokens in found.values()] == [3] * 8
            assert fleet.num_messages <= len(ends) + client.stats.num_steps

    run(test())


def test_requests_wait_for_a_replica_and_one_that_is_aborted_meanwhile_is_not_computed(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate, 3)
        async with started(FleetClient(fleet)) as client:
            requests = [make_request("a", ENDLESS), make_request("b", 3_000)]
            streams = [client.submit([request]) for request in requests]
            for stream in streams:
                await anext(stream)
            fleet.is_open.clear()
            fleet.lose(0)
            fleet.lose(1)
            await until(lambda: client.stats.num_waiting == len(requests))
            streams[0].abort()
            assert client.stats.num_waiting == 1
            fleet.is_open.set()
            assert (await collect(streams[1]))["b"][-1] == expected(requests[1])[-1]
            await until(lambda: not fleet.engines[2]._live)

    run(test())


def test_requests_of_a_replica_that_falls_silent_go_on_at_another_one(gate: Gate) -> None:
    async def test() -> None:
        fleet = make_fleet(gate)
        async with started(FleetClient(fleet)) as client:
            assert isinstance(client, FleetClient)
            requests = [make_request("a", 3_000), make_request("b", ENDLESS)]
            streams = [client.submit([request]) for request in requests]
            for stream in streams:
                await anext(stream)
            fleet.silent.add(int(client._attempts[client._names["a"]].replica or ""))
            going = asyncio.create_task(collect(streams[0]))
            await until(lambda: fleet.asked.set() or going.done())
            assert going.result()["a"][-1] == expected(requests[0])[-1]
            await until(lambda: fleet.asked.set() or len(client._readers) == len(client._latest) == 1)
            streams[1].abort()

    run(test())
