"""How many CPUs this process may use: the machine's, less what its affinity or its control group takes away.

Linux says so in sched_getaffinity and in both versions of its control groups. Called by ModelRunner.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the whole CPUs that are granted, at least 1; `root` is where proc and sys are mounted.

    A quota of 2.5 CPUs counts as 2: a third thread would be stopped half of the time, and the others wait for it.
    """
    try:
        num_cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cpus = os.cpu_count() or 1
    return max(1, int(min([num_cpus, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPUs of every limit on the process's control group and the groups around it.

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
    """Return the file's text; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
