"""All background completions: they run without a client, have any number of readers, and survive a restart.

`BackgroundJobs` finds a job by id, or by owner and idempotency key. `recorder.py` runs it. A reader (`job.py`) reads
from memory while the job runs, and from the store afterwards. Routes and `response.py` call it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionOutput, CompletionRun, begin_output, render_outputs
from gptserve.server.completions.service import Service
from gptserve.server.core.error_responses import error_body
from gptserve.server.core.errors import ServiceError, shutting_down
from gptserve.server.jobs.index import JobIndex
from gptserve.server.jobs.job import (
    BackgroundJob,
    BackgroundRequest,
    OwnerAndKey,
    Reader,
    RunningJob,
    not_found,
)
from gptserve.server.jobs.mirror import Mirror
from gptserve.server.jobs.position import Position
from gptserve.server.jobs.recorder import Recorder
from gptserve.server.jobs.records import OutputBatch
from gptserve.server.jobs.replica import Replica
from gptserve.server.jobs.resumer import Resumer
from gptserve.server.jobs.resumption import (
    Replay,
    Restore,
    rebuild_plan,
)
from gptserve.server.jobs.sharing import SharedJob, Sharing
from gptserve.server.jobs.store import (
    NO_FORMER_OWNERS,
    FormerOwners,
    JobStore,
    JobStoreError,
    KeyTakenError,
    cancelled,
)

EXPIRY_INTERVAL_S = 10.0  # how long after its time a result may take space
END_LIMIT_S = 5.0  # that a client waits for a store, as for other requests

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
        self._resumer = Resumer(service, store, restore, self._recorder, clock, self._spawn)
        self._mirror = Mirror(store.sharing, self._index, self._resumer.to_job)
        self._replica = None if store.sharing is None else self._make_replica(store.sharing)
        self._beginning: dict[OwnerAndKey, tuple[str, asyncio.Task[BackgroundJob]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        return self._index.counts()

    async def list_jobs(self, owner: str | None, *, is_operator: bool) -> list[BackgroundJob]:
        """Return the jobs of an owner, for an operator those of all, oldest first. Raises JobStoreError."""
        await self._mirror.refresh_all()
        self.expire()
        jobs = (job for job in self._index if is_operator or job.record.owner == owner)
        return sorted(jobs, key=lambda job: job.record.created)

    async def find(self, completion_id: str, owner: str | None) -> BackgroundJob:
        """Return a job of this owner by its id. Raises ServiceError."""
        await self._mirror.refresh(completion_id)
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
        try:
            return await asyncio.shield(beginning)  # others with the same key may wait for it when this client hangs up
        except KeyTakenError:
            job = await self.find_same(request)  # which another server has begun meanwhile
            if job is None:
                raise
            return job

    def has_key(self, owner: str | None, key: str) -> bool:
        """Return whether a job has this key of an owner, or gets it now."""
        return (owner, key) in self._beginning or self._index.find_by_key((owner, key)) is not None

    async def find_same(self, request: BackgroundRequest) -> BackgroundJob | None:
        """Return the job that has the key of a request, or gets it now. Raises what `begin_or_find` raises."""
        if request.key is None:
            return None
        owner_and_key = request.owner, request.key
        if owner_and_key not in self._beginning:
            await self._mirror.refresh_key(owner_and_key)
        job = self._index.find_by_key(owner_and_key)
        if job is not None:
            request.check_same(job.record.digest)
        elif owner_and_key in self._beginning:
            digest, beginning = self._beginning[owner_and_key]
            request.check_same(digest)
            try:
                job = await asyncio.shield(beginning)
            except KeyTakenError:
                job = await self.find_same(request)  # which another server has begun meanwhile
                if job is None:
                    raise
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

    async def position(self, job: BackgroundJob, plan: CompletionPlan) -> Position:
        """Return the position of a reader of everything so far. Raises ServiceError or JobStoreError."""
        if job.running is not None:
            return Position.of(job.running.run.output)
        output = await begin_output(self._service, plan, CompletionOutput, plan)
        replay = Replay(plan, output)
        await self._service.in_thread(replay.add, await self.outputs(job))
        return Position.of(output)

    async def cancel(self, job: BackgroundJob) -> None:
        """End a job unless it has ended; return when the end is journaled.

        Raises ServiceError, also if the store does not take the end of one that runs here for END_LIMIT_S.
        """
        while job.running is not None or job.is_elsewhere:
            if job.running is not None:
                self._recorder.stop(job.running, cancelled())
            elif job.error is not None:
                raise job.error.fresh()
            elif self._store.sharing is not None:
                await self._store.sharing.cancel(job.completion_id)
                await self._mirror.refresh(job.completion_id)
            if job.running is not None or job.is_elsewhere:
                await job.wait_for_change(None if job.running is None else END_LIMIT_S)

    async def delete(self, job: BackgroundJob) -> None:
        """End a job and forget it; return when it is out of the journal, but for one that cannot be written."""
        await self.cancel(job)
        if self._index.find(job.completion_id) is job:
            self._index.remove(job)
            await self._forget([job.completion_id])

    async def start(self) -> None:
        """Read the journal and resume the jobs in it that have not ended. Raises JobStoreError.

        Of a shared store these are the jobs that no server has, and they are taken one after another.
        """
        if self._replica is not None:
            await self._store.load()
            await self._mirror.refresh_all()
            self._tidy()
            await self._replica.start()
            return
        stored_jobs = await self._store.load(self._former_owners)
        for stored in stored_jobs:
            self._index.add_stored(self._resumer.to_job(stored))
        self._expire_regularly()
        self._drop(self._index.to_evict())  # the limits may be lower now
        unfinished = [stored for stored in stored_jobs if stored.end is None]
        unfinished.sort(key=lambda stored: stored.num_failed_resumes, reverse=True)  # suspects come first
        for stored in unfinished:
            job = self._index.find(stored.record.completion_id)
            assert job is not None, "it has not ended"
            await self._resumer.resume(job, stored)
        if unfinished:
            logger.info("resuming %d background completion%s", len(unfinished), "" if len(unfinished) == 1 else "s")

    async def suspend(self) -> None:
        """Stop all jobs, for the next start to resume; does nothing when the journal is in memory."""
        if self._store.is_durable:
            message = "the server is shutting down; the completion goes on once it has been started again"
            if self._replica is not None:
                self._replica.stop_claiming()
            for job in self._index:
                if job.running is not None:
                    self._recorder.stop(job.running, ServiceError("draining", message))
                elif job.is_elsewhere:
                    job.error = ServiceError("draining", message)
                    job.wake_readers()
            await self.settle()
            with suppress(JobStoreError):  # then a server that ended in order counts like one that did not
                await self._store.clear_attempts()
            await self.leave()

    def expire(self) -> None:
        """Delete the jobs whose time is over, which nobody finds any more."""
        self._drop(self._index.expired())

    async def leave(self) -> None:
        """Leave the other servers of a shared store; this server computes nothing of it any more."""
        if self._replica is not None:
            await self._replica.leave()

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

    def _check_kept(self, job: BackgroundJob) -> None:
        """Raise ServiceError if a job has been dropped meanwhile."""
        if self._index.find(job.completion_id) is not job:
            raise not_found(job.completion_id)

    def _make_replica(self, sharing: Sharing) -> Replica:
        return Replica(
            sharing,
            self._index,
            self._mirror,
            take=self._take,
            stop=self._recorder.stop,
            capacity=self._capacity,
            tidy=self._tidy,
            tidy_interval_s=EXPIRY_INTERVAL_S,
        )

    async def _take(self, shared: SharedJob) -> None:
        """Run a job whose lease this server has got, or end it if it cannot go on. Raises as Resumer.take."""
        job = self._mirror.adopt(shared, asked_at := time.monotonic())
        if job.has_ended:  # in memory alone, as its end could not be journaled
            self._index.remove(job)
            job = self._mirror.adopt(shared, asked_at)
        if shared.is_cancelled:
            await self._recorder.end(job, cancelled())
        else:
            await self._resumer.take(job, shared.stored)

    def _capacity(self) -> tuple[frozenset[str], int]:
        """Return the fingerprints of the models, and how many more choices may run."""
        infos = [model.engine.info for _, model in self._service.models]
        num_live = sum(job.running.stream.num_live for job in self._index if job.running is not None)
        num_slots = max((m.engine.info.max_num_seqs for _, m in self._service.models if m.engine.is_alive), default=0)
        return frozenset(info.fingerprint for info in infos), max(0, num_slots - num_live)

    def _tidy(self) -> None:
        """Delete what is over, and what exceeds the limits."""
        self.expire()
        self._drop(self._index.to_evict())

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
