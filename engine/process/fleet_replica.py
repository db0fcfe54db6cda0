"""The replica's side of a fleet: an engine with several clients, each of which gets one message a step.

What runs replicas calls it where the engine is; `FleetClient` is at the other end. It knows no transport. Torch-free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gptserve.engine.errors import EngineDiedError, InvalidRequestError
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.client import EngineClient, TokenStream
from gptserve.engine.process.fleet import Computed, ReplicaLostError
from gptserve.engine.request import TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap

LEASE_S = 12.0
"""A client that is silent for so long is dead, and its requests are aborted."""
TOUCHES_PER_LEASE = 6


class _Customer:
    """A client's requests here, and their outputs that no message has carried yet."""

    def __init__(self) -> None:
        self.seen_at = 0.0
        self.streams: set[TokenStream] = set()
        self.outputs: list[TokenOutput] = []
        self.changed = asyncio.Event()
        self.loss: str | None = None


class FleetReplica:
    """An engine that has been started, behind the methods of Fleet.

    Invariant: each client with requests here has one call of `compute` that carries their outputs. If that call ends
    early, a message may be lost, and all its calls end with ReplicaLostError.
    """

    def __init__(self, engine: EngineClient, name: str) -> None:
        self._engine = engine
        self._name = name
        self._customers: dict[str, _Customer] = {}

    async def compute(self, client: str, requests: Sequence[AnyRequest]) -> AsyncGenerator[Computed]:
        """Compute these requests; see Fleet. Raises QueueFullError, and ReplicaLostError if the engine cannot."""
        try:
            stream = self._engine.submit(requests)
        except (EngineDiedError, InvalidRequestError) as error:  # its context may be shorter, for want of memory
            raise ReplicaLostError(f"replica {self._name} cannot compute this: {error}") from error
        is_carrier = client not in self._customers
        customer = self._customers.setdefault(client, _Customer())
        self.touch(client)
        customer.streams.add(stream)
        collecting = asyncio.create_task(self._collect(client, customer, stream))
        try:
            yield self._message(())
            while is_carrier and (customer.streams or customer.outputs):
                await customer.changed.wait()
                customer.changed.clear()
                if customer.outputs and customer.loss is None:
                    outputs, customer.outputs = tuple(customer.outputs), []
                    yield self._message(outputs)
            if is_carrier and customer.loss is None:
                del self._customers[client]  # nothing is left, and nothing is lost: the next call will carry
            await collecting
            if customer.loss is not None:
                raise ReplicaLostError(customer.loss)
        finally:
            stream.abort()
            if is_carrier:
                self._lose(client, customer, f"replica {self._name} lost the call that carried its outputs")

    def abort(self, client: str, request_ids: Sequence[str]) -> None:
        """Stop computing these requests of a client; ignore those that are not here."""
        if client in self._customers:
            for stream in tuple(self._customers[client].streams):
                stream.abort(request_ids)

    def touch(self, client: str) -> Computed:
        """Learn that a client is alive; return what the engine does."""
        if client in self._customers:
            self._customers[client].seen_at = asyncio.get_running_loop().time()
        return self._message(())

    async def look(self) -> BlockMap:
        """Return the engine's blocks."""
        shown: asyncio.Future[BlockMap] = asyncio.get_running_loop().create_future()
        self._engine.look(lambda blocks: None if shown.done() else shown.set_result(blocks))
        return await shown

    async def watch(self) -> None:
        """Abort the requests of clients that have fallen silent, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LEASE_S / TOUCHES_PER_LEASE)
            for client, customer in tuple(self._customers.items()):
                if clock() - customer.seen_at > LEASE_S:
                    self._lose(client, customer, f"replica {self._name} has not heard of its client for {LEASE_S:g} s")

    def _message(self, outputs: tuple[TokenOutput, ...]) -> Computed:
        return Computed(self._name, self._engine.info.fingerprint, outputs, self._engine.stats)

    async def _collect(self, client: str, customer: _Customer, stream: TokenStream) -> None:
        try:
            async for outputs in stream:
                customer.outputs += outputs
                customer.changed.set()
        except EngineDiedError as error:
            self._lose(client, customer, f"replica {self._name}: {error}")
        finally:
            customer.streams.discard(stream)
            customer.changed.set()

    def _lose(self, client: str, customer: _Customer, why: str) -> None:
        """Forget a client; its calls that have not ended raise ReplicaLostError."""
        if self._customers.get(client) is customer:
            del self._customers[client]
            customer.loss = why
            for stream in tuple(customer.streams):
                stream.abort()
