"""How many CPUs this process may use, by CPU affinity and control groups; whether it may have a GPU.

hardware.py and memory_ahead.py ask.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gptserve.engine.runner.control_groups import group_folders, read_text

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
    """Yield the quota, in CPUs, of the process's control group and of each group around it."""
    for folder, is_v1 in group_folders("cpu", root):
        if is_v1:
            limit = [read_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        else:
            limit = read_text(folder / "cpu.max").split()
        if len(limit) == 2 and all(number.isdecimal() and int(number) for number in limit):
            yield int(limit[0]) / int(limit[1])
