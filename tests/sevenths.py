"""Which of the slow tests a change must pass: one seventh of them, so that seven changes run about all.

`--seventh N` adds it to the tests that always run. The hash of a test's id says which seventh it belongs to, so a test
stays in its own while others come and go. Property tests of a seventh of the files have all their examples.
"""

from __future__ import annotations

import zlib

NUM = 7


def has(seventh: int, name: str) -> bool:
    return zlib.crc32(name.encode()) % NUM == seventh
