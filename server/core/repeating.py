"""Does something again and again, whatever it raises: a loop that ended would leave its server deaf without a word."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine

from gptserve.server.core.errors import ServiceError

logger = logging.getLogger(__name__)
TOLD_AGAIN_S = 600.0


async def repeat(
    work: Callable[[], Coroutine[None, None, None]], least_s: float, most_s: float, *, untold: str = ""
) -> None:
    """Do something for ever, with a pause before each time, so that not all servers do it at once.

    An error is logged, the same one again after TOLD_AGAIN_S; one with the code `untold` is told of by others.
    """
    told: dict[str, float] = {}

    def is_news(message: str) -> bool:
        now = asyncio.get_running_loop().time()
        for old in [its for its, at in told.items() if at <= now - TOLD_AGAIN_S]:
            del told[old]
        if message in told:
            return False
        told[message] = now
        return True

    while True:
        await asyncio.sleep(random.uniform(least_s, most_s))
        try:
            await work()
        except ServiceError as error:
            if error.code != untold and is_news(str(error)):
                logger.error("%s", error)
        except Exception as error:
            if is_news(repr(error)):
                logger.error("unexpected: %r", error, exc_info=error)
