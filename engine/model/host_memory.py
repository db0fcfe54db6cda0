"""How much memory this process may still take: the machine's, or its container's where that is less.

Linux says so in /proc and in version 2 of its control groups. Called when the KV cache is sized on a CPU.
"""

from __future__ import annotations

import os
from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken without swapping; `root` is where proc and sys are mounted."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except FileNotFoundError:  # not Linux, and what is free is not told alike elsewhere: half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _container_bytes(root / "sys/fs/cgroup")
    return available if limit is None else min(available, limit)


def _container_bytes(group: Path) -> int | None:
    """Return what the control group still grants, its file cache counted as free; None without a limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    return max(0, int(limit) - used + int(stat["inactive_file"]))
