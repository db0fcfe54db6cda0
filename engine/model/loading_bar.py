"""The progress bar for loading weights: bytes, rate and time left on stderr.

LLM and the engine process show it. It draws nothing if stderr is not a terminal.
"""

from __future__ import annotations

import threading
from types import TracebackType

from tqdm import tqdm


class LoadingBar:
    """A context whose `update(bytes_done, bytes_total)` moves the bar."""

    def __init__(self) -> None:
        self._bar = _Bar(desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=None)

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, bytes_done: int, bytes_total: int) -> None:
        self._bar.total = bytes_total
        self._bar.update(bytes_done - self._bar.n)


class _Bar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    monitor_interval = 0  # otherwise tqdm starts a thread that never ends
    _lock = threading.RLock()  # tqdm's own is a system semaphore, which leaks if the process is killed
