"""When a process looks for garbage: not while it imports large libraries, and seldom after that.

Torch-free; factory.py and the server's start use it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NUM_NEW_OBJECTS = 10_000
"""After so many new ones Python looks for garbage. A step of 256 sequences has 2,000 at once, which go by themselves;
with Python's own 700, looking at them took a sixteenth of the host's time."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for no garbage meanwhile, and then as `look_seldom` does.

    Modules make objects by the hundred thousand, which live on. So each collection would look at ever more of them: a
    tenth of the time that torch's import takes, and later some 70 ms in the middle of a step. It is for the start of a
    process, which has no other garbage yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        look_seldom()
        if was_enabled:
            gc.enable()


def look_seldom() -> None:
    """Let Python look for garbage seldom, and never among what there is now, which stays for good."""
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, *gc.get_threshold()[1:])
