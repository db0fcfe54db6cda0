"""One background completion: what was asked, its state in memory, and its readers.

`store.py` makes jobs, `recorder.py` changes them while they run, `response.py` reads. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from gptserve.engine.process.client import TokenStream
from gptserve.server.api.schemas import BackgroundStatus
from gptserve.server.background.journal import CompletionRecord, Journal, OutputBatch
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionRun
from gptserve.server.errors import ServiceError

READ_LIMIT = 64  # batches that a reader reads at once, and outputs that it yields at once: a millisecond of rendering


@dataclass(slots=True, eq=False)
class RunningJob:
    """The part of a job that is in memory only while it runs. `stopped_by` is set when it is cancelled or suspended.

    `changed` is set when there are more batches or the job has ended, and is a new event from then on.
    """

    plan: CompletionPlan
    run: CompletionRun
    deadline: float | None
    stream: TokenStream
    batches: list[OutputBatch] = field(default_factory=list)
    stopped_by: ServiceError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_readers(self) -> None:
        """Tell all who wait that there are more outputs, that a reader was closed, or that the job has ended."""
        self.changed.set()
        self.changed = asyncio.Event()


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
        return CompletionRecord(
            **asdict(plan.identity),
            kind=plan.shape.object,
            body=self.body,
            prompts=tuple(request.prompt_token_ids for request in plan.requests[:: plan.body.n or 1]),
            max_tokens=plan.requests[0].params.max_tokens,
            deadline=deadline,
            key=self.key,
            digest=self.digest,
        )


class Reader:
    """Iterates over the outputs of a job from the first one, for one client at its own pace.

    Each step lets the event loop turn once, then yields the next outputs, at most READ_LIMIT. The iteration stops when
    the job has ended, or raises the ServiceError that ended the job.
    """

    def __init__(self, job: BackgroundJob, journal: Journal) -> None:
        self._job = job
        self._journal = journal
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[OutputBatch]:
        position = 0
        while batches := await self._read(position):
            position += len(batches)
            unread = itertools.chain.from_iterable(batches)
            while outputs := tuple(itertools.islice(unread, READ_LIMIT)):
                await asyncio.sleep(0)  # memory never waits, and would keep the event loop from other tasks
                if self._is_closed:
                    return
                yield outputs
        if self._job.error is not None and not self._is_closed:
            raise self._job.error.fresh()

    def close(self) -> None:
        """End the iteration now."""
        self._is_closed = True
        if self._job.running is not None:
            self._job.running.wake_readers()

    async def _read(self, position: int) -> list[OutputBatch]:
        """Wait for batches from `position` on and return some; none if the job has ended or the reader is closed."""
        while (running := self._job.running) is not None and not self._is_closed:
            if position < len(running.batches):
                return running.batches[position : position + READ_LIMIT]
            await running.changed.wait()
        if self._is_closed or position >= self._job.num_batches:
            return []
        read = await self._journal.batches(self._job.completion_id, position, READ_LIMIT)
        if not read:
            raise not_found(self._job.completion_id)
        return read


def not_found(completion_id: str) -> ServiceError:
    """Return the error for an id that no background completion has."""
    message = f"completion {completion_id!r} does not exist: it did not run in the background, or it has expired"
    return ServiceError("completion_not_found", message, param="id")
