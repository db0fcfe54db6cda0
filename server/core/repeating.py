"""Does something again and again, whatever it raises: a loop that ended would leave its server deaf without a word."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine

from gptserve.server.core.errors import ServiceError

logger = logging.getLogger(__name__)


async def repeat(
    work: Callable[[], Coroutine[None, None, None]], least_s: float, most_s: float, *, untold: str = ""
) -> None:
    """Do something for ever, with a pause before each time, so that not all servers do it at once.

    An error is logged, but once as long as it stays the same; one with the code `untold` is told of by others.
    """
    told = None
    while True:
        await asyncio.sleep(random.uniform(least_s, most_s))
        try:
            await work()
        except ServiceError as error:
            if error.code != untold and str(error) != told:
                told = str(error)
                logger.error("%s", error)
        except Exception as error:
            if repr(error) != told:
                told = repr(error)
                logger.error("unexpected: %r", error, exc_info=error)
