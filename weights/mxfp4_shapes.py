"""The shapes of a weight in MXFP4: in a file, and on a device that multiplies with it as it is stored.

Torch-free, as engine/runner/memory.py counts bytes by them. weights/mxfp4.py has the numbers.
"""

from __future__ import annotations

import math

SUFFIXES = ("_blocks", "_scales")
GROUP = 32

Shape = tuple[int, ...]


def packed_shapes(shape: Shape, group: int = GROUP) -> tuple[Shape, Shape]:
    """Return the shapes of blocks and scales for a tensor of this shape [..., in, out]."""
    *outer, num_in, num_out = shape
    scales = (*outer, num_out, num_in // group)
    return (*scales, group // 2), scales


def held_shapes(shape: Shape) -> tuple[Shape, Shape] | None:
    """Return the shapes of blocks and scales on a device for a weight of this shape [out, in].

    The inputs of a rank may begin and end within a group; then smaller groups have a scale each. None if they may do so
    within a byte, too.
    """
    group = math.gcd(GROUP, shape[1])
    return None if group == 1 else packed_shapes(shape[::-1], group)
