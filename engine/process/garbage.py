"""When a process looks for garbage: not while it imports large libraries, and seldom after that.

Torch-free; factory.py and the server's start use it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_AFTER = 10_000
"""Python looks for garbage after so many new objects. A step of 256 sequences has 2,000 at once, which go by
themselves; with Python's own 700, looking at them took a sixteenth of the host's time."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for no garbage meanwhile, and then as `collect_seldom` does.

    Modules make objects by the hundred thousand, which live on. So each collection would look at ever more of them: a
    tenth of the time that torch's import takes, and later some 70 ms in the middle of a step. It is for the start of a
    process, which has no other garbage yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        collect_seldom()
        if was_enabled:
            gc.enable()


def collect_seldom() -> None:
    """Let Python look for garbage seldom, and never among what there is now, which stays for good."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
