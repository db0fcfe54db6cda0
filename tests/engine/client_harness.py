"""What the tests of the engine's clients share: short requests, ways to read a stream, a gate."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gptserve.engine.process.client import EngineClient, TokenStream
from gptserve.engine.request import Request, SamplingParams, TokenOutput
from tests.engine import fake_step_engine as fake

LIMIT_S = 100.0  # within that of a test
ENDLESS = 90_000
MakeClient = Callable[..., EngineClient]


class Gate:
    """A FIFO at which the fake waits; each `open` lets it pass once."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._fd, b".")

    def close(self) -> None:
        os.close(self._fd)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock `hurried` puts forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run_hurried(test: Coroutine[Any, Any, None]) -> None:
    """Run a test that uses `hurried`; the time limit of the whole test bounds it, as its own clock cannot."""
    with asyncio.Runner(loop_factory=HurriedLoop) as runner:
        runner.run(test)


@asynccontextmanager
async def hurried(must_hurry: Callable[[], bool]) -> AsyncIterator[None]:
    """Let the time of the event loop pass at once while the condition holds: what waits for a limit need not."""

    async def hurry() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HurriedLoop)
        while True:
            if must_hurry():
                loop.ahead_s += 2 * LIMIT_S
            await asyncio.sleep(0.001)

    task = asyncio.create_task(hurry())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing announces; `run` sets the limit."""
    while not condition():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)


@asynccontextmanager
async def started(client: EngineClient) -> AsyncIterator[EngineClient]:
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def make_request(request_id: str, max_tokens: int = 5, first: int = 1, num_prompt: int = 3, when: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, (first, when, *(0,) * num_prompt)[:num_prompt], params, seed=len(request_id))


def expected(request: Request) -> list[int]:
    return [fake.token(request, i) for i in range(request.params.max_tokens)]


async def collect(stream: TokenStream) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    async for outputs in stream:
        assert outputs
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


async def first_output(stream: TokenStream) -> TokenOutput:
    return (await anext(stream))[0]


async def first_tokens(stream: TokenStream) -> list[int]:
    """Return the tokens of all outputs that come first: when this process was slow there are several."""
    return [token for output in await anext(stream) for token in output.token_ids]


async def last_output(stream: TokenStream) -> TokenOutput:
    return [output async for outputs in stream for output in outputs][-1]


async def until_idle(client: EngineClient) -> None:
    """Wait until the engine says that it holds nothing: it says so in answer to a request that follows all others."""
    await collect(client.submit([make_request("probe", 1)]))
    while client.stats.num_running:
        await collect(client.submit([make_request("probe", 1)]))
