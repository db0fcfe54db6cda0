"""The only randomness of sampling: one number for each token position, computed and never stored.

It depends only on its arguments. So a token that is sampled again after a preemption, in another batch or in another
process is the same. Torch-free; engine/sampling/sampler.py calls it.
"""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, choice_index: int, position: int) -> float:
    """Return a number in [0, 1), uniform on the multiples of 2**-53.

    It is the top 53 bits of the first 8 bytes (little-endian) of BLAKE2b (RFC 7693, 8-byte digest) over the three
    arguments as little-endian 64-bit integers. `position` is the sampled token's index in prompt and completion.
    """
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice_index, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
