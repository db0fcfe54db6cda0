"""The noise: pinned values, the hash it is made of, and that it looks uniform and independent.

VECTORS are in docs/dev/exactness.md, too, for whoever writes the function again. Each was computed by `blake2b` below,
which follows RFC 7693 line by line and shares nothing with hashlib, and by coreutils' b2sum.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from gptserve.engine.sampling.noise import uniform

# (seed, choice_index, position): the number times 2**53
VECTORS = {
    (0, 0, 0): 1411811410761174,
    (1, 0, 0): 3042283701343225,
    (0, 1, 0): 4173636616585178,
    (0, 0, 1): 5647513153269697,
    (1, 2, 3): 6367732769276759,
    (42, 0, 100): 1413219479467455,
    (2**53 - 1, 3, 1023): 6774822436522357,
    (2**63 - 1, 0, 0): 1622420650685333,
    (0, 2**31 - 1, 0): 7726554193532736,
    (0, 0, 2**32): 6301639873118718,
    (2**63 - 1, 2**31 - 1, 131071): 3195057057610211,
    (2**64 - 2, 0, 0): 6412090439355825,
}
ABC_DIGEST = (  # RFC 7693, appendix A: BLAKE2b-512 of "abc"
    "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
    "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923"
)
DOCUMENT = Path(__file__).parents[3] / "docs" / "dev" / "exactness.md"

_WORD = 2**64 - 1
_IV = (
    *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
    *(0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
)
_SIGMA = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)
_COLUMNS_AND_DIAGONALS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)


def blake2b(data: bytes, digest_size: int) -> bytes:
    """Return the digest of at most one block of 128 bytes without a key: RFC 7693, sections 3.1 to 3.3."""
    assert len(data) <= 128
    message = struct.unpack("<16Q", data.ljust(128, b"\0"))
    h = [_IV[0] ^ 0x01010000 ^ digest_size, *_IV[1:]]
    v = [*h, *_IV]
    v[12] ^= len(data)
    v[14] ^= _WORD  # the last block
    for round_ in range(12):
        sigma = _SIGMA[round_ % 10]
        for i, (a, b, c, d) in enumerate(_COLUMNS_AND_DIAGONALS):
            for word, turn_d, turn_b in ((message[sigma[2 * i]], 32, 24), (message[sigma[2 * i + 1]], 16, 63)):
                v[a] = (v[a] + v[b] + word) & _WORD
                v[d] = _turn(v[d] ^ v[a], turn_d)
                v[c] = (v[c] + v[d]) & _WORD
                v[b] = _turn(v[b] ^ v[c], turn_b)
    return struct.pack("<8Q", *(h[i] ^ v[i] ^ v[i + 8] for i in range(8)))[:digest_size]


def _turn(word: int, bits: int) -> int:
    return (word >> bits | word << (64 - bits)) & _WORD


def test_the_hash_is_that_of_the_rfc() -> None:
    assert blake2b(b"abc", 64).hex() == ABC_DIGEST
    assert hashlib.blake2b(b"abc").hexdigest() == ABC_DIGEST


@pytest.mark.parametrize("arguments", VECTORS)
def test_values_never_change(arguments: tuple[int, int, int]) -> None:
    value = uniform(*arguments)
    assert value * 2**53 == VECTORS[arguments]
    assert 0.0 <= value < 1.0


@pytest.mark.parametrize("arguments", VECTORS)
def test_values_are_those_of_the_definition_written_out(arguments: tuple[int, int, int]) -> None:
    data = b"".join(argument.to_bytes(8, "little") for argument in arguments)
    assert int.from_bytes(blake2b(data, 8), "little") // 2**11 == VECTORS[arguments]


@pytest.mark.skipif(shutil.which("b2sum") is None, reason="b2sum is not installed")
@pytest.mark.parametrize("arguments", VECTORS)
def test_values_are_those_of_b2sum(arguments: tuple[int, int, int]) -> None:
    data = struct.pack("<QQQ", *arguments)
    printed = subprocess.run(["b2sum", "--length", "64"], input=data, capture_output=True, check=True, timeout=20)
    digest = bytes.fromhex(printed.stdout.split()[0].decode())
    assert int.from_bytes(digest, "little") // 2**11 == VECTORS[arguments]


def test_the_published_vectors_are_these() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\S+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    published = {tuple(map(int, row[:3])): (int(row[3]), float.fromhex(row[4])) for row in rows}
    assert published == {arguments: (value, value * 2.0**-53) for arguments, value in VECTORS.items()}


def test_the_arguments_are_told_apart() -> None:
    """A sum or a chain of the three would give some of these the same number."""
    values = {uniform(seed, choice, position) for seed in range(8) for choice in range(8) for position in range(8)}
    assert len(values) == 512


def test_numbers_are_uniform_along_every_argument() -> None:
    for draw in (lambda i: uniform(i, 0, 0), lambda i: uniform(7, i, 0), lambda i: uniform(7, 0, i)):
        bins = [0] * 20
        for i in range(20_000):
            u = draw(i)
            assert 0.0 <= u < 1.0
            bins[int(u * 20)] += 1
        # chi-square with 19 degrees of freedom: 43.8 is exceeded once in a thousand; the arguments are fixed.
        assert sum((count - 1000) ** 2 / 1000 for count in bins) < 43.8


def test_neighbouring_positions_are_uncorrelated() -> None:
    values = [uniform(3, 0, position) - 0.5 for position in range(20_001)]
    correlation = sum(a * b for a, b in pairwise(values)) / 20_000 * 12
    assert abs(correlation) < 4 / 20_000**0.5
