"""Where completions are kept: the interface of a store, which outlives the jobs in memory and perhaps the server.

What a store holds is called the journal. `background.py`, `recorder.py` and `job.py` know this interface alone;
`sqlite/` and `postgres/` implement it and `stores.py` chooses. Another store is one more class with these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, StoredJob
from gptserve.server.jobs.sharing import Sharing

JOURNAL_UNAVAILABLE = "journal_unavailable"
LEASE_LOST = "lease_lost"  # no client sees this code


class JobStoreError(ServiceError):
    """The store cannot be opened, read or written; the message is the cause in one sentence."""

    CODE = "journal_failed"
    RETRY_AFTER_S: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(self.CODE, message, retry_after_s=self.RETRY_AFTER_S)


class StoreUnavailableError(JobStoreError):
    """A shared store cannot be reached now. What was to be written may have been written."""

    CODE = JOURNAL_UNAVAILABLE
    RETRY_AFTER_S = 5  # about what a database takes to restart


class KeyTakenError(StoreUnavailableError):
    """A shared store has another completion with the idempotency key of the one to be added."""

    def __init__(self) -> None:
        super().__init__("another server begins or has just ended a completion with this Idempotency-Key; try again")


class LeaseLostError(JobStoreError):
    """Another server may go on with the completion, so nothing was written."""

    CODE = LEASE_LOST

    def __init__(self) -> None:
        super().__init__("another server goes on with the completion")


def cancelled() -> ServiceError:
    """Return the error that a completion ends with when it is cancelled."""
    return ServiceError("cancelled", "the completion was cancelled")


@dataclass(frozen=True, slots=True)
class FormerOwners:
    """Names of owners that earlier versions wrote, for stores that they could write.

    They named the keys of options by their positions: `names` has the names of today by those. A name in `others`,
    which a key file gives, is no position.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    others: Set[str] = frozenset()


NO_FORMER_OWNERS = FormerOwners()


class JobStore(Protocol):
    """Keeps completions: the record of each, its batches of outputs in order, and how it ended.

    Threads: all methods are called from one event loop, in its thread, and none blocks it. Any number of calls may be
    under way at once.

    Atomicity: once a write returns, all of it is there, for every read that begins afterwards and, if the store is
    durable, for the next server. A write that raises has left nothing behind. If its caller is cancelled, it may still
    be made, as a whole. Writes that are under way at once may be made in any order and may fail together, so a caller
    awaits one write of a completion before it makes the next.

    Lease: without `sharing` a server has the whole store from `open` to `close` or to the end of its process, and no
    other server can open it meanwhile. So every completion without an end in `load` is this server's to resume. A store
    with `sharing` gives a lease with each completion that is added or claimed.

    Errors: all methods but `num_bytes` and `close` raise JobStoreError and no other error.
    """

    @property
    def sharing(self) -> Sharing | None:
        """What is about its servers, if several may have it at once."""

    @property
    def is_durable(self) -> bool:
        """Whether what it holds outlives the process."""

    on_write: Callable[[float], object]
    """Called in the event loop after each transaction that wrote, with the seconds it took."""

    def num_bytes(self) -> int:
        """Return how much disk it takes; 0 in memory. May be called from any thread, and without `open`."""

    async def open(self) -> None:
        """Take the lease, and check what the store holds. The first other call does this, if nobody has."""

    async def close(self) -> None:
        """Finish the writes that are under way, then give up the lease. May be called twice; no other call may follow.

        Other calls that do follow raise JobStoreError.
        """

    async def load(self, former_owners: FormerOwners = NO_FORMER_OWNERS) -> list[StoredJob]:
        """Return all completions: first those that ended, in the order of their ends; then the others, oldest first.

        Their num_bytes are the sums of what `add` and `append` returned. Before, completions of former owners get the
        owners of today, in one transaction.
        """

    async def read_record(self, completion_id: str) -> CompletionRecord:
        """Return the record of a completion as it was added; an unknown one is an error."""

    async def batches(self, completion_id: str, first: int, limit: int) -> list[OutputBatch]:
        """Return at most `limit` batches of a completion from the `first`-th on, as they were appended.

        None if there are no more, or the completion is unknown. A batch that is missing before others is an error.
        """

    async def add(self, record: CompletionRecord) -> int:
        """Begin a completion, whose id is new; return the number of bytes that this takes.

        A shared store raises KeyTakenError if one of the same owner has its key.
        """

    async def append(self, completion_id: str, n: int, outputs: OutputBatch) -> int:
        """Add the n-th batch of outputs to a completion, counted from 0; return the number of bytes that it takes."""

    async def add_attempt(self, stored: StoredJob) -> None:
        """Note that this server resumes a completion, which is as it was found."""

    async def clear_attempts(self) -> None:
        """Forget the attempts to resume any completion, in a shared store those of this server."""

    async def end(self, completion_id: str, end: EndRecord) -> None:
        """End a completion, once."""

    async def forget(self, completion_ids: Iterable[str]) -> None:
        """Delete completions with all that belongs to them, in one transaction, and free their space.

        Unknown ones are passed over.
        """
