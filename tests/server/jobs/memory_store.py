"""A second job store, of dictionaries: what the jobs need is in the interface, and nothing of SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, StoredJob, encode_outputs
from gptserve.server.jobs.store import NO_FORMER_OWNERS, FormerOwners, JobStore, JobStoreError


class MemoryJobStore(JobStore):
    """Holds records as they are. Nothing in it waits, so every call is atomic."""

    def __init__(self) -> None:
        self.on_write: Callable[[float], object] = lambda seconds: None
        self._is_closed = False
        self._records: dict[str, CompletionRecord] = {}
        self._batches: dict[str, list[OutputBatch]] = {}
        self._attempts: dict[str, tuple[int, ...]] = {}
        self._ends: dict[str, EndRecord] = {}

    @property
    def sharing(self) -> None:
        return None

    @property
    def is_durable(self) -> bool:
        return False

    def num_bytes(self) -> int:
        return 0

    async def open(self) -> None:
        self._check_open()

    async def close(self) -> None:
        self._is_closed = True

    async def load(self, former_owners: FormerOwners = NO_FORMER_OWNERS) -> list[StoredJob]:
        self._check_open()
        ended = sorted(self._ends, key=lambda completion_id: self._ends[completion_id].finished_at)
        by_age = sorted(self._records, key=lambda completion_id: self._records[completion_id].created)
        running = [completion_id for completion_id in by_age if completion_id not in self._ends]
        return [self._stored(completion_id) for completion_id in (*ended, *running)]

    async def read_record(self, completion_id: str) -> CompletionRecord:
        self._check_open()
        if completion_id not in self._records:
            raise JobStoreError(f"it has no completion {completion_id!r}")
        return self._records[completion_id]

    async def batches(self, completion_id: str, first: int, limit: int) -> list[OutputBatch]:
        self._check_open()
        return self._batches.get(completion_id, [])[first : first + limit]

    async def add(self, record: CompletionRecord) -> int:
        self._check_open()
        if record.completion_id in self._records:
            raise JobStoreError(f"it has a completion {record.completion_id!r}")
        self._records[record.completion_id], self._batches[record.completion_id] = record, []
        self.on_write(0.0)
        return _num_bytes(record)

    async def append(self, completion_id: str, n: int, outputs: OutputBatch) -> int:
        self._check_open()
        if n != len(self._batches.get(completion_id, [None])):
            raise JobStoreError(f"{completion_id!r} has no place for batch {n}")
        self._batches[completion_id].append(outputs)
        self.on_write(0.0)
        return len(encode_outputs(outputs))

    async def add_attempt(self, stored: StoredJob) -> None:
        self._check_open()
        self._attempts[stored.record.completion_id] = (*stored.attempts, stored.num_batches)

    async def clear_attempts(self) -> None:
        self._check_open()
        self._attempts.clear()

    async def end(self, completion_id: str, end: EndRecord) -> None:
        self._check_open()
        if completion_id not in self._records or completion_id in self._ends:
            raise JobStoreError(f"{completion_id!r} has ended, or never began")
        self._ends[completion_id] = end

    async def forget(self, completion_ids: Iterable[str]) -> None:
        self._check_open()
        for completion_id in completion_ids:
            for kept in (self._records, self._batches, self._attempts, self._ends):
                kept.pop(completion_id, None)  # type: ignore[attr-defined]

    def _stored(self, completion_id: str) -> StoredJob:
        record, batches = self._records[completion_id], self._batches[completion_id]
        return StoredJob(
            replace(record, body="", prompts=()),
            num_prompt_tokens=sum(map(len, record.prompts)),
            num_bytes=_num_bytes(record) + sum(len(encode_outputs(outputs)) for outputs in batches),
            num_batches=len(batches),
            attempts=self._attempts.get(completion_id, ()),
            end=self._ends.get(completion_id),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise JobStoreError("it is closed")


def _num_bytes(record: CompletionRecord) -> int:
    return len(record.body)
