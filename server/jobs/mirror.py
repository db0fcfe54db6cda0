"""Keeps the index like a store that other servers write, too: what they began, how far it is, and what they deleted.

`background.py` and `replica.py` call it, before they answer from the index. Where the store is this server's alone it
does nothing, as the index has everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from gptserve.server.jobs.index import JobIndex
from gptserve.server.jobs.job import BackgroundJob, OwnerAndKey, not_found
from gptserve.server.jobs.records import StoredJob
from gptserve.server.jobs.sharing import SharedJob, Sharing

PAGE = 64  # completions that are looked up at once: a millisecond of the event loop


class Mirror:
    """The index in step with the store. What runs here is not asked for: this server knows it best."""

    def __init__(self, sharing: Sharing | None, index: JobIndex, to_job: Callable[[StoredJob], BackgroundJob]) -> None:
        self._sharing = sharing
        self._index = index
        self._to_job = to_job

    async def refresh(self, completion_id: str) -> None:
        """Look up a completion, unless it runs here. Raises JobStoreError."""
        job = self._index.get(completion_id)
        if job is None or job.running is None:
            await self.refresh_some([completion_id])

    async def refresh_some(self, completion_ids: Collection[str]) -> None:
        """Look up completions. Raises JobStoreError."""
        if self._sharing is not None and completion_ids:
            asked_at = time.monotonic()
            self._note(await self._sharing.find(completion_ids), completion_ids, asked_at)

    async def refresh_key(self, owner_and_key: OwnerAndKey) -> None:
        """Look up the completion with a key. Raises JobStoreError."""
        if self._sharing is not None:
            asked_at = time.monotonic()
            found = await self._sharing.find_by_key(*owner_and_key)
            if found is not None:
                self.adopt(found, asked_at)
                if (job := self._index.get(found.stored.record.completion_id)) is not None:
                    self._index.give_key(job)

    async def refresh_all(self) -> None:
        """Look up all completions that may have changed, some at a time. Raises JobStoreError."""
        if self._sharing is None:
            return
        known, asked_at = {job.completion_id for job in self._index}, time.monotonic()
        there = await self._sharing.ids()
        asked = [completion_id for completion_id in there if self._may_have_changed(completion_id)]
        for begin in range(0, len(asked), PAGE):
            await self.refresh_some(asked[begin : begin + PAGE])
        self._note((), known.difference(there), asked_at)

    def _may_have_changed(self, completion_id: str) -> bool:
        job = self._index.get(completion_id)
        return job is None or (job.running is None and not job.has_ended)

    def adopt(self, shared: SharedJob, asked_at: float) -> BackgroundJob:
        """Return the job of a completion as the store had it when it was asked, unless more is known."""
        stored = shared.stored
        job = self._index.get(stored.record.completion_id)
        if job is not None and (job.running is not None or job.has_ended or asked_at < job.known_at):
            return job
        now = self._to_job(stored)
        now.num_tokens, now.is_elsewhere, now.known_at = shared.num_tokens, not now.has_ended, asked_at
        if job is None:
            self._index.add_stored(now)
            return now
        job.num_bytes, job.num_batches, job.num_tokens = now.num_bytes, now.num_batches, now.num_tokens
        job.error, job.finished_at, job.whole = now.error, now.finished_at, now.whole
        job.status, job.is_elsewhere, job.known_at = now.status, now.is_elsewhere, asked_at
        if job.has_ended:
            self._index.note_end(job)
        job.wake_readers()
        return job

    def _note(self, found: Iterable[SharedJob], asked: Collection[str], asked_at: float) -> None:
        """Adopt what was found, and remove what was asked for and is no more."""
        there = {self.adopt(shared, asked_at).completion_id for shared in found}
        for completion_id in asked:
            job = self._index.get(completion_id)
            if job is None or job.running is not None or asked_at < job.known_at:
                continue
            if completion_id not in there:
                self._index.remove(job)
                job.is_elsewhere, job.error = False, job.error or not_found(completion_id)
                job.wake_readers()
