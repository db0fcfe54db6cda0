"""How many CPUs this process may use, by CPU affinity and control groups (both versions); whether it may have a GPU.

hardware.py and memory_ahead.py ask.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Linux has it while the driver is loaded; in containers, too, whether or not they were given a GPU."""


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many whole CPUs this process may use, at least 1; `root` is where proc and sys are mounted.

    A quota of 2.5 CPUs counts as 2: a third thread would run half of the time and the others would wait for it.
    """
    try:
        num_cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cpus = os.cpu_count() or 1
    return max(1, int(min([num_cpus, *_quotas(root)])))


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
