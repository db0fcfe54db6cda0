"""Which completions run, and whether new ones are let in. `serve.py` drains it when the process is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Lifecycle:
    """Counts the completions in flight; once draining, it stays so."""

    def __init__(self) -> None:
        self._num_active = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Completions submitted whose answer has not ended."""
        return self._num_active

    @property
    def is_draining(self) -> bool:
        """Whether new completions are refused."""
        return self._is_draining

    def drain(self) -> None:
        """Let what runs finish and refuse what is new."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Return once no completion is in flight."""
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
