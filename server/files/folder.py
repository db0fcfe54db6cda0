"""The store of files in a folder: the bytes of a file are one file, its record beside them is another.

A file is there once its record is, which is renamed into its place after the bytes are on the disk. Knows no HTTP and
no owners.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, TypeVar

from gptserve.server.files.locked_folder import LockedFolder
from gptserve.server.files.store import FileRecord, FileStore, FileStoreError, NewContent

Result = TypeVar("Result")

_BYTES, _RECORD, _NEW = ".bytes", ".json", ".new"


class FolderFileStore(FileStore):
    """A folder, locked by this process; without one it is a temporary folder that ends with the process."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = LockedFolder(folder)
        self._named = "the temporary folder" if folder is None else str(folder)

    @property
    def sharing(self) -> None:
        """None: a folder is one server's."""

    async def load(self) -> list[FileRecord]:
        """Lock the folder and return the files in it; delete what was not kept."""
        if self._folder.is_temporary:
            return []  # made with the first file
        return await self._run(_load)

    async def begin(self, file_id: str, batch_id: str | None = None) -> NewContent:
        """Begin a file."""
        beginning = asyncio.create_task(self._run(lambda folder: _begin(folder, file_id)))
        try:
            return _NewFile(self, *await asyncio.shield(beginning))
        except asyncio.CancelledError:
            await asyncio.wait([beginning])
            if beginning.exception() is None:
                await _NewFile(self, *beginning.result()).discard()
            raise

    async def open(self, file_id: str) -> BinaryIO:
        """Return the bytes of a file."""
        opening = _Opening()
        try:
            return await self._run(lambda folder: opening.open(folder / f"{file_id}{_BYTES}"))
        except asyncio.CancelledError:
            opening.abandon()
            raise

    async def forget(self, file_id: str) -> None:
        """Delete the record first: bytes without one are deleted by the next start."""
        await self._run(lambda folder: _delete(folder / f"{file_id}{_RECORD}", folder / f"{file_id}{_BYTES}"))

    async def close(self) -> None:
        """Unlock the folder, or delete it if it is temporary."""
        await asyncio.to_thread(self._folder.close)

    async def _run(self, call: Callable[[Path], Result]) -> Result:
        """Run `call` with the folder, in a thread, once it is locked."""

        def run() -> Result:
            try:
                return call(self._folder.lock())
            except (OSError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise FileStoreError(f"{self._named} cannot be used: {cause}") from error

        return await asyncio.to_thread(run)


class _Opening:
    """A file that a thread opens, for a caller who may be gone by then."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._is_abandoned = False
        self._lock = threading.Lock()

    def open(self, path: Path) -> BinaryIO:
        """Open the file; close it at once if nobody waits for it. Raises OSError."""
        file = path.open("rb")
        with self._lock:
            self._file = file
            if self._is_abandoned:
                file.close()
        return file

    def abandon(self) -> None:
        """Close the file now, or once it is open."""
        with self._lock:
            self._is_abandoned = True
            if self._file is not None:
                self._file.close()


class _NewFile(NewContent):
    """What a thread does of it goes on without a caller who is cancelled, and ends before it is discarded."""

    def __init__(self, store: FolderFileStore, path: Path, file: BinaryIO) -> None:
        self._store, self._path, self._file = store, path, file
        self._call: asyncio.Task[object] | None = None
        self._is_kept = False

    async def write(self, data: bytes) -> None:
        """Add bytes."""
        await self._to_its_end(lambda _: self._file.write(data))

    async def keep(self, record: FileRecord) -> None:
        """Write the record."""
        await self._to_its_end(lambda folder: _keep(folder, self._file, record))
        self._is_kept = True

    async def discard(self) -> None:
        """Delete the bytes, and a record of them that nobody has been told of."""
        if self._call is not None:
            await asyncio.wait([self._call])
        if not self._is_kept:
            self._file.close()
            await self._store._run(lambda _: _delete(self._path.with_suffix(_RECORD), self._path))

    async def _to_its_end(self, call: Callable[[Path], object]) -> None:
        self._call = asyncio.create_task(self._store._run(call))
        self._call.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone
        await asyncio.shield(self._call)


def _begin(folder: Path, file_id: str) -> tuple[Path, BinaryIO]:
    path = folder / f"{file_id}{_BYTES}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    return path, open(descriptor, "wb", buffering=0)


def _keep(folder: Path, file: BinaryIO, record: FileRecord) -> None:
    os.fsync(file.fileno())
    file.close()
    new = folder / f"{record.file_id}{_NEW}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as text:
        json.dump(asdict(record), text)
        text.flush()
        os.fsync(text.fileno())
    new.rename(folder / f"{record.file_id}{_RECORD}")


def _load(folder: Path) -> list[FileRecord]:
    """Return the files in a folder, oldest first; delete all that is of none. Raises OSError or ValueError."""
    records = {}
    for path in folder.glob(f"*{_RECORD}"):
        try:
            record = FileRecord(**json.loads(path.read_text(encoding="utf-8")))
            held = (folder / f"{record.file_id}{_BYTES}").stat().st_size
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
        if path.stem != record.file_id or held != record.num_bytes:
            raise ValueError(f"{path.name} is damaged: it is not the record of the bytes beside it")
        records[record.file_id] = record
    for suffix in (_BYTES, _NEW):
        _delete(*(path for path in folder.glob(f"*{suffix}") if suffix == _NEW or path.stem not in records))
    return sorted(records.values(), key=lambda record: (record.created, record.file_id))


def _delete(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
