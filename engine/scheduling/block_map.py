"""A picture of the KV cache: which blocks are in use, and which of them several sequences share.

However many blocks there are, it has at most MAX_CELLS cells and costs a few numpy calls: 0.5 ms for 100,000 blocks.
Engine draws one when its client asks; nothing is drawn otherwise.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

MAX_CELLS = 2048
MARKS = ".c123456789"
"""Of a blank block, of a cached one, and of one with so many references; 9 stands for more, too."""


@dataclass(frozen=True, slots=True)
class Look:
    """The command to the engine's loop to send a BlockMap."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Each character of `cells` is the last in MARKS among the marks of `blocks_per_cell` neighbouring blocks.

    The last cell may stand for fewer.
    """

    blocks_per_cell: int
    cells: str


def draw_block_map(num_references: array[int], findable: bytearray) -> BlockMap:
    """Return the map of a pool: the references of each block, and whether its content can be found (1) or not (0)."""
    import numpy as np  # the server imports this file, and does without

    held = np.frombuffer(num_references, dtype=np.intc)
    levels = np.where(held > 0, np.minimum(held, len(MARKS) - 2) + 1, np.frombuffer(findable, dtype=np.uint8))
    blocks_per_cell = -(-len(levels) // MAX_CELLS)
    highest = np.maximum.reduceat(levels, np.arange(0, len(levels), blocks_per_cell))
    return BlockMap(blocks_per_cell, np.frombuffer(MARKS.encode(), dtype=np.uint8)[highest].tobytes().decode())
