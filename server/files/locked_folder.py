"""A folder that one server has at a time: under `--state-dir`, or a temporary one that ends with the process.

Stores in folders have one each. Knows nothing of what lies in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

_LOCK = "lock"
_TEMPORARY = "gptserve-state-"


class LockedFolder:
    """A folder, locked by this process from `lock` to `close`; without a path it is a new temporary one.

    A temporary folder is deleted by `close`; what a server that was killed left of its own is deleted by the next one.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_temporary = path is None
        self._descriptor: int | None = None
        self._locking = threading.Lock()

    @property
    def is_temporary(self) -> bool:
        """Whether it ends with the process."""
        return self._is_temporary

    def lock(self) -> Path:
        """Make the folder if there is none, and lock it; return its path. From any thread, any number of times.

        Raises OSError or ValueError.
        """
        with self._locking:
            if self._descriptor is None:
                if self._is_temporary:
                    _delete_left_behind()
                    self._path, self._descriptor = _new_temporary()
                else:
                    assert self._path is not None
                    self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._descriptor = _try_lock(self._path)
                    if self._descriptor is None:
                        raise ValueError("another server is using it")
            assert self._path is not None
            return self._path

    def close(self) -> None:
        """Unlock it. May be called twice."""
        if self._descriptor is None:
            return
        if self._is_temporary:
            assert self._path is not None
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._descriptor)
        self._descriptor = None


def _try_lock(folder: Path) -> int | None:
    """Return the descriptor of a lock, or None if another process has it. Raises OSError."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _new_temporary() -> tuple[Path, int]:
    """Return a new folder and its lock, which another server that starts just now may take for one left behind."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        with contextlib.suppress(FileNotFoundError):
            descriptor = _try_lock(folder)
            if descriptor is not None:
                if (folder / _LOCK).exists():
                    return folder, descriptor
                os.close(descriptor)


def _delete_left_behind() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and (descriptor := _try_lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
