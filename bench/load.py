"""A server under load: clients in a closed loop, or requests at moments of their own; percentiles of what they saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain
from urllib.parse import urlsplit

from bench.stream import CompletionStream, Outcome
from bench.workload import Body

LIMIT_S = 600.0
"""A request that takes longer has failed."""


class Load:
    """Sends requests to one server. Each has a connection of its own, and the time to connect counts as waiting."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        model: str,
        *,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        parts = urlsplit(url)
        self._tls = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if self._tls else 80)
        fields = {"host": parts.netloc, "content-type": "application/json", "connection": "close", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._head = f"POST {parts.path}/v1/completions HTTP/1.1\r\n{head}content-length: "
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep

    async def closed_loop(self, bodies: Iterable[Body], num_clients: int) -> list[Outcome]:
        """Let each client send a request as soon as its last one has ended, until all are sent."""
        waiting = iter(bodies)

        async def ask() -> list[Outcome]:
            return [await self._complete(body, self._clock()) for body in waiting]

        return list(chain.from_iterable(await asyncio.gather(*(ask() for _ in range(num_clients)))))

    async def open_loop(self, bodies: Sequence[Body], arrivals: Iterable[float]) -> list[Outcome]:
        """Send each request at its moment, in seconds from now, whatever became of the others."""
        start, tasks = self._clock(), []
        async with asyncio.TaskGroup() as group:
            for body, arrival in zip(bodies, arrivals, strict=False):
                await self._sleep(start + arrival - self._clock())
                tasks.append(group.create_task(self._complete(body, start + arrival)))
        return [task.result() for task in tasks]

    async def _complete(self, body: Body, due: float) -> Outcome:
        outcome = Outcome(due, num_asked=int(str(body["max_tokens"])))
        data = json.dumps(self._fields | body)
        request = f"{self._head}{len(data)}\r\n\r\n{data}".encode()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limit_s):
                transport, stream = await loop.create_connection(
                    lambda: CompletionStream(request, outcome, self._clock), *self._address, ssl=self._tls or None
                )
                try:
                    await stream.ended
                finally:
                    transport.abort()
        except TimeoutError:
            outcome.failure = f"not ended after {self._limit_s:g} s"
        except OSError as error:
            outcome.failure, outcome.message = "no connection", str(error)
        return outcome


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles in milliseconds by nearest rank: p99 is the least value that 99 % of all do not exceed."""
    ranked = sorted(seconds)
    return {f"p{p}": ranked[-(-p * len(ranked) // 100) - 1] * 1e3 for p in (50, 90, 99) if ranked}
