"""Requests that are being planned: their templates, tokenizers and grammars run. They are counted, bounded, take turns.

A route enters a `Place` before any work is done for a request, and leaves it with a plan or without one. `service.py`
has one `Planning`. Knows neither plans nor routes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from gptserve.engine.runner.host_cpus import usable_cpus
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.turns import Turns
from gptserve.weights.workers import NUM_WORKERS

MAX_PLANNING_BYTES = 64 * 2**20
"""Of bodies; parsed, a chat of many short messages takes ten times as much."""

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(eq=False, slots=True)
class Place:
    """A request while it is planned. started_at is by time.perf_counter, `receive` tells when its client hangs up.

    num_bytes of bodies are held for it, num_requests count as waiting; `Planning` changes both. is_filler: it is for
    fillers, which do not count among the requests of their owner and leave half of the queue to others.
    """

    owner: str | None = None
    started_at: float = field(default_factory=time.perf_counter)
    timeout_ms: int | None = None
    receive: Receive | None = None
    is_filler: bool = False
    num_bytes: int = 0
    num_requests: int = 0

    def remaining_s(self, limit_s: float | None) -> float | None:
        """Return the seconds left of a limit that began with the request; None without one."""
        return None if limit_s is None else self.started_at + limit_s - time.perf_counter()

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Leave the block with an error when the time of the request is over or its client hangs up.

        Raises ServiceError or ClientDisconnect.
        """
        limit_s = None if self.timeout_ms is None else self.timeout_ms / 1000
        limit, watch = asyncio.timeout(self.remaining_s(limit_s)), None
        is_gone = asyncio.Event()
        if self.receive is not None:
            watch = asyncio.create_task(_wait_until_gone(self.receive, is_gone, limit))
        try:
            async with limit:
                yield
        except TimeoutError:
            if is_gone.is_set():
                raise ClientDisconnect from None
            if limit.expired():
                message = f"timeout_ms: the request was still being prepared after {self.timeout_ms} ms"
                raise ServiceError("queue_timeout", message, param="timeout_ms") from None
            raise
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.wait([watch])  # two must not receive at once


class Planning:
    """The places of one server. Owners take turns at the workers, and together their bodies are bounded.

    Where there are several owners, none holds more than half of the bytes, nor the last worker that the machine has a
    CPU for. An owner that holds nothing else may always have one request, of any size.
    """

    def __init__(
        self, has_several_owners: Callable[[], bool] = lambda: False, max_queue_time_s: float | None = None
    ) -> None:
        self._has_several_owners = has_several_owners
        self._max_queue_time_s = max_queue_time_s
        self._most_of_one = max(1, min(NUM_WORKERS, usable_cpus()) - 1)
        self._turns = Turns(NUM_WORKERS, self._share)
        self._places: set[Place] = set()
        self._num_bytes = Counter[str | None]()
        self.num_requests = 0
        """How many requests are being planned; a choice is one."""

    def enter(self, place: Place) -> None:
        """Count a place, until it leaves."""
        self._places.add(place)

    def leave(self, place: Place) -> bool:
        """Count a place no more; return whether it was there."""
        if place not in self._places:
            return False
        self._places.remove(place)
        self.num_requests -= place.num_requests
        self._num_bytes[place.owner] -= place.num_bytes
        if not self._num_bytes[place.owner]:
            del self._num_bytes[place.owner]
        return True

    def hold(self, place: Place, num_bytes: int) -> None:
        """Count bytes that are held for a place that has entered. Raises ServiceError."""
        own, held = self._num_bytes[place.owner], self._num_bytes.total()
        has_others = own > place.num_bytes
        if has_others and held + num_bytes > MAX_PLANNING_BYTES:
            rule = f"requests that are being prepared may have {MAX_PLANNING_BYTES} bytes"
            raise ServiceError("queue_full", f"{rule}: they have {held}, got {num_bytes} more", retry_after_s=1)
        most = MAX_PLANNING_BYTES // 2
        if has_others and own + num_bytes > most and self._has_several_owners():
            rule = f"requests of a key that are being prepared may have {most} bytes"
            counts = f"those of {place.owner!r} have {own}, got {num_bytes} more"
            raise ServiceError("rate_limit_exceeded", f"{rule}: {counts}", retry_after_s=1)
        place.num_bytes += num_bytes
        self._num_bytes[place.owner] += num_bytes

    def take(self, place: Place, num_requests: int) -> bool:
        """Count the requests of a place as waiting until it leaves; return whether it is there."""
        if place not in self._places:
            return False
        place.num_requests += num_requests
        self.num_requests += num_requests
        return True

    async def run(self, place: Place, call: Callable[..., Result], *arguments: object) -> Result:
        """Make a call that may wait for a worker process, in a thread, when it is the owner's turn; return its result.

        When the time of the request is over or its client hangs up, nobody waits any more, but the call itself goes
        on and keeps its slot. Raises ServiceError, ClientDisconnect and what the call raises.
        """
        async with place.keeping():
            await self._turn(place)
            work = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
            work.add_done_callback(lambda _: self._turns.give_back(place.owner))
            return await asyncio.shield(work)

    async def _turn(self, place: Place) -> None:
        limit = asyncio.timeout(place.remaining_s(self._max_queue_time_s))
        try:
            async with limit:
                await self._turns.take(place.owner)
        except TimeoutError:
            message = f"the request was not admitted within {self._max_queue_time_s} s"
            raise ServiceError("queue_timeout", message) from None

    def _share(self) -> int:
        return self._most_of_one if self._has_several_owners() else NUM_WORKERS


async def _wait_until_gone(receive: Receive, is_gone: asyncio.Event, limit: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    is_gone.set()
    limit.reschedule(asyncio.get_running_loop().time())
