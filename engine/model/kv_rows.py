"""A row of the KV cache: the keys or the values of one head of one token, in the model's type or as codes of int8.

Codes are multiples of a scale that depends on their row alone, so a row is written once and moves as it is. Torch-free:
memory.py and the KVCache size rows, and attention backends read them.
"""

from __future__ import annotations

SCALE_BYTES = 4
"""Of the scale in fp32 that stands behind the codes of a row, one byte each."""


def row_size(head_size: int, element_bytes: int) -> int:
    """Return the elements of a row of this many bytes each; one byte stands for codes, with their scale."""
    return head_size + (SCALE_BYTES if element_bytes == 1 else 0)
