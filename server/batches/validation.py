"""Checks the lines of a batch's input before the first is computed, a piece at a time.

`runner.py` calls `step` in a thread until it says that all is read. What a body asks for is checked when its line is
computed. Knows no stores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import BinaryIO

from gptserve.server.batches.lines import RawLine, line_of, read_all_lines
from gptserve.server.batches.store import LineError
from gptserve.server.core.errors import ServiceError

MAX_LINES = 100_000  # of each, 16 bytes of its custom_id are held while all are checked: some 10 MB
MAX_BLANK_LINES = 100_000
MAX_ERRORS = 100
_STEP_BYTES = 2**16  # a millisecond or so of parsing


class Validation:
    """Reads the lines of a file once. `errors` are at most MAX_ERRORS; num_lines counts those that are not blank."""

    def __init__(self, file: BinaryIO, max_bytes: int, urls: Collection[str]) -> None:
        self.num_lines = 0
        self.errors: list[LineError] = []
        self._lines = read_all_lines(file, max_bytes)
        self._max_bytes, self._urls = max_bytes, urls
        self._seen: set[bytes] = set()

    def step(self) -> bool:
        """Check the next lines; return whether there are more. Raises OSError."""
        num_bytes = 0
        while num_bytes < _STEP_BYTES:
            raw = next(self._lines, None)
            if raw is None:
                if not self.num_lines:
                    self.errors.append(LineError("empty_file", "the input file has no line", "input_file_id"))
                return False
            num_bytes += len(raw.data or b"")
            self.num_lines += not raw.is_blank
            if self.num_lines > MAX_LINES or raw.n - self.num_lines > MAX_BLANK_LINES:
                most = f"{MAX_BLANK_LINES} blank" if self.num_lines <= MAX_LINES else MAX_LINES
                message = f"a batch may have at most {most} lines"
                self.errors.append(LineError("too_many_lines", message, "input_file_id", raw.n))
                return False
            if not raw.is_blank:
                self._check(raw)
            if len(self.errors) == MAX_ERRORS:
                return False
        return True

    def _check(self, raw: RawLine) -> None:
        try:
            line = line_of(raw, self._max_bytes, self._urls, is_repeated=False)
            digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                line_of(raw, self._max_bytes, self._urls, is_repeated=True)
            self._seen.add(digest)
        except ServiceError as error:
            self.errors.append(LineError(error.code, str(error), error.param, raw.n))
