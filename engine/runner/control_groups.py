"""The folders of this process's control groups, of both versions, and the memory that they leave to it.

host_cpus.py reads quotas of CPUs there, memory.py asks for the memory. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNT = "sys/fs/cgroup"


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of the process's group and of each group around it, and whether it is of version 1.

    In a container the path in /proc may be the host's. The container's own group is then the root of the mount. `root`
    is where proc and sys are mounted.
    """
    mount = root / _MOUNT
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        relative = PurePosixPath(path.lstrip("/"))
        for group in (relative, *relative.parents):
            if not controllers:
                yield mount / group, False
            elif controller in controllers.split(","):
                yield mount / controller / group, True


def group_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that the process's groups leave to it, their file cache counted as free; None without a limit.

    A limit of a group holds for all that it has in common with the groups within it. At memory.high the system slows
    a group down, so it counts like memory.max.
    """
    left = [
        bytes_left
        for folder, is_v1 in group_folders("memory", root)
        for bytes_left in (_left_v1(folder) if is_v1 else _left(folder),)
        if bytes_left is not None
    ]
    return min(left, default=None)


def read_text(path: Path) -> str:
    """Return the file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _left(folder: Path) -> int | None:
    limits = [read_text(folder / name).strip() for name in ("memory.max", "memory.high")]
    return _bytes_left(limits, folder / "memory.current", folder / "memory.stat", "inactive_file")


def _left_v1(folder: Path) -> int | None:
    limits = [read_text(folder / "memory.limit_in_bytes").strip()]  # without a limit some 2**63
    return _bytes_left(limits, folder / "memory.usage_in_bytes", folder / "memory.stat", "total_inactive_file")


def _bytes_left(limits: list[str], usage: Path, stat: Path, cache: str) -> int | None:
    numbers = [int(limit) for limit in limits if limit.isdecimal()]
    used = read_text(usage).strip()
    if not numbers or not used.isdecimal():
        return None
    statistics = dict(line.split(maxsplit=1) for line in read_text(stat).splitlines() if " " in line)
    return max(0, min(numbers) - int(used) + int(statistics.get(cache, 0)))
