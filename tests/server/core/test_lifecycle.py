from __future__ import annotations

import asyncio

from gptserve.server.core.lifecycle import Lifecycle


def test_draining_waits_for_what_is_active() -> None:
    async def scenario() -> None:
        lifecycle = Lifecycle()
        await asyncio.wait_for(lifecycle.wait_idle(), 20)
        with lifecycle.active():
            with lifecycle.active():
                assert lifecycle.num_active == 2
            lifecycle.drain()
            assert lifecycle.is_draining
            idle = asyncio.create_task(lifecycle.wait_idle())
            await asyncio.sleep(0)
            assert not idle.done()
        await asyncio.wait_for(idle, 20)
        assert lifecycle.num_active == 0

    asyncio.run(scenario())


def test_a_failed_completion_is_no_longer_active() -> None:
    lifecycle = Lifecycle()
    try:
        with lifecycle.active():
            raise KeyError
    except KeyError:
        assert lifecycle.num_active == 0
