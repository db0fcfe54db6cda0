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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace

from pydantic import ValidationError

from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import Request
from gptserve.server.api.errors import error_body
from gptserve.server.background.job import BackgroundJob, BackgroundRequest, Reader, RunningJob, not_found
from gptserve.server.background.journal import CompletionRecord, IndexRow, Journal, JournalError, OutputBatch
from gptserve.server.background.recorder import Recorder
from gptserve.server.completions.plan import CompletionPlan, Identity
from gptserve.server.completions.run import CompletionOutput, CompletionRun, render_outputs
from gptserve.server.completions.service import Service
from gptserve.server.errors import ServiceError

NO_LIMIT = -1

MakePlan = Callable[[], Awaitable[CompletionPlan]]
Restore = Callable[[dict[str, object], tuple[tuple[int, ...], ...], int, Identity], CompletionPlan]

logger = logging.getLogger(__name__)


class BackgroundStore:
    """All background jobs by id and by key; those that have ended in the order in which they ended.

    `restore` rebuilds a plan, by the kind of its record. Invariants: a reader sees only what is in the journal; a job
    has one recorder task at most; a key leads to one job that has not failed.
    """

    def __init__(
        self, service: Service, journal: Journal, restore: Mapping[str, Restore], clock: Callable[[], float] = time.time
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
        if completion_id not in self._jobs:
            raise not_found(completion_id)
        return self._jobs[completion_id]

    def reader(self, job: BackgroundJob) -> Reader:
        """Return a new reader from the first output on."""
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
        return await asyncio.to_thread(_restore_plan, self._restore, record, is_foreign=job.is_foreign)

    async def result(self, job: BackgroundJob) -> dict[str, object]:
        """Return the answer so far, with status and error. Raises ServiceError or JournalError."""
        plan = await self.plan(job)
        status = job.status
        error = error_body(job.error)["error"] if job.error is not None and status in ("failed", "cancelled") else None
        if job.running is not None:
            batches = list(job.running.batches)
        else:
            batches = await self._journal.batches(job.completion_id, 0, job.num_batches)
            if len(batches) < job.num_batches:
                self.find(job.completion_id)  # it may have been dropped meanwhile
                raise JournalError(f"the journal lacks the end of completion {job.completion_id!r}")
        answer = await self._service.in_thread(render_outputs, plan, batches, self._service.tokenizer)
        return {**answer, "status": status, "error": error}

    async def cancel(self, job: BackgroundJob) -> None:
        """End a job unless it has ended; return when the end is journaled."""
        if job.running is not None:
            self._recorder.stop(job.running, ServiceError("cancelled", "the completion was cancelled"))
        while job.running is not None:
            await job.running.changed.wait()

    async def start(self) -> None:
        """Read the journal and resume the jobs in it that have not ended. Raises JournalError."""
        jobs = [self._add(row) for row in await self._journal.load()]
        unfinished = [job for job in jobs if job.status == "queued"]
        for job in unfinished:
            await self._resume(job)
        if unfinished:
            logger.info("resuming %d background completion%s", len(unfinished), "" if len(unfinished) == 1 else "s")
        self._drop_expired()

    async def suspend(self) -> None:
        """Stop all jobs, for the next start to resume; does nothing when the journal is in memory."""
        if self._journal.is_durable:
            message = "the server is shutting down; the completion goes on once it has been started again"
            for job in self._jobs.values():
                if job.running is not None:
                    self._recorder.stop(job.running, ServiceError("draining", message))
            await self.settle()

    async def settle(self) -> None:
        """Return when every job has ended and is journaled. Call it once their streams have ended, or will."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _begin(self, request: BackgroundRequest, make_plan: MakePlan) -> BackgroundJob:
        """Plan, submit and journal a new job, and run it."""
        plan = await make_plan()
        limit = self._service.options.settings.max_results
        with self._service.counting_rejections():
            if len(self._jobs) - len(self._ended) >= limit:
                message = f"{limit} background or keyed completions are running, which is the limit"
                raise ServiceError("too_many_kept", message, retry_after_s=1)
        remaining_s = plan.remaining_s(time.perf_counter() - request.started_at)
        deadline = None if remaining_s is None else self._clock() + remaining_s
        stream = self._service.submit(plan.requests)
        run = CompletionRun(plan, self._service.tokenizer, self._service.metrics, request.started_at)
        running = RunningJob(plan, run, deadline, stream)
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
            # Those that ended first make room, but only after admission: a refused request evicts nothing.
            num_too_many = max(0, len(self._jobs) - limit)
            self._drop(list(itertools.islice(self._ended.values(), num_too_many)))
            self._spawn(self._recorder.run(job, running, ()))
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
                job.status, job.error = "failed", _model_changed()
            self._ended[job.completion_id] = job
        self._jobs[job.completion_id] = job
        if job.key is not None and job.status != "failed":
            other = self._keys.get(job.key)
            # Two jobs share a key when the end of the first could not be journaled: its clients were told that it
            # failed, and a retry began the second. So the one that has ended has the key.
            if other is None or other.status == "queued" or row.end is not None:
                self._keys[job.key] = job
        return job

    async def _resume(self, job: BackgroundJob) -> None:
        """Resume a job after its last journaled output. Raises JournalError."""
        if job.is_foreign:
            await self._recorder.end(job, _model_changed())
            logger.warning("background completion %s: %s: %s", job.completion_id, job.status, job.error)
            return
        record = await self._journal.read_record(job.completion_id)
        batches = await self._journal.batches(job.completion_id, 0, NO_LIMIT)
        plan = await asyncio.to_thread(_restore_plan, self._restore, record, is_foreign=False)
        began = time.perf_counter() - (self._clock() - record.created)
        run = CompletionRun(plan, self._service.tokenizer, self._service.metrics, began)
        requests = _replay(batches, plan, run.output)
        stream = TokenStream((request.request_id for request in requests), lambda _: None)  # until the engine has room
        job.running = running = RunningJob(plan, run, record.deadline, stream, batches)
        job.status = "in_progress" if batches else "queued"
        self._spawn(self._recorder.run(job, running, requests))

    def _drop_expired(self) -> None:
        latest = self._clock() - self._service.options.settings.result_ttl_s
        self._drop(list(itertools.takewhile(lambda job: job.finished_at <= latest, self._ended.values())))

    def _drop(self, jobs: list[BackgroundJob]) -> None:
        for job in jobs:
            self._release_key(job)
            del self._ended[job.completion_id], self._jobs[job.completion_id]
        if jobs:
            self._spawn(self._forget([job.completion_id for job in jobs]))

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


def _restore_plan(restore: Mapping[str, Restore], record: CompletionRecord, *, is_foreign: bool) -> CompletionPlan:
    """Rebuild the plan of a completion, without prompts if another model made it. Raises ServiceError."""
    identity = Identity(**{name: getattr(record, name) for name in Identity.__slots__})
    prompts = () if is_foreign else record.prompts
    try:
        return restore[record.kind](json.loads(record.body), prompts, record.max_tokens, identity)
    except ValidationError as error:
        if is_foreign:  # another version of this server may have accepted other bodies
            raise _model_changed() from error
        raise


def _replay(batches: Iterable[OutputBatch], plan: CompletionPlan, output: CompletionOutput) -> tuple[Request, ...]:
    """Apply journaled outputs to `output`; return the requests for the choices that have not ended."""
    requests = {request.request_id: request for request in plan.requests}
    generated: dict[str, list[int]] = {request_id: [] for request_id in requests}
    num_scored = dict.fromkeys(requests, 0)
    for made in itertools.chain.from_iterable(batches):
        output.add(made)
        generated[made.request_id] += made.token_ids
        num_scored[made.request_id] += len(made.prompt_logprobs or ())
    return tuple(
        replace(request, generated_token_ids=tuple(generated[i]), num_scored_tokens=num_scored[i])
        for (i, request), choice in zip(requests.items(), output.choices, strict=True)
        if choice.finish_reason is None
    )


def _model_changed() -> ServiceError:
    """Return the error of a completion that another model began."""
    return ServiceError("model_changed", "the server now has another model or computes otherwise")
