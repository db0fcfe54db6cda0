"""A seeded generator of random numbers for what is tried while a model loads.

Making one for a CPU would import what process/deferred_imports.py leaves out: torch's own is used instead.
batch_invariance.py and input_squares.py call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(device: torch.device) -> Iterator[torch.Generator]:
    """Give a generator of this device with the seed 0. That of a CPU is torch's own, which gets its state back."""
    if device.type != "cpu":
        yield torch.Generator(device).manual_seed(0)
        return
    generator = torch.default_generator
    before = generator.get_state()
    try:
        yield generator.manual_seed(0)
    finally:
        generator.set_state(before)
