from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gptserve.server.core.turns import Turns


class Calls:
    """Calls that hold a slot until the test lets them go; `granted` has their names in the order of their turns."""

    def __init__(self, turns: Turns) -> None:
        self.granted: list[str] = []
        self._turns = turns
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Begin calls, the first letter of whose names is their owner."""
        for name in names:
            self._tasks[name] = asyncio.create_task(self._take(name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._turns.give_back(name[0])
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])

    async def _take(self, name: str) -> None:
        await self._turns.take(name[0])
        self.granted.append(name)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(within())


def test_an_owner_that_comes_later_waits_for_what_runs_and_not_for_what_waits() -> None:
    async def test() -> None:
        calls = Calls(Turns(1, lambda: 1))
        await calls.begin("a1", "a2", "a3", "b1", "b2", "c1")
        for name in ("a1", "b1", "c1", "a2", "b2"):
            assert calls.granted[-1] == name
            await calls.end(name)
        assert calls.granted == ["a1", "b1", "c1", "a2", "b2", "a3"]

    run(test)


def test_a_slot_goes_to_the_owner_that_holds_the_fewest() -> None:
    async def test() -> None:
        calls = Calls(Turns(3, lambda: 3))
        await calls.begin("a1", "a2", "a3", "a4", "b1", "b2", "b3")
        await calls.end("a1")
        assert calls.granted[3:] == ["b1"]
        await calls.end("a2")
        assert calls.granted[3:] == ["b1", "b2"], "a holds as many, but had a turn later"
        await calls.end("b1")
        assert calls.granted[3:] == ["b1", "b2", "a4"]

    run(test)


def test_no_owner_holds_more_than_its_share() -> None:
    async def test() -> None:
        share = 2
        calls = Calls(Turns(3, lambda: share))
        await calls.begin("a1", "a2", "a3", "a4")
        assert calls.granted == ["a1", "a2"]
        await calls.begin("b1")
        assert calls.granted == ["a1", "a2", "b1"]
        share = 3  # the other owner's key was removed
        await calls.end("b1")
        assert calls.granted == ["a1", "a2", "b1", "a3"]

    run(test)


@pytest.mark.parametrize("is_granted", [False, True])
def test_who_is_cancelled_waits_no_more_and_holds_nothing(is_granted: bool) -> None:
    async def test() -> None:
        turns = Turns(1, lambda: 1)
        calls = Calls(turns)
        await calls.begin("a1", "b1", "b2")
        if is_granted:
            turns.give_back("a")  # and is cancelled before it goes on
        await calls.cancel("b1")
        if not is_granted:
            turns.give_back("a")
        await asyncio.sleep(0)
        assert calls.granted == ["a1", "b2"]
        await calls.end("b2")
        await calls.begin("b3")
        assert calls.granted == ["a1", "b2", "b3"]

    run(test)


@pytest.mark.parametrize("by", ["give back", "take"])
def test_a_slot_that_is_free_when_a_call_is_cancelled_goes_to_the_next_one(by: str) -> None:
    """The task of a cancelled call runs later than what gives a slot in the same turn of the loop."""

    async def test() -> None:
        turns = Turns(1, lambda: 1)
        await turns.take("a")
        cancelled, waiting = (asyncio.create_task(turns.take("a")) for _ in range(2))
        other = asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        if by == "take":
            other.cancel()
        cancelled.cancel()
        turns.give_back("a")
        late = asyncio.create_task(turns.take("c"))
        if by == "give back":
            await asyncio.wait_for(other, 20)
            turns.give_back("b")
        else:
            with pytest.raises(asyncio.CancelledError):
                await other
        for task, owner in ((waiting, "a"), (late, "c")):
            await asyncio.wait_for(task, 20)
            turns.give_back(owner)
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    run(test)
