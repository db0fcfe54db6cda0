"""The progress bar for loading weights: bytes, rate and time left on stderr.

LLM and the engine process show it. It draws nothing if stderr is not a terminal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tqdm import tqdm


class LoadingBar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    """A context whose `show(bytes_done, bytes_total)` moves the bar and tells `report`.

    By default it draws only on a terminal.
    """

    monitor_interval = 0  # otherwise tqdm starts a thread that never ends
    _lock = threading.RLock()  # tqdm's own is a system semaphore, which leaks if the process is killed

    def __init__(
        self, report: Callable[[int, int], None] = lambda done, total: None, *, disable: bool | None = None
    ) -> None:
        self._report = report
        super().__init__(desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=disable)

    def show(self, bytes_done: int, bytes_total: int) -> None:
        self.total = bytes_total
        self.update(bytes_done - self.n)
        self._report(bytes_done, bytes_total)
