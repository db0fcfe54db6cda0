"""The store of batches in a folder: the record of a batch is one file, its results so far are another.

A result is a line with its number, a mark and the JSON, added by one write; another line says before that it was begun.
What a killed server left half written is cut off. One thread does all, so calls come in their order. Knows no HTTP and
no owners.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from gptserve.server.batches.store import BatchRecord, BatchStore, BatchStoreError, Results, batch_of
from gptserve.server.core.settings import StateSync
from gptserve.server.files.locked_folder import LockedFolder

Result = TypeVar("Result")

_RECORD, _NEW, _RESULTS = ".json", ".new", ".results"
_ANSWER, _ERROR, _BEGUN, _NONE_BEGUN = _MARKS = b"0", b"1", b"+", b"-"


class FolderBatchStore(BatchStore):
    """A folder, locked by this process; without one it is a temporary folder that ends with the process.

    Invariant: a file of results in `_open` ends with a whole result.
    """

    def __init__(self, folder: Path | None, sync: StateSync = "normal") -> None:
        self._folder = LockedFolder(folder)
        self._named = "the temporary folder" if folder is None else str(folder)
        self._sync = sync
        self._thread = ThreadPoolExecutor(1, "batches")
        self._open: dict[str, int] = {}

    @property
    def sharing(self) -> None:
        """None: a folder is one server's."""

    async def load(self) -> list[BatchRecord]:
        """Lock the folder and return the batches in it."""
        if self._folder.is_temporary:
            return []  # made with the first batch
        return await self._run(_load)

    async def add(self, record: BatchRecord, fingerprint: str) -> None:
        """Write a record. The next server goes on with it, whatever its model."""
        await self.put(record)

    async def put(self, record: BatchRecord) -> None:
        """Write a record, and rename it into its place."""
        await self._run(lambda folder: _put(folder, record, is_synced=self._sync == "full"))

    async def begin_line(self, batch_id: str, n: int) -> None:
        """Add a mark. It need not outlive the machine, so it is not synced."""
        await self._run(lambda folder: self._append(folder, batch_id, _line(n, _BEGUN), is_synced=False))

    async def forget_begun(self, batch_id: str) -> None:
        """Add a mark of all lines."""
        await self._run(lambda folder: self._append(folder, batch_id, _line(0, _NONE_BEGUN), is_synced=False))

    async def add_result(self, batch_id: str, n: int, result: str, *, failed: bool) -> None:
        """Add a result."""
        data, is_synced = _line(n, _ERROR if failed else _ANSWER, result.encode()), self._sync == "full"
        await self._run(lambda folder: self._append(folder, batch_id, data, is_synced=is_synced))

    async def results(self, batch_id: str) -> Results:
        """Return which lines have results."""

        def read(folder: Path) -> Results:
            state, num_bytes, begun = bytearray(), 0, Counter[int]()
            for n, mark, _, size in _read(folder / f"{batch_id}{_RESULTS}"):
                if mark == _BEGUN:
                    begun[n] += 1
                elif mark == _NONE_BEGUN:
                    begun.clear()
                else:
                    state.extend(bytes(max(0, n + 1 - len(state))))
                    state[n] = 1 + (mark == _ERROR)
                    num_bytes += size
                    del begun[n]
            return Results(state, num_bytes, dict(begun))

        return await self._run(read)

    async def read_results(self, batch_id: str, *, failed: bool) -> AbstractContextManager[Iterator[tuple[int, bytes]]]:
        """Return the results in the order of their lines."""
        return await self._run(lambda folder: _in_order(folder / f"{batch_id}{_RESULTS}", failed=failed))

    async def drop_results(self, batch_id: str) -> None:
        """Delete the results."""

        def drop(folder: Path) -> None:
            if (descriptor := self._open.pop(batch_id, None)) is not None:
                os.close(descriptor)
            (folder / f"{batch_id}{_RESULTS}").unlink(missing_ok=True)

        await self._run(drop)

    async def forget(self, batch_id: str) -> None:
        """Delete the record, after the results."""
        await self.drop_results(batch_id)
        await self._run(lambda folder: (folder / f"{batch_id}{_RECORD}").unlink(missing_ok=True))

    async def close(self) -> None:
        """Unlock the folder, or delete it if it is temporary."""

        def close() -> None:
            while self._open:
                os.close(self._open.popitem()[1])
            self._folder.close()

        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, close)
        except RuntimeError:  # it is closed already
            return
        self._thread.shutdown(wait=False)

    def _append(self, folder: Path, batch_id: str, data: bytes, *, is_synced: bool) -> None:
        if batch_id not in self._open:
            self._open[batch_id] = _open_results(folder / f"{batch_id}{_RESULTS}")
        descriptor = self._open[batch_id]
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(0, "the disk is full")
            if is_synced:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise

    async def _run(self, call: Callable[[Path], Result]) -> Result:
        """Run `call` with the folder, in the one thread, once it is locked."""

        def run() -> Result:
            try:
                return call(self._folder.lock())
            except (OSError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise BatchStoreError(f"{self._named} cannot be used: {cause}") from error

        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, run)
        except RuntimeError as error:
            raise BatchStoreError(f"{self._named} is closed: {error}") from error
        return await running


def _load(folder: Path) -> list[BatchRecord]:
    """Return the batches in a folder, oldest first. Raises OSError or ValueError."""
    records = []
    for path in folder.glob(f"*{_RECORD}"):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            record = batch_of(fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
        if path.stem != record.batch_id:
            raise ValueError(f"{path.name} is damaged: it is the record of {record.batch_id}")
        records.append(record)
    for path in folder.glob(f"*{_NEW}"):
        path.unlink()
    known = {record.batch_id for record in records}
    for path in folder.glob(f"*{_RESULTS}"):
        if path.stem not in known:
            path.unlink()
    return sorted(records, key=lambda record: (record.created, record.batch_id))


def _put(folder: Path, record: BatchRecord, *, is_synced: bool) -> None:
    new = folder / f"{record.batch_id}{_NEW}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(record), file)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
    new.rename(folder / f"{record.batch_id}{_RECORD}")


def _open_results(path: Path) -> int:
    """Open a file of results to add to, without what a killed server left half written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.ftruncate(descriptor, sum(size for *_, size in _read(path)))
    return descriptor


def _line(n: int, mark: bytes, data: bytes = b"") -> bytes:
    return b"%d %s %s\n" % (n, mark, data)


def _read(path: Path) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield of each whole entry the number of its line, its mark, its place and size. Raises ValueError."""
    place = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for data in file:
            if not data.endswith(b"\n"):
                return
            head = data[:24].split(b" ", 2)
            if len(head) != 3 or not head[0].isdigit() or head[1] not in _MARKS:
                raise ValueError(f"{path.name} is damaged at byte {place}")
            yield int(head[0]), head[1], place, len(data)
            place += len(data)


@contextmanager
def _reading(path: Path, places: dict[int, int]) -> Iterator[Iterator[tuple[int, bytes]]]:
    if not places:
        yield iter(())
        return
    with path.open("rb") as file:

        def read() -> Iterator[tuple[int, bytes]]:
            for n in sorted(places):
                file.seek(places[n])
                yield n, file.readline().split(b" ", 2)[2]

        yield read()


def _in_order(path: Path, *, failed: bool) -> AbstractContextManager[Iterator[tuple[int, bytes]]]:
    wanted = _ERROR if failed else _ANSWER
    return _reading(path, {n: place for n, mark, place, _ in _read(path) if mark == wanted})
