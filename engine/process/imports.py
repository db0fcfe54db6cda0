"""How a process imports large libraries. Torch-free; factory.py and the server's start use it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for no garbage meanwhile, and never among what there is at the end, which stays for good.

    Modules make objects by the hundred thousand, which live on. So each collection would look at ever more of them: a
    tenth of the time that torch's import takes, and later some 70 ms in the middle of a step. It is for the start of a
    process, which has no other garbage yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
