"""Writes that are grouped: those that come while one statement is under way form the next one.

So many streams together cost hardly more than one, as a round trip costs more than a row. `store.py` has a group of
each kind of write. Knows no tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from psycopg.errors import ForeignKeyViolation

from gptserve.server.jobs.store import JobStoreError, LeaseLostError

Item = TypeVar("Item")


class Group(Generic[Item]):
    """Writes of one kind, each of a completion.

    write writes some in one statement and returns the completions of those that it wrote. interval_s is the least time
    from the begin of one statement to that of the next, unless that has something urgent.
    """

    def __init__(
        self, write: Callable[[Sequence[tuple[str, Item]]], Awaitable[set[str]]], interval_s: float = 0.0
    ) -> None:
        self._write = write
        self._interval_s = interval_s
        self._pending: list[tuple[str, Item, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None  # the one that takes what is pending, or the last that did
        self._writing = asyncio.Lock()
        self._begun_at = float("-inf")
        self._hurry = asyncio.Event()

    async def add(self, completion_id: str, item: Item, *, is_urgent: bool = False) -> None:
        """Write an item, one that is urgent in the next statement at once.

        If the caller is cancelled, it is written all the same.

        Raises LeaseLostError for what was not written, or another JobStoreError.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        if self._writer is None or not self._pending:
            self._writer = asyncio.create_task(self._write_pending())
        self._pending.append((completion_id, item, written))
        if is_urgent:
            self._hurry.set()
        await asyncio.shield(written)

    async def wait(self) -> None:
        """Wait until nothing is pending."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write_pending(self) -> None:
        async with self._writing:
            clock = asyncio.get_running_loop().time
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._begun_at + self._interval_s):
                    await self._hurry.wait()
            self._hurry.clear()
            self._begun_at = clock()
            pending, self._pending = self._pending, []
            try:
                await self._write_all(pending)
            except ForeignKeyViolation:  # one of them was deleted meanwhile
                for single in pending:
                    try:
                        await self._write_all([single])
                    except ForeignKeyViolation:
                        single[2].set_exception(LeaseLostError())

    async def _write_all(self, pending: Sequence[tuple[str, Item, asyncio.Future[None]]]) -> None:
        try:
            ids = await self._write([(completion_id, item) for completion_id, item, _ in pending])
        except JobStoreError as error:
            for _, _, written in pending:
                written.set_exception(type(error)(str(error)))
            return
        for completion_id, _, written in pending:
            if completion_id in ids:
                written.set_result(None)
            else:
                written.set_exception(LeaseLostError())
