"""Stores of one server after another, each opened when that of the one before is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from gptserve.server.jobs.postgres.store import PostgresJobStore


class _Closable(Protocol):
    async def close(self) -> None: ...


Store = TypeVar("Store", bound=_Closable)
LIMIT_S = 20


def use_stores(
    test: Callable[[Callable[[], Awaitable[Store]]], Awaitable[None]],
    open_store: Callable[[AsyncExitStack], Awaitable[Store]],
) -> None:
    """Run a test with a function that makes the next server's store; open_store may leave more to be closed."""

    async def run() -> None:
        async with AsyncExitStack() as last:

            async def make() -> Store:
                await last.aclose()
                store = await open_store(last)
                last.push_async_callback(store.close)
                return store

            await test(make)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


async def open_jobs(url: str, last: AsyncExitStack) -> PostgresJobStore:
    """Open the database that other stores lie beside."""
    jobs = PostgresJobStore(url)
    last.push_async_callback(jobs.close)
    await jobs.open()
    return jobs
