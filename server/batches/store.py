"""Where batches are kept: the record of each and the results of its lines so far. The interface of a store.

`batches.py` and `runner.py` know it alone, `folder.py` and `postgres.py` implement it and `stores.py` chooses. Another
store is one more class with these methods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gptserve.server.core.background_status import BatchStatus
from gptserve.server.core.errors import ServiceError

ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")


class BatchStoreError(ServiceError):
    """The store cannot be opened, read or written; the message is the cause in one sentence."""

    def __init__(self, message: str, code: str = "journal_failed", retry_after_s: int | None = None) -> None:
        super().__init__(code, message, retry_after_s=retry_after_s)


class BatchLostError(BatchStoreError):
    """Another server may go on with the batch, so nothing was written."""

    def __init__(self) -> None:
        super().__init__("another server goes on with the batch", "lease_lost")


class BatchCancelledError(BatchStoreError):
    """A batch that was to be finalized is to be cancelled, so nothing was written."""

    def __init__(self) -> None:
        super().__init__("the batch is to be cancelled", "cancelled")


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


def batch_of(fields: Mapping[str, Any]) -> BatchRecord:
    """Return the record with these fields, as `asdict` has them. Raises TypeError, KeyError or AttributeError."""
    errors = tuple(LineError(**error) for error in fields["errors"])
    return BatchRecord(**{**fields, "errors": errors})


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


class SharedBatch(NamedTuple):
    """A batch as a shared store has it now, with its results so far; one that is to be cancelled is cancelling."""

    record: BatchRecord
    num_completed: int
    num_failed: int
    num_bytes: int


class SharedBatches(Protocol):
    """The part of a BatchStore that is about its servers.

    A batch that has not ended has a lease, which one server has or none. The lease ends with the server's membership.

    Errors: as those of the store.
    """

    async def ids(self) -> set[str]:
        """Return the ids of all batches."""

    async def find(self, batch_ids: Collection[str]) -> list[SharedBatch]:
        """Return the batches with these ids that exist."""

    async def hold(self, fingerprints: Collection[str], limit: int) -> Mapping[str, bool]:
        """Take at most `limit` leases that nobody has, the oldest first; return all batches that this server has.

        Of each it says whether it is to be cancelled. Those that it takes are of models with these fingerprints, or of
        some that no server has had for FORGOTTEN_AFTER_S.
        """

    async def release(self) -> None:
        """Give up all leases of this server, for anybody to take."""

    async def cancel(self, batch_id: str, now: int) -> None:
        """Ask whoever has the lease of a batch to cancel it, unless its files are being written."""


class BatchStore(Protocol):
    """Keeps batches.

    Threads: all methods are called from one event loop, in its thread, and none blocks it.

    Atomicity: once a write returns, all of it is there for the next server. A write that raises has left nothing
    behind. If its caller is cancelled, it may still be made, as a whole, and before the calls that follow.

    Lease: without `sharing` a server has the whole store from `load` to `close` or to the end of its process, and no
    other server can load it meanwhile. So every batch that has not ended is this server's to go on with. In a store
    with `sharing` only the server that has the lease of a batch writes what is of it: `put`, `begin_line` and
    `add_result` raise BatchLostError at others. The lease ends with the batch.

    Errors: all methods but `close` raise BatchStoreError and no other error.
    """

    @property
    def sharing(self) -> SharedBatches | None:
        """What is about its servers, if several may have it at once."""

    async def load(self) -> list[BatchRecord]:
        """Take the lease; return all batches, oldest first."""

    async def add(self, record: BatchRecord, fingerprint: str) -> None:
        """Add a batch, with a lease of this server. The fingerprint is that of its model.

        A shared store raises the code file_not_found if there is no input file any more.
        """

    async def put(self, record: BatchRecord) -> None:
        """Put the record of a batch in the place of the one that it has.

        A shared store raises BatchCancelledError for the status finalizing, if the batch is to be cancelled.
        """

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
