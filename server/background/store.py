"""The completions that are kept: they go on without a client, are read by any number of them, and survive a restart.

A recorder for each takes its outputs from the engine, has them journaled and only then shows them; a reader derives
events from what is shown, out of memory while the completion is under way and out of the journal once it has ended. So
whoever comes back after a crash misses nothing and sees nothing twice. Knows no HTTP; `answer.py` and routes call it.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext

from gptserve.engine.errors import EngineDiedError, QueueFullError
from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import Request
from gptserve.server.background.journal import CompletionRecord, EndRecord, EndStatus, IndexRow, Journal, JournalError
from gptserve.server.background.kept import (
    Ask,
    Entry,
    Live,
    Reader,
    Restore,
    apply_again,
    model_changed,
    not_found,
    restored,
    take,
    too_many,
)
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionRun, expiring, render_outputs
from gptserve.server.completions.service import Service
from gptserve.server.errors import INTERNAL_ERROR, ApiError, to_api_error, unavailable

NO_LIMIT = -1
_LEFT_TO_THE_NEXT_START = ("draining", "engine_unavailable")  # codes of what ends the server and no completion

logger = logging.getLogger(__name__)


class CompletionStore:
    """All completions that are kept, by id and by key; those that have ended in the order in which they did.

    `restore` gives the plan of a completion back, by the kind of its record. Invariants: what a reader has seen is in
    the journal; an id has one recorder at most; a key leads to one completion that has not failed.
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
        self._entries: dict[str, Entry] = {}
        self._ended: dict[str, Entry] = {}
        self._keys: dict[str, Entry] = {}
        self._beginning: dict[str, tuple[str, asyncio.Task[Entry]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()

    def counts(self) -> Mapping[str, int]:
        """Return how many completions have which status."""
        return collections.Counter(entry.status for entry in self._entries.values())

    def find(self, completion_id: str) -> Entry:
        """Return a completion by its id. Raises ApiError."""
        self._drop_expired()
        entry = self._entries.get(completion_id)
        if entry is None:
            raise not_found(completion_id)
        return entry

    def reader(self, entry: Entry) -> Reader:
        """Return a new reader, to be closed by whoever asked for it."""
        return Reader(entry, self._journal)

    async def keep(self, ask: Ask, make_plan: Callable[[], Awaitable[CompletionPlan]]) -> Entry:
        """Begin a completion, or return the one that has the key already.

        Raises what `make_plan` and Service.submit raise, ApiError and JournalError; then nothing is kept.
        """
        self._drop_expired()
        if ask.key is None:
            return await self._begin(ask, make_plan)
        entry = self._keys.get(ask.key)
        if entry is not None:
            ask.check_same(entry.digest)
            return entry
        if ask.key in self._beginning:
            digest, task = self._beginning[ask.key]
            ask.check_same(digest)
        else:
            task = asyncio.create_task(self._begin(ask, make_plan))
            self._beginning[ask.key] = ask.digest, task
            task.add_done_callback(lambda _: self._beginning.pop(ask.key or ""))
        return await asyncio.shield(task)  # a client that hangs up leaves it to the others

    async def plan(self, entry: Entry) -> CompletionPlan:
        """Return the plan of a completion. Raises ApiError or JournalError."""
        if entry.live is not None:
            return entry.live.plan
        try:
            record = await self._journal.record(entry.completion_id)
        except JournalError:
            self.find(entry.completion_id)  # it may have been dropped meanwhile
            raise
        return await asyncio.to_thread(restored, self._restore, record, is_foreign=entry.is_foreign)

    async def result(self, entry: Entry) -> dict[str, object]:
        """Return the answer as it stands, with status and error. Raises ApiError or JournalError."""
        plan = await self.plan(entry)
        batches = list(entry.live.batches) if entry.live is not None else []
        status = entry.status
        error = entry.error.body()["error"] if entry.error is not None and entry.live is None else None
        if not batches and entry.num_batches:
            batches = await self._journal.batches(entry.completion_id, 0, entry.num_batches)
            if len(batches) < entry.num_batches:
                self.find(entry.completion_id)  # it may have been dropped meanwhile
                raise JournalError(f"the journal lacks the end of completion {entry.completion_id!r}")
        answer = await self._service.in_thread(render_outputs, plan, batches, self._service.tokenizer)
        return {**answer, "status": status, "error": error if status in ("failed", "cancelled") else None}

    async def cancel(self, entry: Entry) -> None:
        """End a completion, unless it has ended, and return when that is journaled."""
        live = entry.live
        if live is None:
            return
        live.ending = live.ending or ApiError(409, "the completion was cancelled", code="cancelled")
        self._cut_off(live)
        await live.ended.wait()

    async def start(self) -> None:
        """Read the journal and go on with what is under way in it, in the background. Raises JournalError."""
        waiting = []
        for row in await self._journal.load():
            entry = self._enter(row)
            if row.end is None:
                waiting.append((entry, await self._journal.record(row.completion_id)))
        for entry, record in waiting:
            await self._take_up(entry, record)
        if waiting:
            logger.info("taking up %d completions that were under way", len(waiting))
        self._drop_expired()

    async def suspend(self) -> None:
        """Leave what is under way to the next start; only a journal that outlives the process can."""
        if not self._journal.is_durable:
            return
        for entry in list(self._entries.values()):
            if entry.live is not None:
                message = "the server is shutting down; the completion goes on once it has been started again"
                entry.live.ending = entry.live.ending or unavailable(message, code="draining")
                self._cut_off(entry.live)
        await self.settle()

    async def settle(self) -> None:
        """Return once everything under way has ended and is journaled: all streams have ended, or will."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _begin(self, ask: Ask, make_plan: Callable[[], Awaitable[CompletionPlan]]) -> Entry:
        """Plan, submit, journal and record a new completion."""
        plan = await make_plan()
        with self._service.counting_rejections():
            self._check_room()
        remaining_s = plan.remaining_s(time.perf_counter() - ask.started_at)
        deadline = None if remaining_s is None else self._clock() + remaining_s
        stream = self._service.submit(plan.requests)
        run = CompletionRun(plan, self._service.tokenizer, self._service.metrics, ask.started_at)
        entry = Entry(plan.identity.completion_id, ask.key, ask.digest, live=Live(plan, run, deadline, stream=stream))
        self._entries[entry.completion_id] = entry
        with self._service.lifecycle.active():
            try:
                await self._journal.add(ask.record(plan, deadline))
            except BaseException:
                stream.abort()
                del self._entries[entry.completion_id]
                raise
            if entry.key is not None:
                self._keys[entry.key] = entry
            self._make_room()  # not before: what is refused costs nobody a result
            self._spawn(self._record(entry, plan.requests))
            await asyncio.sleep(0)  # the recorder begins, and counts by itself
        return entry

    async def _record(self, entry: Entry, requests: tuple[Request, ...]) -> None:
        """Follow a completion to its end: what is journaled is shown, in this order."""
        live = entry.live
        assert live is not None
        # What outlives the process need not be waited for when that ends.
        with nullcontext() if self._journal.is_durable else self._service.lifecycle.active():
            error: ApiError | None = None
            try:
                if requests:
                    await self._follow(entry, live, requests)
                if not live.run.output.is_complete:
                    error = live.ending
            except Exception as raised:
                error = to_api_error(raised).fresh()
                if error.code == INTERNAL_ERROR:
                    logger.error("completion %s failed unexpectedly", entry.completion_id, exc_info=raised)
                if isinstance(raised, EngineDiedError):
                    error = live.ending or error
            finally:
                if live.stream is not None:
                    live.stream.abort()
            await self._end(entry, live, error)

    async def _follow(self, entry: Entry, live: Live, requests: tuple[Request, ...]) -> None:
        if live.stream is None:
            live.stream = await self._wait_for_room(live, requests)
        remaining_s = None if live.deadline is None else live.deadline - self._clock()
        with expiring(live.stream, remaining_s):
            if live.ending is not None:
                live.stream.abort()
            async for outputs in live.stream:
                taken, failure = await take(outputs, live.run, live.stream)
                if taken:
                    await self._journal.append(entry.completion_id, len(live.batches), taken)
                    live.batches.append(taken)
                    entry.status = "in_progress"
                    for reader in live.readers:
                        reader.wake()
                if failure is not None:
                    raise failure

    async def _wait_for_room(self, live: Live, requests: tuple[Request, ...]) -> TokenStream:
        """Submit requests as soon as the engine's queue has room for them; one that is out of time waits no longer."""
        while True:
            try:
                return self._service.engine.submit(requests)
            except QueueFullError as error:
                info = self._service.engine.info
                if len(requests) > info.max_num_seqs + info.max_num_queued_reqs:
                    raise
                wait_s = error.retry_after_s
            if live.ending is not None or (live.deadline is not None and live.deadline <= self._clock()):
                return TokenStream((request.request_id for request in requests), lambda _: None)
            self._room.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._room.wait()
            except TimeoutError:
                continue

    async def _end(self, entry: Entry, live: Live, error: ApiError | None) -> None:
        """Journal the end and tell the readers; a completion that is left to the next start only stops."""
        entry.num_batches = len(live.batches)
        if self._journal.is_durable and error is not None and error.code in _LEFT_TO_THE_NEXT_START:
            entry.error = error
        else:
            await self._journal_end(entry, error)
            live.run.is_failed = entry.status == "failed"
            told = live.run.close()
            why = "" if entry.error is None else f": {entry.error}"
            level = logging.WARNING if live.run.is_failed else logging.INFO
            logger.log(level, "completion %s is %s%s", entry.completion_id, entry.status, why, extra=told)
        entry.live = None
        live.ended.set()
        self._room.set()
        for reader in live.readers:
            reader.wake()

    async def _journal_end(self, entry: Entry, error: ApiError | None) -> None:
        """Enter how a completion ended once that is in the journal; what cannot be journaled has failed."""
        status: EndStatus = "completed" if error is None else "cancelled" if error.code == "cancelled" else "failed"
        finished_at = self._clock()
        text = None if error is None else json.dumps(error.fields())
        try:
            await self._journal.end(entry.completion_id, EndRecord(status, text, finished_at, entry.num_batches))
        except JournalError as failure:
            logger.error("the end of completion %s is not journaled: %s", entry.completion_id, failure)
            status, error = "failed", error if status == "failed" else to_api_error(failure)
        entry.status, entry.error, entry.finished_at = status, error, finished_at
        self._ended[entry.completion_id] = entry
        if status == "failed":
            self._release_key(entry)

    def _enter(self, row: IndexRow) -> Entry:
        """Take a completion of the journal into the index."""
        entry = Entry(row.completion_id, row.key, row.digest)
        entry.is_foreign = row.fingerprint != self._service.engine.info.fingerprint
        if row.end is not None:
            entry.status, entry.finished_at = row.end.status, row.end.finished_at
            entry.error = None if row.end.error is None else ApiError.from_fields(json.loads(row.end.error))
            entry.num_batches = 0 if entry.is_foreign else row.end.num_batches
            if entry.is_foreign and entry.status == "completed":
                entry.status, entry.error = "failed", model_changed()
            self._ended[entry.completion_id] = entry
        self._entries[entry.completion_id] = entry
        if entry.key is not None and entry.status != "failed":
            held = self._keys.get(entry.key)
            # One that is under way beside one that has ended was told to have failed: its end could not be journaled.
            if held is None or held.status == "queued" or row.end is not None:
                self._keys[entry.key] = entry
        return entry

    async def _take_up(self, entry: Entry, record: CompletionRecord) -> None:
        """Go on with a completion where it was left. Raises JournalError."""
        if entry.is_foreign:
            await self._journal_end(entry, model_changed())
            logger.warning("completion %s is %s: %s", entry.completion_id, entry.status, entry.error)
            return
        batches = await self._journal.batches(entry.completion_id, 0, NO_LIMIT)
        plan = await asyncio.to_thread(restored, self._restore, record, is_foreign=False)
        began = time.perf_counter() - (self._clock() - record.created)
        run = CompletionRun(plan, self._service.tokenizer, self._service.metrics, began)
        entry.live = Live(plan, run, record.deadline, batches)
        entry.status = "in_progress" if batches else "queued"
        requests = apply_again(batches, plan, run.output)
        self._spawn(self._record(entry, requests))

    def _cut_off(self, live: Live) -> None:
        if live.stream is not None:
            live.stream.abort()
        self._room.set()

    def _check_room(self) -> None:
        """Raise ApiError if as many are under way as may be kept."""
        most = self._service.options.max_results
        if len(self._entries) - len(self._ended) >= most:
            raise too_many(most)

    def _make_room(self) -> None:
        """Drop those that ended first, as many as are too many."""
        num_too_many = len(self._entries) - self._service.options.max_results
        if num_too_many > 0:
            self._drop(list(itertools.islice(self._ended, num_too_many)))

    def _drop_expired(self) -> None:
        latest = self._clock() - self._service.options.result_ttl_s
        expired = []
        for entry in self._ended.values():
            if entry.finished_at > latest:
                break
            expired.append(entry.completion_id)
        if expired:
            self._drop(expired)

    def _drop(self, completion_ids: list[str]) -> None:
        for completion_id in completion_ids:
            self._release_key(self._ended.pop(completion_id))
            del self._entries[completion_id]
        self._spawn(self._forget(completion_ids))

    async def _forget(self, completion_ids: list[str]) -> None:
        try:
            await self._journal.forget(completion_ids)
        except JournalError as error:
            logger.warning("%d completions could not be deleted: %s", len(completion_ids), error)

    def _release_key(self, entry: Entry) -> None:
        """Let a key be used anew: after a failure a retry is to compute."""
        if entry.key is not None and self._keys.get(entry.key) is entry:
            del self._keys[entry.key]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
