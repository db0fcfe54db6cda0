"""Requests go on at their next token at another replica, whichever one is lost and whenever."""

from __future__ import annotations

import asyncio
import functools

import pytest

from gptserve.engine.errors import DeathKind, EngineDiedError
from gptserve.engine.process.fleet_client import FleetClient
from gptserve.engine.request import FinishReason
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import Gate, collect, expected, make_request, run, started, until
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
