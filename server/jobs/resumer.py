"""Goes on with the jobs that an earlier server began, or another server of a shared store.

`background.py` calls it at the start, and `replica.py` for what this server takes over. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

from gptserve.engine.process.client import TokenStream
from gptserve.server.completions.run import CompletionRun
from gptserve.server.completions.service import Service
from gptserve.server.core.error_responses import to_service_error
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import READ_LIMIT, BackgroundJob, RunningJob
from gptserve.server.jobs.position import Position
from gptserve.server.jobs.recorder import RESUMABLE, Recorder
from gptserve.server.jobs.records import OutputBatch, StoredJob
from gptserve.server.jobs.resumption import (
    MAX_ATTEMPTS,
    Replay,
    Restore,
    Resumption,
    model_changed,
    rebuild_plan,
    too_many_attempts,
)
from gptserve.server.jobs.store import JobStore

logger = logging.getLogger(__name__)


class Resumer:
    """Makes jobs of what is stored, and lets the recorder run what is left of them; `spawn` keeps a task."""

    def __init__(
        self,
        service: Service,
        store: JobStore,
        restore: Mapping[str, Restore],
        recorder: Recorder,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._service = service
        self._store = store
        self._restore = restore
        self._recorder = recorder
        self._clock = clock
        self._spawn = spawn

    def to_job(self, stored: StoredJob) -> BackgroundJob:
        """Return the job of a stored completion, which does not run."""
        model = self._service.models.find_kept(stored.record.model)
        job = BackgroundJob(stored.record, stored.num_prompt_tokens, stored.num_bytes)
        job.is_unreadable = stored.record.tokenizer != model.tokenizer.fingerprint
        job.num_batches = 0 if job.is_unreadable else stored.num_batches
        job.status = "in_progress" if stored.num_batches else "queued"
        if (end := stored.end) is not None:
            job.status, job.finished_at, job.num_tokens = end.status, end.finished_at, end.num_tokens
            job.num_batches = 0 if job.is_unreadable else end.num_batches
            job.error = None if end.error is None else ServiceError.from_fields(json.loads(end.error))
            job.whole = None if end.position is None else Position.parse(end.position)
            if job.is_unreadable and job.status == "completed":
                job.status, job.error = "failed", model_changed()
        return job

    async def resume(self, job: BackgroundJob, stored: StoredJob) -> None:
        """Resume a job after its last journaled output, or end one that cannot go on. Raises JobStoreError."""
        model = self._service.models.find_kept(stored.record.model)
        is_foreign = stored.record.fingerprint != model.engine.info.fingerprint
        if is_foreign or stored.num_failed_resumes >= MAX_ATTEMPTS:
            async for batches in self._stored_batches(stored):
                job.num_tokens += sum(len(output.token_ids) for batch in batches for output in batch)
            await self._recorder.end(job, model_changed() if is_foreign else too_many_attempts())
            logger.warning("background completion %s: %s: %s", job.completion_id, job.status, job.error)
            return
        record = await self._store.read_record(job.completion_id)
        plan = await asyncio.to_thread(rebuild_plan, self._restore, record, model, is_unreadable=False)
        began = time.perf_counter() - (self._clock() - record.created)
        run = CompletionRun(plan, self._service, began)
        replay = Replay(plan, run.output)
        async for batches in self._stored_batches(stored):
            replay.add(batches)
        resumption = Resumption(stored, replay.requests())
        # Until it is the job's turn and the engine has room.
        stream = TokenStream((request.request_id for request in resumption.requests), lambda _: None)
        job.running = running = RunningJob(plan, run, record.deadline, stream, num_stored=stored.num_batches)
        job.status, job.is_elsewhere = "in_progress" if stored.num_batches else "queued", False
        self._spawn(self._recorder.run(job, running, resumption))
        job.wake_readers()

    async def take(self, job: BackgroundJob, stored: StoredJob) -> None:
        """Resume a job of a shared store, or end one that cannot be read or rebuilt with its error.

        Raises what another server, or this one later, may not meet.
        """
        try:
            await self.resume(job, stored)
        except Exception as raised:
            error = to_service_error(raised).fresh()
            if error.code in RESUMABLE:
                raise
            unforeseen = None if isinstance(raised, ServiceError) else raised
            logger.error("completion %s cannot go on: %s", job.completion_id, raised, exc_info=unforeseen)
            await self._recorder.end(job, error)

    async def _stored_batches(self, stored: StoredJob) -> AsyncIterator[list[OutputBatch]]:
        """Yield the journaled outputs of a job, page by page: those of many jobs may not fit into memory."""
        for first in range(0, stored.num_batches, READ_LIMIT):
            yield await self._store.batches(stored.record.completion_id, first, READ_LIMIT)
