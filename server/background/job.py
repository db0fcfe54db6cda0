"""One background completion: what was asked, its state in memory, and its readers.

`store.py` makes jobs, `recorder.py` changes them while they run, `response.py` reads. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import TokenOutput
from gptserve.server.api.schemas import BackgroundStatus
from gptserve.server.background.journal import CompletionRecord, Journal, OutputBatch
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionRun
from gptserve.server.errors import ServiceError

READ_LIMIT = 64  # batches that a reader reads at once, and outputs that it yields at once: a millisecond of rendering


@dataclass(slots=True, eq=False)
class RunningJob:
    """The part of a job that is in memory only while it runs. `stopped_by` is set when it is cancelled or suspended."""

    plan: CompletionPlan
    run: CompletionRun
    deadline: float | None
    batches: list[OutputBatch] = field(default_factory=list)
    readers: set[Reader] = field(default_factory=set)
    stream: TokenStream | None = None
    stopped_by: ServiceError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class BackgroundJob:
    """A background completion. `running` is set until it ends; num_batches, set at the end, says what to read back.

    is_foreign: another model made it. Its outputs cannot be read, as its tokens may stand for other text.
    """

    completion_id: str
    key: str | None
    digest: str
    status: BackgroundStatus = "queued"
    running: RunningJob | None = None
    error: ServiceError | None = None
    finished_at: float = 0.0
    num_batches: int = 0
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class BackgroundRequest:
    """A request for a background completion: the body as JSON and the idempotency key, if it has one.

    digest is of path and body, and is the same for all requests with one key. started_at is by time.perf_counter.
    """

    body: str
    digest: str
    key: str | None
    started_at: float

    @classmethod
    def of(cls, path: str, fields: dict[str, object], key: str | None, started_at: float) -> BackgroundRequest:
        """Return the request for a body with these fields; takes long for a large body."""
        body = json.dumps(fields, sort_keys=True, separators=(",", ":"))  # one spelling, however it was sent
        return cls(body, hashlib.sha256(f"{path}\n{body}".encode()).hexdigest(), key, started_at)

    def check_same(self, digest: str) -> None:
        """Raise ServiceError unless the key came with the same request before."""
        if self.digest != digest:
            message = f"Idempotency-Key {self.key!r} was used with another request"
            raise ServiceError("idempotency_key_reused", message, param="Idempotency-Key")

    def to_record(self, plan: CompletionPlan, deadline: float | None) -> CompletionRecord:
        """Return the journal's record of the completion."""
        identity = plan.identity
        return CompletionRecord(
            completion_id=identity.completion_id,
            kind=plan.shape.object,
            created=identity.created,
            model=identity.model,
            fingerprint=identity.fingerprint,
            batch_invariant=identity.batch_invariant,
            seed=identity.seed,
            body=self.body,
            prompts=tuple(request.prompt_token_ids for request in plan.requests[:: plan.body.n or 1]),
            max_tokens=plan.requests[0].params.max_tokens,
            deadline=deadline,
            key=self.key,
            digest=self.digest,
        )


class Reader:
    """Iterates over the outputs of a job from the first one, for one client at its own pace.

    Each iteration lets the event loop turn once, then yields the next outputs, at most READ_LIMIT. It stops when the
    job has ended, or raises the ServiceError that ended the job.
    """

    def __init__(self, job: BackgroundJob, journal: Journal) -> None:
        self._job = job
        self._journal = journal
        self._position = 0
        self._unread: Iterator[TokenOutput] = iter(())
        self._is_closed = False
        self._changed = asyncio.Event()
        if job.running is not None:
            job.running.readers.add(self)

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> tuple[TokenOutput, ...]:
        await asyncio.sleep(0)  # reading from memory never waits, and would keep the event loop from other tasks
        if self._is_closed:
            raise StopAsyncIteration
        while not (outputs := tuple(itertools.islice(self._unread, READ_LIMIT))):
            batches = await self._read()
            self._position += len(batches)
            self._unread = itertools.chain.from_iterable(batches)
        return outputs

    def wake(self) -> None:
        """Tell the reader that there are more outputs, or that the job has ended."""
        self._changed.set()

    def close(self) -> None:
        """End the iteration now."""
        self._is_closed = True
        if self._job.running is not None:
            self._job.running.readers.discard(self)
        self.wake()

    async def _read(self) -> list[OutputBatch]:
        """Wait for the next batches and return them. Raises ServiceError or StopAsyncIteration at the end."""
        while (running := self._job.running) is not None and not self._is_closed:
            if self._position < len(running.batches):
                return running.batches[self._position : self._position + READ_LIMIT]
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            raise StopAsyncIteration
        if self._position < self._job.num_batches:
            read = await self._journal.batches(self._job.completion_id, self._position, READ_LIMIT)
            if not read:
                raise not_found(self._job.completion_id)
            return read
        if self._job.error is not None:
            raise self._job.error.fresh()
        raise StopAsyncIteration


def not_found(completion_id: str) -> ServiceError:
    """Return the error for an id that no background completion has."""
    message = f"completion {completion_id!r} does not exist: it did not run in the background, or it has expired"
    return ServiceError("completion_not_found", message, param="id")


def too_many(limit: int) -> ServiceError:
    """Return the error for one background completion more than the limit."""
    message = f"{limit} background or keyed completions are running, which is the limit"
    return ServiceError("too_many_kept", message, retry_after_s=1)


def model_changed() -> ServiceError:
    """Return the error of a completion that another model began."""
    return ServiceError("model_changed", "the server now has another model or computes otherwise")
