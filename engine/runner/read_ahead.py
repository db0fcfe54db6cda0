"""Reads the files of a model's weights into the system's cache while torch is imported, which leaves the disk idle.

Loading would wait for a disk that has not been read since the system started. Nothing is copied: the system sends a
file's pages to the null device, which takes 4 ms for 269 MB that are in the cache already. Torch-free.
engine/process/factory.py begins it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gptserve.engine.runner.memory import available_memory_bytes
from gptserve.weights.errors import WeightsError
from gptserve.weights.safetensors_files import find_tensors

MAX_BYTES = 2**30
"""More than a disk gives while torch is imported; from then on loading reads."""


def read_ahead(folder: Path) -> None:
    """Begin to read the files, up to MAX_BYTES and half of the free memory. Loading says what is wrong with them."""
    with suppress(WeightsError, OSError, RuntimeError):  # RuntimeError: there is no thread
        paths = dict.fromkeys(stored.path for stored in find_tensors(folder, ()).values())
        num_bytes = min(MAX_BYTES, available_memory_bytes() // 2)
        threading.Thread(target=_read, args=(paths, num_bytes), name="gptserve-files", daemon=True).start()


def _read(paths: Iterable[Path], num_bytes: int) -> None:
    with suppress(OSError), open(os.devnull, "wb", buffering=0) as null:  # OSError: only Linux takes a file for this
        for path in paths:
            with path.open("rb", buffering=0) as file:
                start = 0
                while num_bytes and (sent := os.sendfile(null.fileno(), file.fileno(), start, num_bytes)):
                    start, num_bytes = start + sent, num_bytes - sent
