"""Looks at the engine's blocks for all pages that are open, so that a hundred of them cost it no more than one.

`playground/router.py` makes one for the app.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gptserve.engine.process.client import EngineClient
from gptserve.engine.scheduling.block_map import BlockMap

MIN_AGE_S = 0.5  # a look takes half a millisecond of the engine with 100,000 blocks
LIMIT_S = 5.0  # a step that takes longer is waited for no more


class EngineView:
    """The latest map of the blocks, asked for when somebody wants it and the last one is MIN_AGE_S old.

    An engine looks between two steps. If it dies before it answers, the next look is after LIMIT_S.
    """

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._map: asyncio.Future[BlockMap] | None = None
        self._asked_at = 0.0

    async def block_map(self) -> BlockMap | None:
        """Return the map; None if no engine is ready or it does not answer within LIMIT_S."""
        if not self._engine.is_ready:
            return None
        age_s = self._clock() - self._asked_at
        if self._map is None or age_s >= (MIN_AGE_S if self._map.done() else LIMIT_S):
            self._map, self._asked_at = self._look(), self._clock()
        done, _ = await asyncio.wait([self._map], timeout=LIMIT_S)
        return self._map.result() if done else None

    def _look(self) -> asyncio.Future[BlockMap]:
        answer: asyncio.Future[BlockMap] = asyncio.get_running_loop().create_future()
        # An engine that was given up may still answer, too.
        self._engine.look(lambda found: None if answer.done() else answer.set_result(found))
        return answer
