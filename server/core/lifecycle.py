"""Counts the running completions, and says whether new ones are admitted. `serve.py` drains it at a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Lifecycle:
    """Counts the completions in flight; draining cannot be undone.

    num_active is the number of completions whose answer has not ended; is_draining says whether new ones are refused.
    Others only read them.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Refuse new completions; running ones may finish."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Return when no completion is in flight."""
        await self._idle.wait()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count one completion as in flight."""
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self._idle.set()
