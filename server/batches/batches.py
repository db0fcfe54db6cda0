"""All batches: begun, found and cancelled by their owners, and gone on with by the next server.

Of a shared store each server runs those whose leases it has, and finds all. Routes call it; `runner.py` runs each.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

from gptserve.server.batches.runner import MAX_RUNNING, RETRY_S, BatchRunner, KeptBatch
from gptserve.server.batches.store import BatchLostError, BatchRecord, BatchStore, BatchStoreError, SharedBatch
from gptserve.server.batches.work import endpoints_of
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError, show, shutting_down
from gptserve.server.core.ids import new_id
from gptserve.server.core.repeating import repeat
from gptserve.server.files.files import EXPIRY_INTERVAL_S, FileLimits, Files
from gptserve.server.jobs.store import JOURNAL_UNAVAILABLE

WINDOW_S = 24 * 3600
MAX_UNFINISHED = 100
MAX_ENDED = 1000  # of an owner; the next one takes the place of the oldest
HOLD_INTERVAL_S = 1.0  # after which a free lease is taken, or an order to cancel obeyed

logger = logging.getLogger(__name__)


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
        self._beginning: set[str] = set()
        self._loops: list[asyncio.Task[None]] = []

    def counts(self) -> Mapping[str, int]:
        """Return the number of batches by status."""
        return Counter(batch.record.status for batch in self._batches.values())

    def num_lines(self) -> Mapping[str, int]:
        """Return the number of lines that this server has computed, by how they ended."""
        return dict[str, int](self._runner.num_lines.items())

    async def start(self) -> None:
        """Read what is kept, and go on with what has not ended. Raises BatchStoreError; then it may be called again.

        Call it once the files are read; those that no batch needs may expire from then on.
        """
        records = await self._store.load()
        for record in records:
            if record.batch_id not in self._batches:
                self._keep(record)
        if self._store.sharing is not None:
            await self._look()
            for work, interval_s in ((self._hold, HOLD_INTERVAL_S), (self._look, EXPIRY_INTERVAL_S)):
                loop = repeat(work, interval_s, 1.5 * interval_s, untold=JOURNAL_UNAVAILABLE)
                self._loops.append(asyncio.create_task(loop))
        else:
            for batch in [self._batches[record.batch_id] for record in records if not record.has_ended]:
                await self._prepare(batch)
            for batch in self._batches.values():  # once all suspects are known
                if not batch.record.has_ended:
                    self._run(batch)
        self._files.begin_expiry()

    async def suspend(self) -> None:
        """Stop all batches, for the next start or another server to go on with. May be called twice."""
        for task in [*self._loops, *self._tasks.values()]:
            task.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        await self.settle()
        for batch in self._batches.values():
            if batch.is_here and not batch.record.has_ended:
                batch.is_here = False
                with suppress(BatchStoreError):  # then it counts like a server that did not end in order
                    await self._store.forget_begun(batch.record.batch_id)
        if self._store.sharing is not None:
            with suppress(BatchStoreError):  # then they are free once others reap this server
                await self._store.sharing.release()

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
        await self._look()
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
        self._beginning.add(batch_id)
        batch = self._keep(record)
        try:
            await self._store.add(record, self._service.model.engine.info.fingerprint)
        except BaseException:
            self._drop(batch_id)
            raise
        finally:
            self._beginning.discard(batch_id)
        self._run(batch)
        return batch

    async def find(self, batch_id: str, owner: str | None) -> KeptBatch:
        """Return a batch of this owner. Raises ServiceError."""
        await self._look([batch_id])
        batch = self._batches.get(batch_id)
        if batch is None or batch.record.owner != owner:
            raise ServiceError("batch_not_found", f"batch {batch_id!r} does not exist", param="id")
        return batch

    async def list_batches(self, owner: str | None) -> list[KeptBatch]:
        """Return the batches of an owner, oldest first."""
        await self._look()
        return self._of(owner)

    async def cancel(self, batch: KeptBatch) -> None:
        """Begin to cancel a batch; one whose files are written, or that has ended, stays as it is."""
        if self._store.sharing is not None and not batch.record.has_ended:
            await self._store.sharing.cancel(batch.record.batch_id, int(self._clock()))
            await self._look([batch.record.batch_id])
        if batch.record.batch_id in self._tasks:
            await self._cancel_here(batch)

    async def _cancel_here(self, batch: KeptBatch) -> None:
        self._stop(batch)
        if batch.is_cancelled and (task := self._tasks.get(batch.record.batch_id)) is not None:
            noted = asyncio.create_task(batch.cancelling.wait())
            await asyncio.wait([noted, task], return_when=asyncio.FIRST_COMPLETED)
            noted.cancel()

    @staticmethod
    def _stop(batch: KeptBatch) -> None:
        if batch.record.status in ("validating", "in_progress"):
            batch.is_cancelled = True
            if batch.computing is not None:
                batch.computing.cancel()

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
        batch.is_here = True
        task = self._tasks[batch_id] = asyncio.create_task(self._run_to_end(batch))
        task.add_done_callback(partial(self._forget_task, batch_id))

    async def _run_to_end(self, batch: KeptBatch) -> None:
        try:
            await self._runner.run(batch)
        except BatchLostError:
            logger.info("batch %s goes on at another server", batch.record.batch_id)
            return
        if batch.record.has_ended:
            ended = [one for one in self._of(batch.record.owner) if one.record.has_ended]
            for old in ended[:-MAX_ENDED]:
                self._drop(old.record.batch_id)
                await self._store.forget(old.record.batch_id)
        elif self._can_run:  # what it met does not pass at once; then whoever has the lease tries again
            await asyncio.sleep(RETRY_S)

    def _of(self, owner: str | None) -> list[KeptBatch]:
        found = [batch for batch in self._batches.values() if batch.record.owner == owner]
        return sorted(found, key=lambda batch: (batch.record.created, batch.record.batch_id))

    def _keep(self, record: BatchRecord) -> KeptBatch:
        """Know a batch, which holds its input file until it ends."""
        batch = self._batches[record.batch_id] = KeptBatch(record, record.num_completed, record.num_failed)
        if not record.has_ended:
            self._files.hold(record.input_file_id)
        return batch

    def _drop(self, batch_id: str) -> None:
        if (batch := self._batches.pop(batch_id, None)) is None:  # another server's task, or another task, was first
            return
        self._files.give_room(batch.record.owner, batch.held_bytes)
        if not batch.record.has_ended:
            self._files.let_go(batch.record.input_file_id)

    async def _prepare(self, batch: KeptBatch) -> None:
        """Learn what servers before have done of a batch that is to go on."""
        batch.is_cancelled = batch.record.status == "cancelling"
        results = await self._store.results(batch.record.batch_id)
        self._hold_bytes(batch, results.num_bytes)
        self._runner.suspect(batch, results.begun)

    def _hold_bytes(self, batch: KeptBatch, num_bytes: int) -> None:
        self._files.take_room(batch.record.owner, num_bytes - batch.held_bytes, is_kept=True)
        batch.held_bytes = num_bytes

    @property
    def _can_run(self) -> bool:
        return not self._service.lifecycle.is_draining and self._service.model.engine.is_alive

    async def _hold(self) -> None:
        """Run the batches of a shared store whose leases this server has, and take some that nobody has."""
        assert self._store.sharing is not None
        if not self._can_run:
            return
        mine = self._tasks.keys() - self._beginning  # before it asks
        fingerprints = {model.engine.info.fingerprint for _, model in self._service.models}
        held = await self._store.sharing.hold(fingerprints, max(0, MAX_RUNNING - len(self._tasks)))
        for batch_id in mine - held.keys():
            self._let_go(batch_id)
        for batch_id, is_cancelled in held.items():
            if batch_id not in self._tasks and batch_id not in self._beginning:
                await self._take(batch_id)
            elif is_cancelled and (batch := self._batches.get(batch_id)) is not None and not batch.is_cancelled:
                self._stop(batch)

    def _let_go(self, batch_id: str) -> None:
        """Compute no more lines of a batch whose lease this server has lost; one that it ends it does not lose."""
        batch, task = self._batches.get(batch_id), self._tasks.get(batch_id)
        if batch is not None and task is not None and batch.record.status in ("validating", "in_progress"):
            logger.info("batch %s goes on at another server", batch_id)
            task.cancel()

    async def _take(self, batch_id: str) -> None:
        await self._look([batch_id])
        batch = self._batches.get(batch_id)
        if batch is not None and not batch.record.has_ended:
            await self._prepare(batch)
            self._run(batch)

    async def _look(self, batch_ids: Collection[str] | None = None) -> None:
        """Learn from a shared store how these batches are, or all that have not ended or are new."""
        if (sharing := self._store.sharing) is None:
            return
        if batch_ids is None:
            known = set(self._batches)  # before it asks: what begins here meanwhile stays
            there = await sharing.ids()
            asked = {one for one in there if one not in known or not self._batches[one].record.has_ended}
            found = await sharing.find(asked) if asked else []
        else:
            known = self._batches.keys() & set(batch_ids)
            found = await sharing.find(batch_ids)
            there = {shared.record.batch_id for shared in found}
        for batch_id in (known - there) & self._batches.keys() - self._tasks.keys() - self._beginning:
            self._drop(batch_id)
        for shared in found:
            self._adopt(shared)

    def _adopt(self, shared: SharedBatch) -> None:
        """Know a batch as it is at another server, or at none."""
        record = shared.record
        batch = self._batches.get(record.batch_id) or self._keep(record)
        if record.batch_id in self._tasks or record.batch_id in self._beginning or batch.record.has_ended:
            return
        batch.record = record
        self._hold_bytes(batch, shared.num_bytes)
        batch.num_completed, batch.num_failed = shared.num_completed, shared.num_failed
        if record.has_ended:
            batch.num_completed, batch.num_failed = record.num_completed, record.num_failed
            self._files.let_go(record.input_file_id)

    def _forget_task(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"batch {batch_id} waits for the next start", "exception": error, "task": task}
            )
