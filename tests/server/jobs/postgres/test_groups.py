"""Writes that are grouped into statements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from psycopg.errors import ForeignKeyViolation

from gptserve.server.jobs.postgres.groups import Group
from gptserve.server.jobs.store import JobStoreError, LeaseLostError
from tests.server.serving import LIMIT_S

Items = Sequence[tuple[str, int]]


class Database:
    """Writes when `opened`; `statements` are what it was given. It knows nothing of the ids in `refused`."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.begun = asyncio.Event()
        self.statements: list[list[tuple[str, int]]] = []
        self.refused: set[str] = set()
        self.deleted: set[str] = set()

    async def write(self, items: Items) -> set[str]:
        self.statements.append(list(items))
        self.begun.set()
        await self.opened.wait()
        if self.deleted & {completion_id for completion_id, _ in items}:
            raise ForeignKeyViolation
        return {completion_id for completion_id, _ in items} - self.refused


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


async def added(group: Group[int], *items: tuple[str, int]) -> list[asyncio.Task[None]]:
    """Return the tasks that add the items, which have begun."""
    tasks = [asyncio.create_task(group.add(*item)) for item in items]
    await asyncio.sleep(0)
    return tasks


def test_what_comes_during_a_statement_forms_the_next_one() -> None:
    async def test() -> None:
        database = Database()
        group = Group(database.write)
        tasks = await added(group, ("a", 0))
        await database.begun.wait()
        tasks += await added(group, ("b", 0), ("c", 0))
        tasks += await added(group, ("d", 0))
        database.opened.set()
        await asyncio.gather(*tasks)
        assert database.statements == [[("a", 0)], [("b", 0), ("c", 0), ("d", 0)]]

    run(test)


def test_what_comes_before_the_next_statement_may_begin_is_in_it_and_what_is_urgent_begins_it() -> None:
    async def test() -> None:
        database = Database()
        group = Group(database.write, interval_s=3600)
        database.opened.set()
        await group.add("a", 0)
        tasks = await added(group, ("a", 1), ("b", 0))
        for _ in range(9):
            await asyncio.sleep(0)
        assert database.statements == [[("a", 0)]]
        await group.add("c", 0, is_urgent=True)
        await asyncio.gather(*tasks)
        assert database.statements[1:] == [[("a", 1), ("b", 0), ("c", 0)]]
        tasks = await added(group, ("a", 2))
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(database.statements) == 2, "what was urgent once hurries nothing later"
        await group.add("a", 3, is_urgent=True)

    run(test)


def test_what_nothing_urgent_follows_is_written_in_time() -> None:
    async def test() -> None:
        database = Database()
        group = Group(database.write, interval_s=0.01)
        database.opened.set()
        for n in range(3):
            await group.add("a", n)
        assert database.statements == [[("a", 0)], [("a", 1)], [("a", 2)]]

    run(test)


def test_of_a_statement_what_was_not_written_is_lost_and_the_rest_is_not() -> None:
    async def test() -> None:
        database = Database()
        group = Group(database.write)
        database.opened.set()
        database.refused = {"b"}
        a, b, c = await asyncio.gather(*await added(group, ("a", 0), ("b", 0), ("c", 0)), return_exceptions=True)
        assert (a, c) == (None, None)
        assert isinstance(b, LeaseLostError)

    run(test)


def test_beside_one_that_was_deleted_each_is_written_alone() -> None:
    async def test() -> None:
        database = Database()
        group = Group(database.write)
        database.opened.set()
        database.deleted = {"b"}
        a, b, c = await asyncio.gather(*await added(group, ("a", 0), ("b", 0), ("c", 0)), return_exceptions=True)
        assert (a, c) == (None, None)
        assert isinstance(b, LeaseLostError)
        assert database.statements == [[("a", 0), ("b", 0), ("c", 0)], [("a", 0)], [("b", 0)], [("c", 0)]]

    run(test)


def test_each_of_a_statement_that_failed_has_an_error_of_its_own() -> None:
    async def test() -> None:
        async def fail(_: Items) -> set[str]:
            raise JobStoreError("it is broken")

        group = Group(fail)
        a, b = await asyncio.gather(*await added(group, ("a", 0), ("b", 0)), return_exceptions=True)
        assert isinstance(a, JobStoreError)
        assert isinstance(b, JobStoreError)
        assert a is not b
        assert str(a) == str(b) == "it is broken"

    run(test)


def test_what_nobody_waits_for_any_more_is_written_before_the_wait_ends() -> None:
    async def test() -> None:
        database = Database()
        group = Group(database.write)
        [task] = await added(group, ("a", 0))
        await database.begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        database.opened.set()
        await group.wait()
        assert database.statements == [[("a", 0)]]

    run(test)
