"""What a replica does for clients that fall silent, and for a client whose messages may be lost."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gptserve.engine.process.fleet import Computed, ReplicaLostError
from gptserve.engine.process.fleet_replica import LEASE_S, FleetReplica
from gptserve.engine.process.thread_client import ThreadClient
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import ENDLESS, Gate, hurried, make_request, run, run_hurried, started, until_idle


@asynccontextmanager
async def replica_of(gate: Gate) -> AsyncIterator[tuple[FleetReplica, ThreadClient]]:
    async with started(ThreadClient(functools.partial(fake.load, gate.path))) as engine:
        assert isinstance(engine, ThreadClient)
        yield FleetReplica(engine, "one"), engine


def test_the_requests_of_a_client_that_falls_silent_are_aborted(gate: Gate) -> None:
    async def test() -> None:
        async with replica_of(gate) as (replica, engine):
            stream = replica.compute("client", [make_request("a", ENDLESS)])
            await anext(stream)
            watching = asyncio.create_task(replica.watch())
            async with hurried(lambda: True):
                with pytest.raises(ReplicaLostError) as lost:
                    async for _ in stream:
                        pass
            assert str(lost.value) == f"replica one has not heard of its client for {LEASE_S:g} s"
            await until_idle(engine)
            watching.cancel()

    run_hurried(test())


def test_all_calls_of_a_client_end_with_the_one_that_carried_their_outputs(gate: Gate) -> None:
    async def test() -> None:
        async with replica_of(gate) as (replica, engine):
            carrier, other, stranger = (
                replica.compute(client, [make_request(name, ENDLESS)])
                for client, name in (("client", "a"), ("client", "b"), ("stranger", "c"))
            )
            assert [(await anext(stream)).outputs for stream in (carrier, other, stranger)] == [(), (), ()]
            found: set[str] = set()
            while found != {"a", "b"}:
                found |= {output.request_id for output in (await anext(carrier)).outputs}
            await carrier.aclose()
            with pytest.raises(ReplicaLostError) as lost:
                await anext(other)
            assert str(lost.value) == "replica one lost the call that carried its outputs"
            computed: Computed = await anext(stranger)
            assert {output.request_id for output in computed.outputs} == {"c"}
            replica.abort("stranger", ["c", "never there"])
            replica.abort("client", ["a"])
            async for _ in stranger:
                pass
            await until_idle(engine)

    run(test())


def test_calls_whose_outputs_were_carried_end_well_after_the_one_that_carried_them(gate: Gate) -> None:
    async def test() -> None:
        async with replica_of(gate) as (replica, _):
            carrier = replica.compute("client", [make_request("a", 1)])
            assert (await anext(carrier)).outputs == ()
            other = replica.compute("client", [make_request("b", 3)])
            assert (await anext(other)).outputs == ()
            outputs = [output async for computed in carrier for output in computed.outputs]
            assert [output.request_id for output in outputs if output.finish_reason] == ["a", "b"]
            next_one = replica.compute("client", [make_request("c", 1)])
            assert (await anext(next_one)).outputs == ()
            assert [computed async for computed in other] == []
            [computed] = [computed async for computed in next_one]
            assert [output.request_id for output in computed.outputs] == ["c"]

    run(test())


def test_an_engine_that_dies_ends_the_calls_as_a_lost_replica(gate: Gate) -> None:
    async def test() -> None:
        async with replica_of(gate) as (replica, _):
            stream = replica.compute("client", [make_request("a", first=fake.RAISE)])
            with pytest.raises(ReplicaLostError, match=r"^replica one: the engine raised ValueError: told to raise"):
                async for _ in stream:
                    pass
            with pytest.raises(ReplicaLostError, match=r"^replica one cannot compute this: the engine raised"):
                await anext(replica.compute("client", [make_request("b")]))

    run(test())
