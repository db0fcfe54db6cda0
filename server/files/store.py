"""Where files are kept: the record of each and its bytes. The interface of a store, which `files.py` alone knows.

`folder.py` and `postgres.py` implement it and `stores.py` chooses. Another store is one more class with these methods.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

from gptserve.server.core.errors import ServiceError

Purpose = Literal["batch", "batch_output"]


class FileStoreError(ServiceError):
    """The store cannot be opened, read or written; the message is the cause in one sentence."""

    def __init__(
        self,
        message: str,
        code: str = "journal_failed",
        retry_after_s: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(code, message, param=param, retry_after_s=retry_after_s)


FILE_IN_USE = "file_in_use"


def in_use(file_id: str) -> FileStoreError:
    """Return the error for a file that cannot be deleted now."""
    message = f"file {file_id!r} is the input of a batch that has not ended: cancel the batch first"
    return FileStoreError(message, FILE_IN_USE, param="id")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file without its bytes. Times are in seconds since the epoch; without expires_at it is kept for ever.

    `filename` is what its owner calls it; no path on this machine has it.
    """

    file_id: str
    owner: str | None
    filename: str
    purpose: Purpose
    num_bytes: int
    created: int
    expires_at: int | None


class NewContent(Protocol):
    """The bytes of a file that is not there yet. Ends with `keep` or `discard`; so does what the process leaves."""

    async def write(self, data: bytes) -> None:
        """Add bytes. Raises FileStoreError."""

    async def keep(self, record: FileRecord) -> None:
        """Make the file of all that was written; it outlives the process from here on. Raises FileStoreError."""

    async def discard(self) -> None:
        """Forget what was written, unless it was kept."""


class SharedFiles(Protocol):
    """The part of a FileStore that is about what other servers keep and delete. Errors: as those of the store."""

    async def ids(self) -> set[str]:
        """Return the ids of all files."""

    async def find(self, file_ids: Collection[str]) -> list[FileRecord]:
        """Return the files with these ids that are there, oldest first."""


class FileStore(Protocol):
    """Keeps files, which never change.

    Threads: all methods are called from one event loop, in its thread, and none blocks it.

    Lease: without `sharing` a server has the whole store from `load` to `close` or to the end of its process, and no
    other server can load it meanwhile. So bytes without a record in it are of a server that has ended, and nobody's. In
    a store with `sharing` they are a server's that lives, which alone can keep them.

    Errors: all methods but `close` raise FileStoreError and no other error.
    """

    @property
    def sharing(self) -> SharedFiles | None:
        """What is about other servers, if several may have it at once."""

    async def load(self) -> list[FileRecord]:
        """Take the lease; return all files, oldest first. What was begun and not kept is deleted."""

    async def begin(self, file_id: str, batch_id: str | None = None) -> NewContent:
        """Begin a file, whose id is new or that of a file that was discarded.

        batch_id: a shared store keeps it only while this server has the lease of the batch that writes it.
        """

    async def open(self, file_id: str) -> BinaryIO:
        """Return the bytes of a file that is kept: a stream that can seek, for threads only. Its caller closes it.

        A file that is deleted meanwhile can be read to its end, or that raises OSError, as it does where a shared store
        cannot be reached.
        """

    async def forget(self, file_id: str) -> None:
        """Delete a file and free its space. An unknown one is passed over.

        A shared store raises the code file_in_use for the input of a batch that has not ended at any server.
        """

    async def close(self) -> None:
        """Give up the lease. May be called twice; no other call may follow."""
