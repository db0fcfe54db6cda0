"""All background completions: they run without a client, have any number of readers, and survive a restart.

`BackgroundJobs` finds a job by id, or by owner and idempotency key. `recorder.py` runs it. A reader (`job.py`) reads
from memory while the job runs, and from the store afterwards. Routes and `response.py` call it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from gptserve.engine.process.client import TokenStream
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionRun, begin_output, render_outputs
from gptserve.server.completions.service import Service
from gptserve.server.core.error_responses import error_body
from gptserve.server.core.errors import ServiceError, shutting_down
from gptserve.server.jobs.index import JobIndex
from gptserve.server.jobs.job import (
    READ_LIMIT,
    BackgroundJob,
    BackgroundRequest,
    OwnerAndKey,
    Reader,
    RunningJob,
    not_found,
)
from gptserve.server.jobs.position import Position
from gptserve.server.jobs.recorder import Recorder
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
from gptserve.server.jobs.store import NO_FORMER_OWNERS, FormerOwners, JobStore, JobStoreError

EXPIRY_INTERVAL_S = 10.0  # how long after its time a result may take space

MakePlan = Callable[[], Awaitable[CompletionPlan]]

logger = logging.getLogger(__name__)


class BackgroundJobs:
    """All background jobs. `restore` rebuilds a plan, by the kind of its record; `former_owners` get their new names.

    Invariants: a reader sees only what is in the journal; a job has one recorder task at most; only its owner finds it.
    """

    def __init__(
        self,
        service: Service,
        store: JobStore,
        restore: Mapping[str, Restore],
        clock: Callable[[], float] = time.time,
        former_owners: FormerOwners = NO_FORMER_OWNERS,
    ) -> None:
        self._service = service
        self._store = store
        self._restore = restore
        self._clock = clock
        self._former_owners = former_owners
        self._recorder = Recorder(service, store, clock, self._note_end)
        self._index = JobIndex(service.options.settings, clock)
        self._beginning: dict[OwnerAndKey, tuple[str, asyncio.Task[BackgroundJob]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        return self._index.counts()

    async def list_jobs(self, owner: str | None, *, is_operator: bool) -> list[BackgroundJob]:
        """Return the jobs of an owner, for an operator those of all, oldest first."""
        self.expire()
        jobs = (job for job in self._index if is_operator or job.record.owner == owner)
        return sorted(jobs, key=lambda job: job.record.created)

    async def find(self, completion_id: str, owner: str | None) -> BackgroundJob:
        """Return a job of this owner by its id. Raises ServiceError."""
        job = self._index.find(completion_id)
        if job is None or job.record.owner != owner:
            raise not_found(completion_id)
        return job

    def fingerprints(self, request: BackgroundRequest) -> set[str]:
        """Return the fingerprints of the models of all completions with the key of a request, of failed ones, too."""
        return set() if request.key is None else self._index.fingerprints((request.owner, request.key))

    def reader(self, job: BackgroundJob) -> Reader:
        """Return a new reader from the first output on."""
        return Reader(job, self._store)

    async def begin_or_find(self, request: BackgroundRequest, make_plan: MakePlan) -> BackgroundJob:
        """Begin a job, or return the one that has the key already.

        Raises ServiceError, JobStoreError, and what `make_plan` and Service.submit raise; then no job has begun.
        """
        job = await self.find_same(request)
        if job is not None:
            return job
        plan = await make_plan()  # each makes its own, as what it refuses may be in this request alone: an event id
        job = await self.find_same(request)
        if job is not None:
            return job
        beginning = asyncio.create_task(self._begin(request, plan))
        if request.key is not None:
            owner_and_key = request.owner, request.key
            self._beginning[owner_and_key] = request.digest, beginning
            beginning.add_done_callback(lambda _: self._beginning.pop(owner_and_key))
        return await asyncio.shield(beginning)  # others with the same key may wait for it when this client hangs up

    def has_key(self, owner: str | None, key: str) -> bool:
        """Return whether a job has this key of an owner, or gets it now."""
        return (owner, key) in self._beginning or self._index.find_by_key((owner, key)) is not None

    async def find_same(self, request: BackgroundRequest) -> BackgroundJob | None:
        """Return the job that has the key of a request, or gets it now. Raises what `begin_or_find` raises."""
        if request.key is None:
            return None
        owner_and_key = request.owner, request.key
        job = self._index.find_by_key(owner_and_key)
        if job is not None:
            request.check_same(job.record.digest)
        elif owner_and_key in self._beginning:
            digest, beginning = self._beginning[owner_and_key]
            request.check_same(digest)
            job = await asyncio.shield(beginning)
        return job

    async def plan(self, job: BackgroundJob) -> CompletionPlan:
        """Return the plan of a job. Raises ServiceError or JobStoreError."""
        if job.running is not None:
            return job.running.plan
        try:
            record = await self._store.read_record(job.completion_id)
        except JobStoreError:
            self._check_kept(job)
            raise
        model, is_unreadable = self._service.models.find_kept(record.model), job.is_unreadable
        return await asyncio.to_thread(rebuild_plan, self._restore, record, model, is_unreadable=is_unreadable)

    async def result(self, job: BackgroundJob) -> dict[str, object]:
        """Return the answer so far, with status and error. Raises ServiceError or JobStoreError."""
        plan = await self.plan(job)
        status = job.status
        error = error_body(job.error)["error"] if job.error is not None and status in ("failed", "cancelled") else None
        batches = await self.outputs(job)
        answer = await self._service.in_thread(render_outputs, plan, batches)
        return {**answer, "status": status, "error": error}

    async def outputs(self, job: BackgroundJob) -> list[OutputBatch]:
        """Return the outputs so far. Raises ServiceError or JobStoreError."""
        num_stored, batches = job.num_batches, []
        if job.running is not None:
            num_stored, batches = job.running.num_stored, list(job.running.batches)
        stored = await self._store.batches(job.completion_id, 0, num_stored) if num_stored else []
        if len(stored) < num_stored:
            self._check_kept(job)
            raise JobStoreError(f"the journal lacks the end of completion {job.completion_id!r}")
        return [*stored, *batches]

    async def cancel(self, job: BackgroundJob) -> None:
        """End a job unless it has ended; return when the end is journaled."""
        if job.running is not None:
            self._recorder.stop(job.running, ServiceError("cancelled", "the completion was cancelled"))
        while job.running is not None:
            await job.changed.wait()

    async def delete(self, job: BackgroundJob) -> None:
        """End a job and forget it; return when it is out of the journal, but for one that cannot be written."""
        await self.cancel(job)
        if self._index.find(job.completion_id) is job:
            self._index.remove(job)
            await self._forget([job.completion_id])

    async def start(self) -> None:
        """Read the journal and resume the jobs in it that have not ended. Raises JobStoreError."""
        stored_jobs = await self._store.load(self._former_owners)
        for stored in stored_jobs:
            self._index.add_stored(self._to_job(stored))
        self._expire_regularly()
        self._drop(self._index.to_evict())  # the limits may be lower now
        unfinished = [stored for stored in stored_jobs if stored.end is None]
        unfinished.sort(key=lambda stored: stored.num_failed_resumes, reverse=True)  # suspects come first
        for stored in unfinished:
            await self._resume(stored)
        if unfinished:
            logger.info("resuming %d background completion%s", len(unfinished), "" if len(unfinished) == 1 else "s")

    async def suspend(self) -> None:
        """Stop all jobs, for the next start to resume; does nothing when the journal is in memory."""
        if self._store.is_durable:
            message = "the server is shutting down; the completion goes on once it has been started again"
            for job in self._index:
                if job.running is not None:
                    self._recorder.stop(job.running, ServiceError("draining", message))
            await self.settle()
            with suppress(JobStoreError):  # then a server that ended in order counts like one that did not
                await self._store.clear_attempts()

    def expire(self) -> None:
        """Delete the jobs whose time is over, which nobody finds any more."""
        self._drop(self._index.expired())

    async def settle(self) -> None:
        """Return when every job has ended and is journaled. Call it once their streams have ended, or will."""
        while self._tasks:  # the end of a job may begin a deletion
            await asyncio.wait(list(self._tasks))

    async def _begin(self, request: BackgroundRequest, plan: CompletionPlan) -> BackgroundJob:
        """Submit and journal a new job, and run it."""
        with self._service.counting_rejections():
            self._index.check_room(request.owner)
        remaining_s = plan.remaining_s(time.perf_counter() - request.started_at)
        deadline = None if remaining_s is None else self._clock() + remaining_s
        begun = plan, self._service, request.started_at
        run = await begin_output(self._service, plan, CompletionRun, *begun)
        stream = self._service.using(plan.model).submit(run.output.unfinished(), request.owner)
        running = RunningJob(plan, run, deadline, stream)
        record = request.to_record(plan, deadline)
        job = BackgroundJob(replace(record, body="", prompts=()), plan.num_prompt_tokens, running=running)
        self._index.add(job)
        with self._service.lifecycle.active():
            try:
                job.num_bytes = await self._store.add(record)
            except BaseException as raised:
                stream.abort()
                self._index.remove(job)
                # Its owner may have found it in the list meanwhile, and wait for it.
                job.error = raised.fresh() if isinstance(raised, ServiceError) else shutting_down()
                job.status, job.running = "failed", None
                job.wake_readers()
                raise
            self._index.give_key(job)
            # Those that ended first make room, but only after admission: a refused request evicts nothing.
            self._drop(self._index.to_evict(job))
            self._spawn(self._recorder.run(job, running))
            await asyncio.sleep(0)  # lets the recorder begin, which then counts as active itself
        return job

    def _note_end(self, job: BackgroundJob) -> None:
        self._index.note_end(job)
        self._drop(self._index.to_evict(job))

    def _to_job(self, stored: StoredJob) -> BackgroundJob:
        model = self._service.models.find_kept(stored.record.model)
        job = BackgroundJob(stored.record, stored.num_prompt_tokens, stored.num_bytes)
        job.is_unreadable = stored.record.tokenizer != model.tokenizer.fingerprint
        job.num_batches = 0 if job.is_unreadable else stored.num_batches
        if (end := stored.end) is not None:
            job.status, job.finished_at, job.num_tokens = end.status, end.finished_at, end.num_tokens
            job.num_batches = 0 if job.is_unreadable else end.num_batches
            job.error = None if end.error is None else ServiceError.from_fields(json.loads(end.error))
            job.whole = None if end.position is None else Position.parse(end.position)
            if job.is_unreadable and job.status == "completed":
                job.status, job.error = "failed", model_changed()
        return job

    async def _resume(self, stored: StoredJob) -> None:
        """Resume a job after its last journaled output. Raises JobStoreError."""
        job = self._index.find(stored.record.completion_id)
        assert job is not None, "it has not ended"
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
        job.status = "in_progress" if stored.num_batches else "queued"
        self._spawn(self._recorder.run(job, running, resumption))

    async def _stored_batches(self, stored: StoredJob) -> AsyncIterator[list[OutputBatch]]:
        """Yield the journaled outputs of a job, page by page: those of many jobs may not fit into memory."""
        for first in range(0, stored.num_batches, READ_LIMIT):
            yield await self._store.batches(stored.record.completion_id, first, READ_LIMIT)

    def _check_kept(self, job: BackgroundJob) -> None:
        """Raise ServiceError if a job has been dropped meanwhile."""
        if self._index.find(job.completion_id) is not job:
            raise not_found(job.completion_id)

    def _expire_regularly(self) -> None:
        self.expire()
        asyncio.get_running_loop().call_later(EXPIRY_INTERVAL_S, self._expire_regularly)

    def _drop(self, jobs: Sequence[BackgroundJob]) -> None:
        for job in jobs:
            self._index.remove(job)
        if jobs:
            self._spawn(self._forget([job.completion_id for job in jobs]))

    async def _forget(self, completion_ids: Sequence[str]) -> None:
        try:
            await self._store.forget(completion_ids)
        except JobStoreError as error:
            logger.warning("cannot delete %d background completions: %s", len(completion_ids), error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
