"""A fleet in this process: replicas are engines in threads, which a test may lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.fleet import Computed, ReplicaLostError
from gptserve.engine.process.fleet_replica import FleetReplica
from gptserve.engine.process.loop import EngineFactory
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.engine.scheduling.block_map import BlockMap


class LocalFleet:
    """Gives each submit to the next replica that was not lost.

    `asked` has it say once what all replicas do, and without `is_open` none takes a request. From those in `silent`
    nothing comes. `num_messages` counts what all have sent.
    """

    def __init__(self, *factories: EngineFactory) -> None:
        self.engines = [ThreadClient(factory) for factory in factories]
        self.replicas = [FleetReplica(engine, str(i)) for i, engine in enumerate(self.engines)]
        self.lost: dict[int, asyncio.Event] = {}
        self.asked = asyncio.Event()
        self.silent: set[int] = set()
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.num_messages = 0
        self.next = 0

    async def start(self) -> EngineInfo:
        for engine in self.engines:
            await engine.start()
        self.lost = {i: asyncio.Event() for i in range(len(self.engines))}
        return self.engines[0].info

    def lose(self, number: int) -> None:
        """Fail the calls of a replica, whose engine then computes for nobody."""
        self.lost[number].set()

    def is_lost(self, number: int) -> bool:
        return self.lost[number].is_set() or number in self.silent

    async def compute(self, requests: Sequence[AnyRequest]) -> AsyncGenerator[Computed]:
        await self.is_open.wait()
        alive = [i for i in self.lost if not self.is_lost(i) and self.engines[i].is_alive]
        if not alive:
            raise await self.engines[0].wait_until_dead()
        number = alive[self.next % len(alive)]
        self.next += 1
        lost = asyncio.ensure_future(self.lost[number].wait())
        async with aclosing(self.replicas[number].compute("client", requests)) as stream:
            while True:
                arriving = asyncio.ensure_future(anext(stream, None))
                try:
                    await asyncio.wait([arriving, lost], return_when=asyncio.FIRST_COMPLETED)
                    if lost.done():
                        raise ReplicaLostError(f"replica {number} is lost")
                    computed = arriving.result()
                finally:
                    if not arriving.done():
                        arriving.cancel()
                        await asyncio.wait([arriving])
                if computed is None:
                    lost.cancel()
                    return
                if number in self.silent:
                    await asyncio.Future()
                self.num_messages += 1
                yield computed

    async def watch(self) -> AsyncGenerator[Sequence[Computed]]:
        while True:
            await self.asked.wait()
            self.asked.clear()
            yield [replica.touch("client") for i, replica in enumerate(self.replicas) if not self.is_lost(i)]

    def abort(self, request_ids: Sequence[str]) -> None:
        for replica in self.replicas:
            replica.abort("client", request_ids)

    async def look(self) -> BlockMap:
        return await self.replicas[0].look()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
