"""All files: each belongs to the owner of an API key, within limits of number and bytes, until it expires.

Routes and batches call it; a `FileStore` keeps the bytes. A file that a batch reads is held: nobody deletes it and it
does not expire meanwhile. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from gptserve.server.core.errors import ServiceError
from gptserve.server.core.ids import new_id
from gptserve.server.core.repeating import repeat
from gptserve.server.files.store import FILE_IN_USE, FileRecord, FileStore, FileStoreError, NewContent, Purpose, in_use
from gptserve.server.jobs.store import JOURNAL_UNAVAILABLE

PIECE_BYTES = 2**18  # of a file, read or written at once
EXPIRY_INTERVAL_S = 10.0  # how long after its time a file may take space
KEPT_S = 30 * 24 * 3600  # without another expiry; OpenAI keeps the files of batches as long
MAX_FILES = 10_000  # a page of the list has them all
MAX_UPLOADS = 16  # at once; each has a descriptor and a buffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How large a file may be, and all together. Where there are several owners, none has more than half of all."""

    max_file_bytes: int
    max_files_bytes: int
    has_several_owners: Callable[[], bool] = lambda: False

    def share(self, limit: int) -> int:
        """Return what one owner may have of a limit."""
        return max(1, limit // 2) if self.has_several_owners() else limit


class Upload:
    """A file that arrives. Its bytes count for its owner from the first one on."""

    def __init__(self, files: Files, owner: str | None, content: NewContent, file_id: str) -> None:
        self._files, self._owner, self._content, self.file_id = files, owner, content, file_id
        self.num_bytes = 0
        self.is_kept = False
        self.max_bytes: int | None = None

    async def write(self, data: bytes) -> None:
        """Add bytes. Raises ServiceError."""
        if self.max_bytes is not None and self.num_bytes + len(data) > self.max_bytes:
            raise ServiceError("body_too_large", f"a file may have at most {self.max_bytes} bytes", param="file")
        self._files.take_room(self._owner, len(data), is_kept=self.max_bytes is None)
        self.num_bytes += len(data)
        await self._content.write(data)

    async def keep(self, filename: str, purpose: Purpose, keep_s: int | None = None) -> FileRecord:
        """Make the file, to expire after keep_s; return its record. Raises ServiceError."""
        now = int(self._files._clock())
        expires_at = now + (KEPT_S if keep_s is None else keep_s)
        record = FileRecord(self.file_id, self._owner, filename, purpose, self.num_bytes, now, expires_at)
        await self._content.keep(record)
        self.is_kept = True
        if not self._files._add(record):  # it was found meanwhile, and its bytes were counted
            self._files.give_room(self._owner, self.num_bytes)
        return record


class Files:
    """The files by their ids. Invariants: only its owner finds a file; one whose time is over is not found.

    In a shared store it has those of other servers, too, as they were when it last looked: at each call that asks for
    some, at each upload, and every EXPIRY_INTERVAL_S.
    """

    def __init__(self, store: FileStore, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._records: dict[str, FileRecord] = {}
        self._num_readers = Counter[str]()
        self._uploads = Counter[str | None]()
        self._num_files = Counter[str | None]()
        self._held_bytes = Counter[str | None]()
        self._expiring: asyncio.Task[None] | None = None

    @property
    def num_files(self) -> int:
        """How many there are."""
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """How much they take, with those that arrive."""
        return self._held_bytes.total()

    async def start(self) -> None:
        """Read what is kept. Raises FileStoreError. Nothing expires before `begin_expiry`."""
        for record in await self._store.load():
            if self._add(record):
                self._held_bytes[record.owner] += record.num_bytes

    def begin_expiry(self) -> None:
        """Delete expired files from now on, but for those that are held by now."""
        loop = repeat(self._keep_in_step, 0.75 * EXPIRY_INTERVAL_S, EXPIRY_INTERVAL_S, untold=JOURNAL_UNAVAILABLE)
        self._expiring = asyncio.create_task(loop)

    async def close(self) -> None:
        """Expire no more."""
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.wait([self._expiring])

    async def find(self, file_id: str, owner: str | None, param: str = "id") -> FileRecord:
        """Return a file of this owner. Raises ServiceError, which names `param`."""
        await self._look([file_id])
        record = self._records.get(file_id)
        if record is None or record.owner != owner or self._is_over(record):
            raise ServiceError("file_not_found", f"file {file_id!r} does not exist", param=param)
        return record

    async def list_files(self, owner: str | None, purpose: str | None) -> list[FileRecord]:
        """Return the files of an owner with a purpose, None for all, oldest first."""
        await self._look()
        found = [
            record
            for record in self._records.values()
            if record.owner == owner and purpose in (None, record.purpose) and not self._is_over(record)
        ]
        return sorted(found, key=lambda record: record.created)  # those of a second as they were learnt of

    @asynccontextmanager
    async def upload(self, owner: str | None) -> AsyncIterator[Upload]:
        """Yield a new file to write to; what is not kept within the block is deleted. Raises ServiceError."""
        share, num = self._limits.share(MAX_UPLOADS), self._uploads
        if num.total() >= MAX_UPLOADS or num[owner] >= share:
            message = f"at most {MAX_UPLOADS} files may arrive at once, and of a key {share}; {num[owner]} of yours do"
            raise ServiceError("rate_limit_exceeded", message, retry_after_s=1)
        num[owner] += 1
        try:
            await self._look()
            self._check_number(owner)
            async with self.writing(owner, new_id("file-")) as upload:
                upload.max_bytes = self._limits.max_file_bytes
                yield upload
        finally:
            num[owner] -= 1

    @asynccontextmanager
    async def writing(self, owner: str | None, file_id: str, batch_id: str | None = None) -> AsyncIterator[Upload]:
        """Yield the same, with an id and without limits, for what the server itself writes: results have room.

        batch_id: it is kept only while this server has the lease of the batch.
        """
        upload = Upload(self, owner, await self._store.begin(file_id, batch_id), file_id)
        try:
            yield upload
        finally:
            if not upload.is_kept:
                self._held_bytes[owner] -= upload.num_bytes
                try:
                    await upload._content.discard()
                except FileStoreError as error:  # the next start deletes it
                    logger.warning("cannot delete a file that did not arrive whole: %s", error)

    async def open(self, record: FileRecord) -> BinaryIO:
        """Return the bytes of a file, as `FileStore.open` does."""
        return await self._store.open(record.file_id)

    def hold(self, file_id: str) -> None:
        """Let a file be neither deleted nor expired until it is let go as often as it was held."""
        self._num_readers[file_id] += 1

    def let_go(self, file_id: str) -> None:
        """Hold a file once less."""
        self._num_readers[file_id] -= 1
        if not self._num_readers[file_id]:
            del self._num_readers[file_id]

    def take_room(self, owner: str | None, num_bytes: int, *, is_kept: bool = False) -> None:
        """Count bytes that are kept for an owner. Raises ServiceError if they are too many, unless they are kept."""
        limits = self._limits
        own, most = self._held_bytes[owner] + num_bytes, limits.share(limits.max_files_bytes)
        is_over = own > most or self._held_bytes.total() + num_bytes > limits.max_files_bytes
        if is_over and not is_kept:
            message = (
                f"all files may have at most {limits.max_files_bytes} bytes, and of a key {most}: delete some, as "
                f"yours would have {own}"
            )
            raise ServiceError("too_many_kept", message, param="file", retry_after_s=1)
        self._held_bytes[owner] += num_bytes

    def give_room(self, owner: str | None, num_bytes: int) -> None:
        """Count bytes no more."""
        self._held_bytes[owner] -= num_bytes

    async def is_kept(self, file_id: str) -> bool:
        """Whether there is such a file, whosever it is."""
        await self._look([file_id])
        return file_id in self._records

    async def delete(self, record: FileRecord) -> None:
        """Delete a file. Raises ServiceError if a batch needs it."""
        if self._num_readers[record.file_id]:
            raise in_use(record.file_id)
        await self._store.forget(record.file_id)
        self._drop(record.file_id)

    async def expire(self) -> None:
        """Delete the files whose time is over."""
        for record in [record for record in self._records.values() if self._is_over(record)]:
            try:
                await self.delete(record)
            except FileStoreError as error:
                if error.code != FILE_IN_USE:
                    logger.warning("cannot delete the expired file %s: %s", record.file_id, error)

    def _is_over(self, record: FileRecord) -> bool:
        is_late = record.expires_at is not None and record.expires_at <= self._clock()
        return is_late and not self._num_readers[record.file_id]

    def _add(self, record: FileRecord) -> bool:
        """Know a file; return whether it is new."""
        is_new = record.file_id not in self._records
        if is_new:
            self._records[record.file_id] = record
            self._num_files[record.owner] += 1
        return is_new

    def _drop(self, file_id: str) -> None:
        if (record := self._records.pop(file_id, None)) is not None:
            self._num_files[record.owner] -= 1
            self._held_bytes[record.owner] -= record.num_bytes

    async def _look(self, file_ids: Collection[str] | None = None) -> None:
        """Learn what other servers have kept or deleted of these files, or of all."""
        if (sharing := self._store.sharing) is None:
            return
        if file_ids is None:
            known = set(self._records)  # before it asks: what is kept here meanwhile stays
            there = await sharing.ids()
            found = await sharing.find(there - known) if there - known else []
        else:
            known = self._records.keys() & set(file_ids)
            found = await sharing.find(file_ids)
            there = {record.file_id for record in found}
        for file_id in known - there:
            self._drop(file_id)
        for record in found:
            if self._add(record):
                self._held_bytes[record.owner] += record.num_bytes

    def _check_number(self, owner: str | None) -> None:
        if self._num_files.total() >= MAX_FILES or self._num_files[owner] >= self._limits.share(MAX_FILES):
            message = f"at most {MAX_FILES} files may be kept, {self._num_files[owner]} of yours are: delete some"
            raise ServiceError("too_many_kept", message, retry_after_s=1)

    async def _keep_in_step(self) -> None:
        try:
            await self._look()
        finally:
            await self.expire()
