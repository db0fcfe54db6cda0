"""One background completion: what was asked, its state in memory, and its readers.

`background.py` makes jobs, `recorder.py` changes them while they run, `response.py` reads. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import DRAWN_SEED_LIMIT
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionRun
from gptserve.server.core.background_status import BackgroundStatus
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.position import Position
from gptserve.server.jobs.records import CompletionRecord, OutputBatch
from gptserve.server.jobs.store import JobStore, StoreUnavailableError
from gptserve.server.schemas.completions import GenerationRequest
from gptserve.server.schemas.seed import DRAW
from gptserve.weights.generation import SAMPLING_DEFAULTS

READ_LIMIT = 64  # batches that a reader reads at once, and outputs that it yields at once: a millisecond of rendering
# In the place of what went into the prompt's tokens, which are kept.
STAND_INS = {"prompt": "", "messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {}}
DIALECT = "dialect"  # beside the fields of the body in its record
Body = TypeVar("Body", bound=GenerationRequest)
OwnerAndKey = tuple[str | None, str]


@dataclass(slots=True, eq=False)
class RunningJob:
    """The part of a job that is in memory only while it runs. `stopped_by` is set when it is cancelled or suspended.

    `batches` follow the first num_stored ones, which an earlier server left in the journal.
    """

    plan: CompletionPlan
    run: CompletionRun
    deadline: float | None
    stream: TokenStream
    num_stored: int = 0
    batches: list[OutputBatch] = field(default_factory=list)
    stopped_by: ServiceError | None = None

    @property
    def num_batches(self) -> int:
        """How many batches are in the journal."""
        return self.num_stored + len(self.batches)


@dataclass(slots=True, eq=False)
class BackgroundJob:
    """A background completion. `running` is set until it ends; the fields from finished_at on are set at the end.

    Where servers share a store, one without `running` that `is_elsewhere` is another server's, or nobody's for now; an
    `error` of it says why this server cannot follow it. What the store was asked before known_at, by time.monotonic,
    is older than what is known.

    record is without body and prompts; num_bytes is what the journal has of it. num_batches says what to read back,
    `whole` is the position of a reader of everything. is_unreadable: its tokens may stand for other text here.
    `changed` is set when there are more batches or the job has ended, and is a new event from then on.
    """

    record: CompletionRecord
    num_prompt_tokens: int
    num_bytes: int = 0
    status: BackgroundStatus = "queued"
    running: RunningJob | None = None
    error: ServiceError | None = None
    finished_at: float = 0.0
    num_batches: int = 0
    num_tokens: int = 0
    whole: Position | None = None
    is_unreadable: bool = False
    is_elsewhere: bool = False
    known_at: float = 0.0
    num_waiting: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def completion_id(self) -> str:
        """The id under which its owner finds it."""
        return self.record.completion_id

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status not in ("queued", "in_progress")

    @property
    def owner_and_key(self) -> OwnerAndKey | None:
        """The owner with the idempotency key, if there is one."""
        return None if self.record.key is None else (self.record.owner, self.record.key)

    async def wait_for_change(self, limit_s: float | None = None) -> None:
        """Wait until readers are woken. Raises StoreUnavailableError after limit_s."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                await self.changed.wait()
        except TimeoutError as error:
            raise StoreUnavailableError("the store does not answer; the completion ends once it does") from error
        finally:
            self.num_waiting -= 1

    def wake_readers(self) -> None:
        """Tell all who wait that there are more outputs, that a reader was closed, or that the job has ended."""
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class BackgroundRequest:
    """A request for a background completion: its body, and the idempotency key, if it has one.

    fields are those of the body, with stand-ins for what made the prompt. digest is of path and all fields, and is the
    same for all requests with one key; it is empty without a key. started_at is by time.perf_counter.
    """

    fields: dict[str, object]
    digest: str
    owner: str | None
    key: str | None
    started_at: float

    @classmethod
    def of(
        cls, path: str, fields: dict[str, object], owner: str | None, key: str | None, started_at: float
    ) -> BackgroundRequest:
        """Return the request for a body with these fields; takes long for a large one with a key."""
        digest = "" if key is None else _digest(path, fields)
        return cls({name: STAND_INS.get(name, value) for name, value in fields.items()}, digest, owner, key, started_at)

    def seeded(self, body: Body) -> Body:
        """Return a body with the seed that the key stands for where it has none; without a key as it is.

        So a retry whose completion is lost begins the same one again, and an event id leads on in it.
        """
        if self.key is None or body.seed not in (None, DRAW):
            return body
        drawn = hashlib.sha256(json.dumps([self.owner, self.key, self.digest]).encode()).digest()
        return body.model_copy(update={"seed": int.from_bytes(drawn) % DRAWN_SEED_LIMIT})

    def check_same(self, digest: str) -> None:
        """Raise ServiceError unless the key came with the same request before."""
        if self.digest != digest:
            message = f"Idempotency-Key {self.key!r} was used with another request"
            raise ServiceError("idempotency_key_reused", message, param="Idempotency-Key")

    def to_record(self, plan: CompletionPlan, deadline: float | None) -> CompletionRecord:
        """Return the journal's record of the completion. Its body has the sampling defaults and dialect in force."""
        params = plan.requests[0].params
        defaults = {name: getattr(params, name) for name in SAMPLING_DEFAULTS}
        dialect = {} if plan.dialect is None else {DIALECT: plan.dialect.to_record()}
        return CompletionRecord(
            **asdict(plan.identity),
            kind=plan.shape.object,
            tokenizer=plan.model.tokenizer.fingerprint,
            body=json.dumps(self.fields | defaults | dialect),
            prompts=tuple(request.prompt_token_ids for request in plan.requests[:: plan.body.n or 1]),
            max_tokens=plan.requests[0].params.max_tokens,
            deadline=deadline,
            key=self.key,
            digest=self.digest,
        )


