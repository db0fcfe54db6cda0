"""How often the engine is asked for its blocks, and what comes when it does not answer."""

from __future__ import annotations

import asyncio

from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.server.playground.engine_view import LIMIT_S, MIN_AGE_S, EngineView
from tests.server.fake_engine import FakeEngineClient


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_engine_is_asked_once_for_all_who_look_within_half_a_second() -> None:
    async def test() -> None:
        engine, clock = FakeEngineClient(), Clock()
        view = EngineView(engine, clock)
        assert await asyncio.gather(*(view.block_map() for _ in range(100))) == [BlockMap(1, "21c.")] * 100
        engine.block_map = BlockMap(1, "....")
        clock.now_s += 0.9 * MIN_AGE_S
        assert await view.block_map() == BlockMap(1, "21c.")
        assert engine.num_looks == 1
        clock.now_s += 0.2 * MIN_AGE_S
        assert await view.block_map() == BlockMap(1, "....")

    asyncio.run(test())


def test_an_engine_that_never_answers_is_asked_again_after_the_limit() -> None:
    async def test() -> None:
        engine, clock = FakeEngineClient(), Clock()
        view, answer = EngineView(engine, clock), engine.block_map
        engine.block_map = None
        first = asyncio.create_task(view.block_map())
        await asyncio.sleep(0)
        clock.now_s += 0.9 * LIMIT_S
        second = asyncio.create_task(view.block_map())
        await asyncio.sleep(0)
        assert engine.num_looks == 1
        engine.block_map = answer
        clock.now_s += 0.2 * LIMIT_S
        assert await view.block_map() == answer
        assert engine.num_looks == 2
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])

    asyncio.run(test())
