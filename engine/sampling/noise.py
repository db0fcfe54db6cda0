"""The only randomness of sampling: one number for each token position, computed and never stored.

It depends only on its arguments. So a token that is sampled again after a preemption, in another batch or in another
process is the same. Torch-free; choice.py calls it.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

_ARGUMENTS, _NUMBER = Struct("<3Q"), Struct("<Q")


def uniform(seed: int, choice_index: int, position: int) -> float:
    """Return a number in [0, 1), uniform on the multiples of 2**-53.

    It is the top 53 bits of the first 8 bytes (little-endian) of BLAKE2b (RFC 7693, 8-byte digest) over the three
    arguments as little-endian 64-bit integers. `position` is the sampled token's index in prompt and completion.
    """
    digest = blake2b(_ARGUMENTS.pack(seed, choice_index, position), digest_size=8).digest()
    return float(_NUMBER.unpack(digest)[0] >> 11) * 2.0**-53
