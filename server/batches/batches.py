"""All batches: begun, found and cancelled by their owners, and gone on with by the next server.

Routes call it; `runner.py` runs each. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from gptserve.server.batches.runner import BatchRunner, KeptBatch
from gptserve.server.batches.store import BatchRecord, BatchStore, BatchStoreError
from gptserve.server.batches.work import endpoints_of
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError, show, shutting_down
from gptserve.server.core.ids import new_id
from gptserve.server.files.files import FileLimits, Files

WINDOW_S = 24 * 3600
MAX_UNFINISHED = 100
MAX_ENDED = 1000  # of an owner; the next one takes the place of the oldest


class Batches:
    """The batches by their ids. Invariants: only its owner finds a batch; each that has not ended has one task."""

    def __init__(
        self,
        service: Service,
        files: Files,
        store: BatchStore,
        limits: FileLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._service, self._files, self._store, self._limits, self._clock = service, files, store, limits, clock
        self._runner = BatchRunner(service, files, store, limits, clock)
        self._batches: dict[str, KeptBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def counts(self) -> Mapping[str, int]:
        """Return the number of batches by status."""
        return Counter(batch.record.status for batch in self._batches.values())

    def num_lines(self) -> Mapping[str, int]:
        """Return the number of lines that this server has computed, by how they ended."""
        return dict[str, int](self._runner.num_lines.items())

    async def start(self) -> None:
        """Read what is kept, and go on with what has not ended. Raises BatchStoreError.

        Call it once the files are read; those that no batch needs may expire from then on.
        """
        for record in await self._store.load():
            batch = self._batches[record.batch_id] = KeptBatch(record, record.num_completed, record.num_failed)
            if not record.has_ended:
                batch.is_cancelled = record.status == "cancelling"
                results = await self._store.results(record.batch_id)
                batch.held_bytes = results.num_bytes
                self._files.take_room(record.owner, results.num_bytes, is_kept=True)
                self._runner.suspect(batch, results.begun)
        for batch in self._batches.values():  # once all suspects are known
            if not batch.record.has_ended:
                self._run(batch)
        self._files.begin_expiry()

    async def suspend(self) -> None:
        """Stop all batches, for the next start to go on with."""
        for task in self._tasks.values():
            task.cancel()
        await self.settle()
        for batch in self._batches.values():
            if not batch.record.has_ended:
                with suppress(BatchStoreError):  # then it counts like a server that did not end in order
                    await self._store.forget_begun(batch.record.batch_id)

    async def settle(self) -> None:
        """Return when nothing runs any more."""
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    async def begin(
        self,
        owner: str | None,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None = None,
        output_kept_s: int | None = None,
    ) -> KeptBatch:
        """Begin a batch. Raises ServiceError."""
        if self._service.lifecycle.is_draining:
            raise shutting_down()
        self._check_endpoint(endpoint)
        file = await self._files.find(input_file_id, owner, "input_file_id")
        if file.purpose != "batch":
            message = f"input_file_id must be of a file with the purpose batch; {input_file_id!r} has {file.purpose}"
            raise ServiceError("invalid_value", message, param="input_file_id")
        unfinished = [batch.record.owner for batch in self._batches.values() if not batch.record.has_ended]
        own, share = unfinished.count(owner), self._limits.share(MAX_UNFINISHED)
        if len(unfinished) >= MAX_UNFINISHED or own >= share:
            message = f"at most {MAX_UNFINISHED} batches may run or wait, and of a key {share}: {own} of yours do"
            raise ServiceError("too_many_kept", message, retry_after_s=1)
        now, batch_id = int(self._clock()), new_id("batch_")
        record = BatchRecord(batch_id, owner, endpoint, input_file_id, now, now + WINDOW_S, metadata, output_kept_s)
        batch = self._batches[batch_id] = KeptBatch(record)
        try:
            await self._store.put(record)
        except BaseException:
            del self._batches[batch_id]
            raise
        self._run(batch)
        return batch

    def find(self, batch_id: str, owner: str | None) -> KeptBatch:
        """Return a batch of this owner. Raises ServiceError."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.record.owner != owner:
            message = f"batch {batch_id!r} does not exist{self._limits.not_found}"
            raise ServiceError("batch_not_found", message, param="id")
        return batch

    def list_batches(self, owner: str | None) -> list[KeptBatch]:
        """Return the batches of an owner, oldest first."""
        return [batch for batch in self._batches.values() if batch.record.owner == owner]

    async def cancel(self, batch: KeptBatch) -> None:
        """Begin to cancel a batch; one whose files are written, or that has ended, stays as it is."""
        if batch.record.status in ("validating", "in_progress"):
            batch.is_cancelled = True
            if batch.computing is not None:
                batch.computing.cancel()
        if batch.is_cancelled and (task := self._tasks.get(batch.record.batch_id)) is not None:
            noted = asyncio.create_task(batch.cancelling.wait())
            await asyncio.wait([noted, task], return_when=asyncio.FIRST_COMPLETED)
            noted.cancel()

    def _check_endpoint(self, endpoint: str) -> None:
        served = endpoints_of(self._service)
        if not served:
            message = f"a server with --task {self._service.options.settings.engine.task} has no batches"
            raise ServiceError("unsupported_task", message)
        if endpoint not in served:
            message = f"endpoint must be one of {', '.join(served)} here, got {show(endpoint)}"
            raise ServiceError("invalid_value", message, param="endpoint")

    def _run(self, batch: KeptBatch) -> None:
        batch_id = batch.record.batch_id
        self._files.hold(batch.record.input_file_id)
        task = self._tasks[batch_id] = asyncio.create_task(self._run_to_end(batch))
        task.add_done_callback(partial(self._forget_task, batch_id))

    async def _run_to_end(self, batch: KeptBatch) -> None:
        await self._runner.run(batch)
        if batch.record.has_ended:
            ended = [one for one in self.list_batches(batch.record.owner) if one.record.has_ended]
            for old in ended[:-MAX_ENDED]:
                del self._batches[old.record.batch_id]
                await self._store.forget(old.record.batch_id)

    def _forget_task(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"batch {batch_id} waits for the next start", "exception": error, "task": task}
            )
