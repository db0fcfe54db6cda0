"""The progress bar for loading weights: bytes, rate and time left on stderr.

LLM and the engine process show it. If stderr is not a terminal, it draws nothing and logs a line now and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tqdm import tqdm

LOG_EVERY_S = 10.0

logger = logging.getLogger(__name__)


class LoadingBar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    """A context whose `show(bytes_done, bytes_total)` moves the bar and tells `report`.

    By default it draws only on a terminal. One that does not draw logs the share each LOG_EVERY_S of `clock`'s seconds.
    """

    monitor_interval = 0  # otherwise tqdm starts a thread that never ends
    _lock = threading.RLock()  # tqdm's own is a system semaphore, which leaks if the process is killed

    def __init__(
        self,
        report: Callable[[int, int], None] = lambda done, total: None,
        *,
        disable: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._clock, self._logged_at = report, clock, clock()
        super().__init__(desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=disable)

    def show(self, bytes_done: int, bytes_total: int) -> None:
        self.total = bytes_total
        self.update(bytes_done - self.n)
        self._report(bytes_done, bytes_total)
        if self.disable and self._clock() - self._logged_at >= LOG_EVERY_S and bytes_done < bytes_total:
            self._logged_at = self._clock()
            share, total = bytes_done / bytes_total, bytes_total / 2**30
            logger.info("loading: %.0f%% of %.1f GiB of weights are read", 100 * share, total)
