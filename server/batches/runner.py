"""Goes on with a batch until it has ended: checks its lines, computes those without a result, writes its files.

What has been done is in the stores, so that the next server goes on after the last result of this one. `batches.py`
calls `run`, and cancels it when the server ends. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Literal, TypeVar

from gptserve.engine.errors import EngineDiedError
from gptserve.server.batches.lines import RawLine, read_lines
from gptserve.server.batches.store import (
    BatchCancelledError,
    BatchLostError,
    BatchRecord,
    BatchStore,
    LineError,
    Results,
)
from gptserve.server.batches.validation import Validation
from gptserve.server.batches.work import Batch, compute_line, failed_line
from gptserve.server.completions.service import Service
from gptserve.server.core.background_status import BatchStatus
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.turns import Turns
from gptserve.server.files.files import PIECE_BYTES, FileLimits, Files

MAX_RUNNING = 16  # batches at once: each has a descriptor and a line that waits
SUSPECT_AFTER = 2  # servers that died while they computed a line
MAX_ATTEMPTS = 4
RETRY_S = 10.0  # after which to write again what a full disk or full limits did not let in

Outcome = Literal["completed", "failed"]
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KeptBatch:
    """A batch in memory. num_completed and num_failed are so far, `held_bytes` are those of results in the store.

    suspects: of the lines that servers may have died of, how many did. `cancelling` is set once the store knows that it
    is to be cancelled. is_here: it has run at this server, which has not given it up.
    """

    record: BatchRecord
    num_completed: int = 0
    num_failed: int = 0
    held_bytes: int = 0
    is_cancelled: bool = False
    is_here: bool = False
    suspects: Mapping[int, int] = field(default_factory=dict)
    cancelling: asyncio.Event = field(default_factory=asyncio.Event)
    computing: asyncio.Task[None] | None = None


class BatchRunner:
    """Runs batches side by side; owners take turns, at running batches and at each line.

    As many lines as the engine has slots are in memory, of all batches together. `num_lines` counts those that were
    computed. Lines that several servers died with are suspects: they are computed first, one by one, and others when
    none is left. So the innocent are cleared. One that MAX_ATTEMPTS servers died with fails.
    """

    def __init__(
        self, service: Service, files: Files, store: BatchStore, limits: FileLimits, clock: Callable[[], float]
    ) -> None:
        self._service, self._files, self._store, self._clock = service, files, store, clock
        self._running = Turns(MAX_RUNNING, lambda: limits.share(MAX_RUNNING))
        self._lines: Turns | None = None
        self._line_ended = asyncio.Event()
        self._suspected: set[str] = set()  # batches with suspects
        self._cleared = asyncio.Event()
        self._cleared.set()
        self._trial = asyncio.Lock()
        self.num_lines = Counter[Outcome]()

    def suspect(self, batch: KeptBatch, begun: Mapping[int, int]) -> None:
        """Learn what earlier servers had begun when they died, before the batch runs."""
        batch.suspects = {n: num for n, num in begun.items() if num >= SUSPECT_AFTER}
        if batch.suspects:
            self._suspected.add(batch.record.batch_id)
            self._cleared.clear()

    async def run(self, batch: KeptBatch) -> None:
        """Go on with a batch until it has ended, another server has it, or this one cannot compute any more.

        Raises BatchLostError.
        """
        if batch.record.status in ("validating", "in_progress") and not batch.is_cancelled:
            computing = batch.computing = asyncio.create_task(self._compute(batch))
            try:
                left_s = max(0.0, batch.record.expires_at - self._clock())
                await asyncio.wait([computing], timeout=left_s)
            finally:
                computing.cancel()
                await asyncio.wait([computing])
                self._clear(batch)
            if not self._may_finish(batch, computing):
                return
        self._clear(batch)
        if not batch.record.has_ended:
            await self._finish(batch)
        if batch.record.status == "in_progress":
            batch.suspects = {}
            await self.run(batch)

    def _clear(self, batch: KeptBatch) -> None:
        """Let others be computed if this was the last batch with suspects."""
        self._suspected.discard(batch.record.batch_id)
        if not self._suspected:
            self._cleared.set()

    def _may_finish(self, batch: KeptBatch, computing: asyncio.Task[None]) -> bool:
        """Return whether a batch is computed, cancelled or out of time, and not only this server at its end."""
        error = None if computing.cancelled() else computing.exception()
        if error is None:
            return True
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, BatchLostError):
            raise error
        if not isinstance(error, EngineDiedError | ServiceError):
            logger.error("batch %s waits for the next start", batch.record.batch_id, exc_info=error)
        return False

    async def _compute(self, batch: KeptBatch) -> None:
        owner = batch.record.owner
        try:
            input_file = await self._files.find(batch.record.input_file_id, owner, "input_file_id")
        except ServiceError as error:  # somebody has put back an older copy of the folder
            if error.code != "file_not_found":
                raise
            await self._put(batch, "failed", errors=(LineError(error.code, str(error), error.param),))
            return
        if batch.suspects:
            async with self._trial:
                with await self._again(batch, lambda: self._files.open(input_file)) as file:
                    await self._compute_suspects(batch, file)
        self._clear(batch)
        await self._cleared.wait()
        await self._running.take(owner)
        try:
            with await self._again(batch, lambda: self._files.open(input_file)) as file:
                if batch.record.status == "validating":
                    await self._validate(batch, file)
                    file.seek(0)
                if batch.record.status == "in_progress":
                    await self._compute_lines(batch, file)
        finally:
            self._running.give_back(owner)

    async def _validate(self, batch: KeptBatch, file: BinaryIO) -> None:
        max_bytes = self._service.options.settings.max_body_bytes
        validation = Validation(file, max_bytes, (batch.record.endpoint,))
        while await self._service.in_thread(validation.step):
            pass
        if validation.errors:
            await self._put(batch, "failed", errors=tuple(validation.errors))
        else:
            await self._put(batch, "in_progress", num_lines=validation.num_lines)

    async def _compute_lines(self, batch: KeptBatch, file: BinaryIO) -> None:
        """Compute the lines that have no result."""
        results, record = await self._again(batch, lambda: self._store.results(batch.record.batch_id)), batch.record
        batch.num_completed, batch.num_failed = results.num_completed, results.num_failed
        if self._lines is None:  # the engine is there by now
            num_slots = self._service.model.engine.info.max_num_seqs
            self._lines = Turns(num_slots, lambda: num_slots)
        lines = self._lines
        async with asyncio.TaskGroup() as group:
            async for raw in self._lines_of(file):
                if results.has(raw.n):
                    continue
                await lines.take(record.owner)
                # Not at the end of the coroutine: a task that is cancelled before it begins would keep its turn.
                group.create_task(self._line(batch, raw)).add_done_callback(lambda _: self._end_line(record.owner))

    async def _compute_suspects(self, batch: KeptBatch, file: BinaryIO) -> None:
        """Compute the lines that servers may have died of one by one, but for those that have had their chances."""
        async for raw in self._lines_of(file):
            num_deaths = batch.suspects.get(raw.n, 0)
            if num_deaths >= MAX_ATTEMPTS:
                message = f"{num_deaths} servers in a row ended while they computed this request"
                await self._add(batch, raw, self._failed(batch.record, raw, "generation_failed", message), failed=True)
            elif num_deaths:
                await self._line(batch, raw, is_filler=False)

    async def _lines_of(self, file: BinaryIO) -> AsyncIterator[RawLine]:
        unread = read_lines(file, self._service.options.settings.max_body_bytes)
        while (raw := await asyncio.to_thread(next, unread, None)) is not None:
            yield raw

    def _end_line(self, owner: str | None) -> None:
        assert self._lines is not None
        self._lines.give_back(owner)
        self._line_ended.set()

    async def _line(self, batch: KeptBatch, raw: RawLine, *, is_filler: bool = True) -> None:
        await self._again(batch, lambda: self._store.begin_line(batch.record.batch_id, raw.n))
        record = batch.record
        of_lines, urls = Batch(record.batch_id, record.created, record.owner, is_filler), (record.endpoint,)
        result, failed = await compute_line(self._service, of_lines, raw, self._wait_for_room, urls)
        await self._add(batch, raw, result, failed=failed)

    async def _add(self, batch: KeptBatch, raw: RawLine, result: str, *, failed: bool) -> None:
        """Keep a result."""
        record, num_bytes = batch.record, len(result)

        async def add() -> None:
            self._files.take_room(record.owner, num_bytes)
            try:
                await self._store.add_result(record.batch_id, raw.n, result, failed=failed)
            except ServiceError:
                self._files.give_room(record.owner, num_bytes)
                raise
            batch.held_bytes += num_bytes

        await self._again(batch, add)
        self.num_lines["failed" if failed else "completed"] += 1
        batch.num_failed += failed
        batch.num_completed += not failed

    async def _wait_for_room(self, limit_s: float) -> None:
        self._line_ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._line_ended.wait()

    async def _finish(self, batch: KeptBatch) -> None:
        """Write the files of a batch that is computed, cancelled or out of time; then it has ended.

        If it is none of these, as a database that crashed has lost results, it is in progress again.
        """
        try:
            await self._put(batch, "cancelling" if batch.is_cancelled else "finalizing")
        except BatchCancelledError:
            batch.is_cancelled = True
            await self._put(batch, "cancelling")
        if batch.is_cancelled:
            batch.cancelling.set()
        batch_id, num_lines = batch.record.batch_id, batch.record.num_lines
        results = await self._again(batch, lambda: self._store.results(batch_id))
        num_missing = num_lines - results.num_completed - results.num_failed
        if num_missing and not batch.is_cancelled and self._clock() < batch.record.expires_at:
            await self._put(batch, "in_progress")
            return
        is_late = not batch.is_cancelled and (num_missing > 0 or num_lines == 0)
        late = results if is_late and num_missing else None
        output_id = await self._write(batch, "output") if results.num_completed else None
        error_id = await self._write(batch, "error", late) if results.num_failed or late is not None else None
        batch.num_completed = results.num_completed
        batch.num_failed = results.num_failed + (num_missing if late is not None else 0)
        await self._put(
            batch,
            "cancelled" if batch.is_cancelled else "expired" if is_late else "completed",
            num_completed=batch.num_completed,
            num_failed=batch.num_failed,
            output_file_id=output_id,
            error_file_id=error_id,
        )
        await self._again(batch, lambda: self._store.drop_results(batch_id))
        self._files.give_room(batch.record.owner, batch.held_bytes)
        batch.held_bytes = 0
        logger.info("batch %s: %s", batch_id, batch.record.status)

    async def _write(self, batch: KeptBatch, kind: Literal["output", "error"], late: Results | None = None) -> str:
        """Write a file of a batch, unless an earlier server has; return its id. `late` lines have errors, too."""
        record = batch.record
        file_id = f"file-{hashlib.sha256(f'{record.batch_id} {kind}'.encode()).hexdigest()[:32]}"

        async def write() -> None:
            if await self._files.is_kept(file_id):
                return
            async with self._files.writing(record.owner, file_id, record.batch_id) as upload:
                with await self._store.read_results(record.batch_id, failed=kind == "error") as results:
                    await self._copy((result for _, result in results), upload.write)
                if late is not None:
                    input_file = await self._files.find(record.input_file_id, record.owner)
                    with await self._files.open(input_file) as file:
                        await self._copy(self._late_lines(record, file, late), upload.write)
                await upload.keep(f"{record.batch_id}_{kind}.jsonl", "batch_output", record.output_kept_s)

        await self._again(batch, write)
        return file_id

    def _late_lines(self, record: BatchRecord, file: BinaryIO, results: Results) -> Iterator[bytes]:
        message = "this request could not be computed before the completion window was over"
        for raw in read_lines(file, self._service.options.settings.max_body_bytes):
            if not results.has(raw.n):
                yield self._failed(record, raw, "batch_expired", message).encode() + b"\n"

    def _failed(self, record: BatchRecord, raw: RawLine, code: str, message: str) -> str:
        of_lines, max_bytes = Batch(record.batch_id, record.created), self._service.options.settings.max_body_bytes
        return failed_line(of_lines, raw, code, message, max_bytes, (record.endpoint,))

    async def _copy(self, lines: Iterator[bytes], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write lines, as many at once as make a piece."""

        def piece() -> bytes:
            taken = bytearray()
            while len(taken) < PIECE_BYTES and (line := next(lines, None)) is not None:
                taken += line
            return bytes(taken)

        while data := await self._service.in_thread(piece):
            await write(data)

    async def _put(self, batch: KeptBatch, status: BatchStatus, **changes: object) -> None:
        """Change the record of a batch; note when its status began."""
        times = {status: int(self._clock()), **batch.record.times}
        record = replace(batch.record, status=status, times=times, **changes)  # type: ignore[arg-type]
        await self._again(batch, lambda: self._store.put(record))
        batch.record = record
        if record.has_ended:
            self._files.let_go(record.input_file_id)

    async def _again(self, batch: KeptBatch, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make a call to a store, again and again while the disk or the limits of its owner are full."""
        while True:
            try:
                return await call()
            except (BatchLostError, BatchCancelledError):
                raise
            except ServiceError as error:
                logger.warning("batch %s goes on in %g s: %s", batch.record.batch_id, RETRY_S, error)
            await asyncio.sleep(RETRY_S)
