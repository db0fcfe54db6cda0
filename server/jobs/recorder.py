"""Runs background jobs: takes their outputs from the engine, journals them, and only then shows them to readers.

So a reader that returns after a crash misses nothing and sees nothing twice. `background.py` calls it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

from gptserve.engine.errors import EngineDiedError, QueueFullError
from gptserve.server.completions.run import expiring
from gptserve.server.completions.service import Service
from gptserve.server.core.error_responses import INTERNAL_ERROR, to_service_error
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import BackgroundJob, RunningJob
from gptserve.server.jobs.position import Position
from gptserve.server.jobs.records import EndRecord, EndStatus, OutputBatch
from gptserve.server.jobs.resumption import Resumption
from gptserve.server.jobs.store import JOURNAL_UNAVAILABLE, LEASE_LOST, JobStore, JobStoreError

# Codes of errors that end the server, or its work on a job, but not a journaled job.
RESUMABLE = ("draining", "engine_unavailable", JOURNAL_UNAVAILABLE, LEASE_LOST)

logger = logging.getLogger(__name__)


class Recorder:
    """Runs each job until it ends. `on_end` is called when the end of a job is in the journal, or could not be.

    A job that was resumed repeatedly without output may be crashing the server. Such suspects run first, one by one:
    the next one, and all that are no suspects, when it has made an output or has ended. So the innocent are cleared. Of
    resumed jobs the engine gets no more than it has running slots and blocks for: whoever only waits for them is not
    to blame.
    """

    def __init__(
        self, service: Service, store: JobStore, clock: Callable[[], float], on_end: Callable[[BackgroundJob], None]
    ) -> None:
        self._service = service
        self._store = store
        self._clock = clock
        self._on_end = on_end
        self._room = asyncio.Event()
        self._suspects: list[RunningJob] = []
        self._resumed: list[RunningJob] = []
        """Resumed jobs whose turn has come."""

    async def run(self, job: BackgroundJob, running: RunningJob, resumption: Resumption | None = None) -> None:
        """Run a job to its end; first submit the requests of its resumption, if it is one."""
        if resumption is not None and resumption.is_suspect:
            self._suspects.append(running)
        # A durable job outlives the process, so a shutdown need not wait for it.
        with nullcontext() if self._store.is_durable else self._service.lifecycle.active():
            error: ServiceError | None = None
            try:
                await self._follow(job, running, resumption)
                if not running.run.output.is_complete:
                    error = running.stopped_by
            except Exception as raised:
                error = to_service_error(raised).fresh()
                if error.code == INTERNAL_ERROR:
                    logger.error("completion %s failed unexpectedly", job.completion_id, exc_info=raised)
                if isinstance(raised, EngineDiedError):
                    error = running.stopped_by or error
            finally:
                running.stream.abort()
            self._clear(running)
            if running in self._resumed:
                self._resumed.remove(running)
            await self._finish(job, running, error)

    def stop(self, running: RunningJob, reason: ServiceError) -> None:
        """Stop a job soon; the reason that is given first counts."""
        running.stopped_by = running.stopped_by or reason
        running.stream.abort()
        self._room.set()

    async def end(self, job: BackgroundJob, error: ServiceError | None) -> None:
        """Journal how a job ended, then set its status. A job whose end cannot be journaled has failed.

        One of a shared store goes on elsewhere then.
        """
        status: EndStatus = "completed" if error is None else "cancelled" if error.code == "cancelled" else "failed"
        finished_at = self._clock()
        text = None if error is None else json.dumps(error.fields())
        try:
            position = None if job.whole is None else str(job.whole)
            end = EndRecord(status, text, finished_at, job.num_batches, job.num_tokens, position)
            await self._store.end(job.completion_id, end)
        except JobStoreError as failure:
            if failure.code in RESUMABLE:
                self._let_go(job, failure)
                return
            logger.error("the end of completion %s is not journaled: %s", job.completion_id, failure)
            status, error = "failed", error if status == "failed" else failure.fresh()
        job.status, job.error, job.finished_at, job.is_elsewhere = status, error, finished_at, False
        job.known_at = time.monotonic()
        self._on_end(job)
        job.wake_readers()

    async def _follow(self, job: BackgroundJob, running: RunningJob, resumption: Resumption | None) -> None:
        if resumption is not None and resumption.requests:
            await self._submit(running, resumption)
        remaining_s = None if running.deadline is None else running.deadline - self._clock()
        num_live = running.stream.num_live
        with expiring(running.stream, remaining_s):
            async for outputs in running.stream:
                num_applied = 0
                try:
                    for output in outputs:
                        running.run.add(output, running.stream)
                        num_applied += 1
                        if output.prompt_logprobs is not None:
                            await asyncio.sleep(0)
                finally:  # show the outputs before the one that failed
                    if num_applied:
                        await self._show(job, running, outputs[:num_applied])
                if running.stream.num_live < num_live:
                    num_live = running.stream.num_live
                    self._room.set()

    async def _submit(self, running: RunningJob, resumption: Resumption) -> None:
        """Submit the requests when it is their turn and the engine's queue has room.

        Does nothing if the job is stopped or out of time before.
        """
        while running.stopped_by is None and (running.deadline is None or self._clock() < running.deadline):
            wait_s = None if running.deadline is None else running.deadline - self._clock()
            if self._is_turn_of(running):
                service = self._service.using(running.plan.model)
                service.check_alive()
                if running not in self._resumed:
                    self._resumed.append(running)
                    await self._store.add_attempt(resumption.stored)
                try:
                    running.stream = service.model.engine.submit(resumption.requests)
                    self._service.limits.begin(running.plan.identity.owner, running.stream)
                    return
                except QueueFullError as error:
                    info = service.model.engine.info
                    if len(resumption.requests) > info.max_num_seqs + info.max_num_queued_reqs:
                        raise
                    wait_s = error.retry_after_s
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._room.wait()

    def _is_turn_of(self, running: RunningJob) -> bool:
        if self._suspects:
            return self._suspects[0] is running
        num_begun = sum(job.stream.num_live for job in self._resumed)
        if running in self._resumed or num_begun == 0:
            return True
        info = running.plan.model.engine.info
        num_blocks = sum(_num_blocks(job, info.block_size) for job in (*self._resumed, running))
        return num_begun < info.max_num_seqs and num_blocks <= info.num_blocks

    def _clear(self, running: RunningJob) -> None:
        if running in self._suspects:
            self._suspects.remove(running)
            self._room.set()

    async def _show(self, job: BackgroundJob, running: RunningJob, outputs: OutputBatch) -> None:
        """Journal outputs, then show them to the readers."""
        job.num_bytes += await self._store.append(job.completion_id, running.num_batches, outputs)
        running.batches.append(outputs)
        job.status = "in_progress"
        self._clear(running)
        job.wake_readers()

    async def _finish(self, job: BackgroundJob, running: RunningJob, error: ServiceError | None) -> None:
        """Journal the end and wake the readers; a job that the next start resumes has no end to journal."""
        job.num_batches = running.num_batches
        job.num_tokens, job.whole = running.run.output.num_tokens, Position.of(running.run.output)
        if self._store.is_durable and error is not None and error.code in RESUMABLE:
            self._let_go(job, error)
        else:
            await self.end(job, error)
        if job.has_ended:
            running.run.is_failed = job.status == "failed"
            fields = running.run.close()
            self._service.limits.charge(job.record.owner, job.num_tokens)
            why = "" if job.error is None else f": {job.error}"
            level = logging.WARNING if running.run.is_failed else logging.INFO
            logger.log(level, "background completion %s: %s%s", job.completion_id, job.status, why, extra=fields)
        job.running = None
        self._room.set()
        job.wake_readers()

    def _let_go(self, job: BackgroundJob, reason: ServiceError) -> None:
        """Leave a job without an end: the next start goes on with it, or another server of the store."""
        job.is_elsewhere, job.known_at = self._store.sharing is not None, time.monotonic()
        job.error = None if reason.code == LEASE_LOST else reason.fresh()


def _num_blocks(running: RunningJob, block_size: int) -> int:
    """Return how many blocks the tokens so far of the choices that have not ended take, if none is shared."""
    choices = zip(running.plan.requests, running.run.output.choices, strict=True)
    live = (
        len(request.prompt_token_ids) + choice.num_tokens for request, choice in choices if choice.finish_reason is None
    )
    return sum(-(-num_tokens // block_size) for num_tokens in live)
