"""What is kept of a completion: what was asked, what is in memory while it is under way, and the way of a reader.

`store.py` mutates it; `answer.py` reads. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import Request, TokenOutput
from gptserve.server.api.schemas import KeptStatus
from gptserve.server.background.journal import CompletionRecord, Journal, Outputs
from gptserve.server.completions.plan import CompletionPlan, Identity
from gptserve.server.completions.run import CompletionOutput, CompletionRun
from gptserve.server.errors import ApiError

Restore = Callable[[dict[str, object], tuple[tuple[int, ...], ...], int, Identity], CompletionPlan]
READ_LIMIT = 64  # batches that a reader takes at once, and outputs that it gives: a millisecond of rendering


@dataclass(slots=True, eq=False)
class Live:
    """What is in memory of a completion that is under way. `ending` is what cuts it off, once something does."""

    plan: CompletionPlan
    run: CompletionRun
    deadline: float | None
    batches: list[Outputs] = field(default_factory=list)
    readers: set[Reader] = field(default_factory=set)
    stream: TokenStream | None = None
    ending: ApiError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Entry:
    """A kept completion. While it is under way `live` is set; then num_batches says how much of it is in the journal.

    Of a completion that another model made nothing can be read: its tokens may stand for other texts.
    """

    completion_id: str
    key: str | None
    digest: str
    status: KeptStatus = "queued"
    live: Live | None = None
    error: ApiError | None = None
    finished_at: float = 0.0
    num_batches: int = 0
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants kept: the body it sent, as JSON, and the key under which it would find it again.

    digest is of all that the key stands for; started_at is by time.perf_counter.
    """

    body: str
    digest: str
    key: str | None
    started_at: float

    @classmethod
    def of(cls, path: str, fields: dict[str, object], key: str | None, started_at: float) -> Ask:
        """Return what a body with these fields asks for; takes as long as it is large."""
        body = json.dumps(fields, sort_keys=True, separators=(",", ":"))  # one spelling, however it was sent
        return cls(body, hashlib.sha256(f"{path}\n{body}".encode()).hexdigest(), key, started_at)

    def check_same(self, digest: str) -> None:
        """Raise ApiError unless this asks for what the key stands for already."""
        if self.digest != digest:
            message = f"Idempotency-Key {self.key!r} was used with another request"
            raise ApiError(409, message, code="idempotency_key_reused", param="Idempotency-Key")

    def record(self, plan: CompletionPlan, deadline: float | None) -> CompletionRecord:
        """Return what is journaled of its completion."""
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
    """One client's way through the outputs of a completion, from the first, at its own pace.

    Each iteration gives what comes next, at most READ_LIMIT outputs, after the event loop has had a turn; ends with the
    completion, or raises the ApiError that ended it.
    """

    def __init__(self, entry: Entry, journal: Journal) -> None:
        self._entry = entry
        self._journal = journal
        self._position = 0
        self._taken: Iterator[TokenOutput] = iter(())
        self._is_closed = False
        self._changed = asyncio.Event()
        if entry.live is not None:
            entry.live.readers.add(self)

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> tuple[TokenOutput, ...]:
        await asyncio.sleep(0)  # what is in memory can be had without waiting, and a client may read it very often
        if self._is_closed:
            raise StopAsyncIteration
        while not (outputs := tuple(itertools.islice(self._taken, READ_LIMIT))):
            batches = await self._read()
            self._position += len(batches)
            self._taken = itertools.chain.from_iterable(batches)
        return outputs

    def wake(self) -> None:
        """Look again: there is more, or the end."""
        self._changed.set()

    def close(self) -> None:
        """End the iteration, whatever is to come."""
        self._is_closed = True
        if self._entry.live is not None:
            self._entry.live.readers.discard(self)
        self.wake()

    async def _read(self) -> list[Outputs]:
        """Return the next batches, as soon as there are some; raise what ends the iteration."""
        while (live := self._entry.live) is not None and not self._is_closed:
            if self._position < len(live.batches):
                return live.batches[self._position : self._position + READ_LIMIT]
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            raise StopAsyncIteration
        if self._position < self._entry.num_batches:
            read = await self._journal.batches(self._entry.completion_id, self._position, READ_LIMIT)
            if not read:
                raise not_found(self._entry.completion_id)
            return read
        if self._entry.error is not None:
            raise self._entry.error.fresh()
        raise StopAsyncIteration


def restored(restore: Mapping[str, Restore], record: CompletionRecord, *, is_foreign: bool) -> CompletionPlan:
    """Return the plan of a completion as it was, but for the prompts of one that is foreign. Raises ApiError."""
    identity = Identity(**{name: getattr(record, name) for name in Identity.__slots__})
    prompts = () if is_foreign else record.prompts
    try:
        return restore[record.kind](json.loads(record.body), prompts, record.max_tokens, identity)
    except ValidationError as error:
        if is_foreign:  # another version of this server may have taken other bodies
            raise model_changed() from error
        raise


async def take(outputs: Outputs, run: CompletionRun, stream: TokenStream) -> tuple[Outputs, ApiError | None]:
    """Apply outputs to a run; return those before the one that fails it, and how.

    After an output with scores of a prompt the event loop has a turn.
    """
    for num_taken, output in enumerate(outputs):
        try:
            collections.deque(run.apply((output,), stream), maxlen=0)
        except ApiError as error:
            return outputs[:num_taken], error
        if output.prompt_logprobs is not None:
            await asyncio.sleep(0)
    return outputs, None


def apply_again(batches: Iterable[Outputs], plan: CompletionPlan, output: CompletionOutput) -> tuple[Request, ...]:
    """Apply the outputs of an engine that is gone; return the requests for what is left of the completion."""
    generated: dict[str, list[int]] = {request.request_id: [] for request in plan.requests}
    num_scored: collections.Counter[str] = collections.Counter()
    for made in itertools.chain.from_iterable(batches):
        output.add(made)
        generated[made.request_id] += made.token_ids
        num_scored[made.request_id] += len(made.prompt_logprobs or ())
    return tuple(
        replace(
            request,
            generated_token_ids=tuple(generated[request.request_id]),
            num_scored_tokens=num_scored[request.request_id],
        )
        for request, choice in zip(plan.requests, output.choices, strict=True)
        if choice.finish_reason is None
    )


def not_found(completion_id: str) -> ApiError:
    """Return the error for an id that is of no kept completion."""
    message = f"completion {completion_id!r} does not exist: it was never kept, or its time is over"
    return ApiError(404, message, code="completion_not_found", param="id")


def too_many(most: int) -> ApiError:
    """Return the error for a completion that finds as many under way as may be kept."""
    message = f"{most} background or keyed completions are under way, which is all that may be kept"
    return ApiError(429, message, code="too_many_kept", headers={"retry-after": "1"})


def model_changed() -> ApiError:
    """Return the error of a completion that another model has begun."""
    return ApiError(500, "the server now has another model or computes otherwise", code="model_changed")