def _digest(path: str, fields: dict[str, object]) -> str:
    # One spelling, however it was sent. In small steps, unlike json.dumps, so that other threads have their turn.
    whole = "".join(json.JSONEncoder(sort_keys=True, separators=(",", ":")).iterencode(fields))
    return hashlib.sha256(f"{path}\n{whole}".encode()).hexdigest()


class Reader:
    """Iterates over the outputs of a job from the first one, for one client at its own pace.

    Each step lets the event loop turn once, then yields the next outputs, at most READ_LIMIT. The iteration stops when
    the job has ended, or raises the ServiceError that ended the job.
    """

    def __init__(self, job: BackgroundJob, store: JobStore) -> None:
        self._job = job
        self._store = store
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
        self._job.wake_readers()

    async def _read(self, position: int) -> list[OutputBatch]:
        """Wait for batches from `position` on and return some; none if the job has ended or the reader is closed."""
        job = self._job
        while not self._is_closed:
            running = job.running
            num_stored = job.num_batches if running is None else running.num_stored
            if position < num_stored:
                read = await self._store.batches(job.completion_id, position, min(READ_LIMIT, num_stored - position))
                if not read:
                    raise not_found(job.completion_id)
                return read
            if position > (num_stored if running is None else running.num_batches):
                raise StoreUnavailableError(
                    "the store has lost its last commits; come back with the id of the last event"
                )
            if running is None:
                if not job.is_elsewhere or job.error is not None:
                    break
            elif position < running.num_batches:
                first = position - running.num_stored
                return running.batches[first : first + READ_LIMIT]
            await job.wait_for_change()
        return []


def not_found(completion_id: str) -> ServiceError:
    """Return the error for an id that no background completion has."""
    message = f"completion {completion_id!r} does not exist: it did not run in the background, or it has expired"
    return ServiceError("completion_not_found", message, param="id")
