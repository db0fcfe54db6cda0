"""Counts the running completions, and says whether new ones are admitted. `serve.py` drains it at a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Lifecycle:
    """Counts the completions in flight; draining cannot be undone."""

    def __init__(self) -> None:
        self._num_active = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """The number of completions whose answer has not ended."""
        return self._num_active

    @property
    def is_draining(self) -> bool:
        """Whether new completions are refused."""
        return self._is_draining

    def drain(self) -> None:
        """Refuse new completions; running ones may finish."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Return when no completion is in flight."""
        await self._idle.wait()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count one completion as in flight."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()
