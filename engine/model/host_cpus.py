"""How many CPUs this process may use, and how many of them other processes leave to it; and whether it may have a GPU.

CPU affinity and control groups (both versions) limit the first. /proc/stat tells the second. ModelRunner uses both.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Linux has it while the driver is loaded; in containers, too, whether or not they were given a GPU."""

_WINDOW_S = 0.15
"""Linux counts idle time in ticks of 10 ms, so over this window the result is exact to 7 % of a CPU."""


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many whole CPUs this process may use, at least 1; `root` is where proc and sys are mounted.

    A quota of 2.5 CPUs counts as 2: a third thread would run half of the time and the others would wait for it.
    """
    try:
        num_cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cpus = os.cpu_count() or 1
    return max(1, int(min([num_cpus, *_quotas(root)])))


class FreeCpus:
    """Counts the CPUs that this process uses or that are idle, among those of its affinity.

    It ignores quotas. `cpu_time` returns the CPU seconds of this process, `clock` seconds.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._stat = root / "proc/stat"
        self._clock, self._cpu_time = clock, cpu_time
        self._measured_at, self._total_s = clock(), self._idle_s() + cpu_time()
        self._free = math.inf

    def __call__(self) -> float:
        """Return the average since the last measurement, 0.15 s ago or more; infinity before it, or if not Linux."""
        now = self._clock()
        if now - self._measured_at >= _WINDOW_S:
            total_s = self._idle_s() + self._cpu_time()
            self._free = (total_s - self._total_s) / (now - self._measured_at)
            self._measured_at, self._total_s = now, total_s
        return self._free if math.isfinite(self._free) else math.inf

    def _idle_s(self) -> float:
        """Return the seconds that the CPUs were idle or waited for a disk; infinity if unknown."""
        try:
            allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            rows = [line.split() for line in self._stat.read_text().splitlines() if line.startswith("cpu")]
            ticks = [int(row[4]) + int(row[5]) for row in rows if row[0] in allowed]
            return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else math.inf
        except (AttributeError, OSError, ValueError, IndexError):  # not Linux, or incomplete
            return math.inf


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in CPUs, of the process's control group and of each group around it.

    In a container the path in /proc may be the host's. The container's own group is then the root of the mount.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = PurePosixPath(path.lstrip("/"))
        for group in (relative, *relative.parents):
            if not controllers:
                limit = _read(mount / group / "cpu.max").split()
            elif "cpu" in controllers.split(","):
                folder = mount / "cpu" / group
                limit = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
            else:
                continue
            if len(limit) == 2 and all(number.isdecimal() and int(number) for number in limit):
                yield int(limit[0]) / int(limit[1])


def _read(path: Path) -> str:
    """Return the file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
