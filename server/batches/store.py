"""Where batches are kept: the record of each and the results of its lines so far. The interface of a store.

`batches.py` and `runner.py` know it alone, `folder.py` implements it and `serve.py` chooses. Another store is one more
class with these methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from gptserve.server.core.background_status import BatchStatus
from gptserve.server.core.errors import ServiceError

ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")


class BatchStoreError(ServiceError):
    """The store cannot be opened, read or written; the message is the cause in one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__("journal_failed", message)


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch failed before its first line: what is wrong with a line, or, without one, with the file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch but for its results. Times are in seconds since the epoch; `times` has when each status began.

    num_completed and num_failed are those of a batch that has ended. output_kept_s: after how long its files expire.
    """

    batch_id: str
    owner: str | None
    endpoint: str
    input_file_id: str
    created: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_kept_s: int | None = None
    status: BatchStatus = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: tuple[LineError, ...] = ()
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class Results:
    """Which lines have a result: of the n-th, `state[n]` is 0 without one, 1 with an answer, 2 with an error.

    `begun` has of those without one that servers in a row began to compute, and died, how many did.
    """

    state: bytearray
    num_bytes: int = 0
    begun: Mapping[int, int] = field(default_factory=dict)

    def has(self, n: int) -> bool:
        """Whether the n-th line has a result."""
        return n < len(self.state) and self.state[n] > 0

    @property
    def num_completed(self) -> int:
        """How many lines have an answer."""
        return self.state.count(1)

    @property
    def num_failed(self) -> int:
        """How many lines have an error."""
        return self.state.count(2)


class BatchStore(Protocol):
    """Keeps batches.

    Threads: all methods are called from one event loop, in its thread, and none blocks it.

    Atomicity: once a write returns, all of it is there for the next server. A write that raises has left nothing
    behind. If its caller is cancelled, it may still be made, as a whole, and before the calls that follow.

    Lease: a server has the whole store from `load` to `close` or to the end of its process, and no other server can
    load it meanwhile. So every batch that has not ended is this server's to go on with.

    Errors: all methods but `close` raise BatchStoreError and no other error.
    """

    async def load(self) -> list[BatchRecord]:
        """Take the lease; return all batches, oldest first."""

    async def put(self, record: BatchRecord) -> None:
        """Add a batch, or put its record in the place of the one that it has."""

    async def begin_line(self, batch_id: str, n: int) -> None:
        """Note that the n-th line is computed from now on."""

    async def forget_begun(self, batch_id: str) -> None:
        """Note that the server ends in order: no line that it began will count as begun."""

    async def add_result(self, batch_id: str, n: int, result: str, *, failed: bool) -> None:
        """Add the result of the n-th line, which has none yet: JSON in one line."""

    async def results(self, batch_id: str) -> Results:
        """Return which lines have results, how many bytes these take, and what was begun."""

    async def read_results(self, batch_id: str, *, failed: bool) -> AbstractContextManager[Iterator[tuple[int, bytes]]]:
        """Return the results that failed, or those that did not, in the order of their lines; for threads only."""

    async def drop_results(self, batch_id: str) -> None:
        """Forget the results of a batch."""

    async def forget(self, batch_id: str) -> None:
        """Forget a batch. An unknown one is passed over."""

    async def close(self) -> None:
        """Give up the lease after the writes that are under way. May be called twice; no other call may follow."""
