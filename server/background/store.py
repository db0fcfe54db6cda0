"""All background completions: they run without a client, have any number of readers, and survive a restart.

The store is the index, by id and by idempotency key. `recorder.py` runs a job. A reader (`job.py`) reads from memory
while the job runs, and from the journal afterwards. Routes and `response.py` call the store. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from gptserve.server.api.errors import error_body
from gptserve.server.background.job import (
    BackgroundJob,
    BackgroundRequest,
    Reader,
    RunningJob,
    model_changed,
    not_found,
    too_many,
)
from gptserve.server.background.journal import CompletionRecord, IndexRow, Journal, JournalError
from gptserve.server.background.recorder import Recorder
from gptserve.server.background.resume import Restore, replay, restore_plan
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionRun, render_outputs
from gptserve.server.completions.service import Service
from gptserve.server.errors import ServiceError

NO_LIMIT = -1

MakePlan = Callable[[], Awaitable[CompletionPlan]]

logger = logging.getLogger(__name__)


class BackgroundStore:
    """All background jobs by id and by key; those that have ended in the order in which they ended.

    `restore` rebuilds a plan, by the kind of its record. Invariants: a reader sees only what is in the journal; a job
    has one recorder task at most; a key leads to one job that has not failed.
    """

    def __init__(
        self,
        service: Service,
        journal: Journal,
        restore: Mapping[str, Restore],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._journal = journal
        self._restore = restore
        self._clock = clock
        self._recorder = Recorder(service, journal, clock, self._note_end)
        self._jobs: dict[str, BackgroundJob] = {}
        self._ended: dict[str, BackgroundJob] = {}
        self._keys: dict[str, BackgroundJob] = {}
        self._beginning: dict[str, tuple[str, asyncio.Task[BackgroundJob]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        return collections.Counter(job.status for job in self._jobs.values())

    def find(self, completion_id: str) -> BackgroundJob:
        """Return a job by its id. Raises ServiceError."""
        self._drop_expired()
        job = self._jobs.get(completion_id)
        if job is None:
            raise not_found(completion_id)
        return job

    def reader(self, job: BackgroundJob) -> Reader:
        """Return a new reader; the caller closes it."""
        return Reader(job, self._journal)

    async def begin_or_find(self, request: BackgroundRequest, make_plan: MakePlan) -> BackgroundJob:
        """Begin a job, or return the one that has the key already.

        Raises ServiceError, JournalError, and what `make_plan` and Service.submit raise; then no job has begun.
        """
        self._drop_expired()
        if request.key is None:
            return await self._begin(request, make_plan)
        job = self._keys.get(request.key)
        if job is not None:
            request.check_same(job.digest)
            return job
        if request.key in self._beginning:
            digest, task = self._beginning[request.key]
            request.check_same(digest)
        else:
            task = asyncio.create_task(self._begin(request, make_plan))
            self._beginning[request.key] = request.digest, task
            task.add_done_callback(lambda _: self._beginning.pop(request.key or ""))
        return await asyncio.shield(task)  # others with the same key may wait for it when this client hangs up

    async def plan(self, job: BackgroundJob) -> CompletionPlan:
        """Return the plan of a job. Raises ServiceError or JournalError."""
        if job.running is not None:
            return job.running.plan
        try:
            record = await self._journal.read_record(job.completion_id)
        except JournalError:
            self.find(job.completion_id)  # it may have been dropped meanwhile
            raise
        return await asyncio.to_thread(restore_plan, self._restore, record, is_foreign=job.is_foreign)

    async def result(self, job: BackgroundJob) -> dict[str, object]:
        """Return the answer so far, with status and error. Raises ServiceError or JournalError."""
        plan = await self.plan(job)
        batches = list(job.running.batches) if job.running is not None else []
        status = job.status
        error = error_body(job.error)["error"] if job.error is not None and job.running is None else None
        if not batches and job.num_batches:
            batches = await self._journal.batches(job.completion_id, 0, job.num_batches)
            if len(batches) < job.num_batches:
                self.find(job.completion_id)  # it may have been dropped meanwhile
                raise JournalError(f"the journal lacks the end of completion {job.completion_id!r}")
        answer = await self._service.in_thread(render_outputs, plan, batches, self._service.tokenizer)
        return {**answer, "status": status, "error": error if status in ("failed", "cancelled") else None}

    async def cancel(self, job: BackgroundJob) -> None:
        """End a job unless it has ended; return when the end is journaled."""
        running = job.running
        if running is None:
            return
        self._recorder.stop(running, ServiceError("cancelled", "the completion was cancelled"))
        await running.ended.wait()

    async def start(self) -> None:
        """Read the journal and resume the jobs in it that have not ended. Raises JournalError."""
        unfinished = []
        for row in await self._journal.load():
            job = self._add(row)
            if row.end is None:
                unfinished.append((job, await self._journal.read_record(row.completion_id)))
        for job, record in unfinished:
            await self._resume(job, record)
        if unfinished:
            plural = "" if len(unfinished) == 1 else "s"
            logger.info("resuming %d background completion%s", len(unfinished), plural)
        self._drop_expired()

    async def suspend(self) -> None:
        """Stop all jobs, for the next start to resume; does nothing when the journal is in memory."""
        if not self._journal.is_durable:
            return
        for job in list(self._jobs.values()):
            if job.running is not None:
                message = "the server is shutting down; the completion goes on once it has been started again"
                self._recorder.stop(job.running, ServiceError("draining", message))
        await self.settle()

    async def settle(self) -> None:
        """Return when every job has ended and is journaled. Call it once their streams have ended, or will."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _begin(self, request: BackgroundRequest, make_plan: MakePlan) -> BackgroundJob:
        """Plan, submit and journal a new job, and run it."""
        plan = await make_plan()
        with self._service.counting_rejections():
            self._check_room()
        remaining_s = plan.remaining_s(time.perf_counter() - request.started_at)
        deadline = None if remaining_s is None else self._clock() + remaining_s
        stream = self._service.submit(plan.requests)
        run = CompletionRun(plan, self._service.tokenizer, self._service.metrics, request.started_at)
        running = RunningJob(plan, run, deadline, stream=stream)
        job = BackgroundJob(plan.identity.completion_id, request.key, request.digest, running=running)
        self._jobs[job.completion_id] = job
        with self._service.lifecycle.active():
            try:
                await self._journal.add(request.to_record(plan, deadline))
            except BaseException:
                stream.abort()
                del self._jobs[job.completion_id]
                raise
            if job.key is not None:
                self._keys[job.key] = job
            self._make_room()  # only after admission, so that a refused request evicts nothing
            self._spawn(self._recorder.run(job, plan.requests))
            await asyncio.sleep(0)  # lets the recorder begin, which then counts as active itself
        return job

    def _note_end(self, job: BackgroundJob) -> None:
        self._ended[job.completion_id] = job
        if job.status == "failed":
            self._release_key(job)

    def _add(self, row: IndexRow) -> BackgroundJob:
        """Add a job of the journal to the index."""
        job = BackgroundJob(row.completion_id, row.key, row.digest)
        job.is_foreign = row.fingerprint != self._service.engine.info.fingerprint
        if row.end is not None:
            job.status, job.finished_at = row.end.status, row.end.finished_at
            job.error = None if row.end.error is None else ServiceError.from_fields(json.loads(row.end.error))
            job.num_batches = 0 if job.is_foreign else row.end.num_batches
            if job.is_foreign and job.status == "completed":
                job.status, job.error = "failed", model_changed()
            self._ended[job.completion_id] = job
        self._jobs[job.completion_id] = job
        if job.key is not None and job.status != "failed":
            other = self._keys.get(job.key)
            # Two jobs share a key when the end of the first could not be journaled: its clients were told that it
            # failed, and a retry began the second. So the one that has ended has the key.
            if other is None or other.status == "queued" or row.end is not None:
                self._keys[job.key] = job
        return job

    async def _resume(self, job: BackgroundJob, record: CompletionRecord) -> None:
        """Resume a job after its last journaled output. Raises JournalError."""
        if job.is_foreign:
            await self._recorder.end(job, model_changed())
            logger.warning("background completion %s: %s: %s", job.completion_id, job.status, job.error)
            return
        batches = await self._journal.batches(job.completion_id, 0, NO_LIMIT)
        plan = await asyncio.to_thread(restore_plan, self._restore, record, is_foreign=False)
        began = time.perf_counter() - (self._clock() - record.created)
        run = CompletionRun(plan, self._service.tokenizer, self._service.metrics, began)
        job.running = RunningJob(plan, run, record.deadline, batches)
        job.status = "in_progress" if batches else "queued"
        requests = replay(batches, plan, run.output)
        self._spawn(self._recorder.run(job, requests))

    def _check_room(self) -> None:
        """Raise ServiceError if as many jobs run as are allowed."""
        limit = self._service.options.settings.max_results
        if len(self._jobs) - len(self._ended) >= limit:
            raise too_many(limit)

    def _make_room(self) -> None:
        """Drop the jobs over the limit, those that ended first."""
        num_too_many = len(self._jobs) - self._service.options.settings.max_results
        if num_too_many > 0:
            self._drop(list(itertools.islice(self._ended, num_too_many)))

    def _drop_expired(self) -> None:
        latest = self._clock() - self._service.options.settings.result_ttl_s
        expired = []
        for job in self._ended.values():
            if job.finished_at > latest:
                break
            expired.append(job.completion_id)
        if expired:
            self._drop(expired)

    def _drop(self, completion_ids: list[str]) -> None:
        for completion_id in completion_ids:
            self._release_key(self._ended.pop(completion_id))
            del self._jobs[completion_id]
        self._spawn(self._forget(completion_ids))

    async def _forget(self, completion_ids: list[str]) -> None:
        try:
            await self._journal.forget(completion_ids)
        except JournalError as error:
            logger.warning("cannot delete %d background completions: %s", len(completion_ids), error)

    def _release_key(self, job: BackgroundJob) -> None:
        """Free the key of a job: a retry after a failure begins a new one."""
        if job.key is not None and self._keys.get(job.key) is job:
            del self._keys[job.key]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
