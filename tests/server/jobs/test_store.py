"""What every job store promises, tried with each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.server.jobs.postgres.store import PostgresJobStore
from gptserve.server.jobs.records import CompletionRecord, EndRecord, StoredJob
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStore, JobStoreError
from tests.server.jobs.memory_store import MemoryJobStore

RECORD = CompletionRecord(
    completion_id="cmpl-1",
    kind="text_completion",
    created=1_700_000_000,
    model="m",
    fingerprint="f",
    batch_invariant=True,
    seed=2**63 - 1,
    owner="me",
    tokenizer="t",
    body='{"prompt":"é\\u2028"}',
    prompts=((1, 2, 3), (), (4,)),
    max_tokens=7,
    deadline=1_700_000_000.123456789,
    key="k",
    digest="d",
)
STRIPPED = replace(RECORD, body="", prompts=())
END = EndRecord("completed", None, 1_700_000_001.5, 2, 8, "5.0.1")
OUTPUTS = (
    TokenOutput(
        "cmpl-1-0",
        (5, 6),
        logprobs=(TokenLogprobs(5, -0.1, 1, ((5, -0.1), (7, -math.inf))), TokenLogprobs(6, -1 / 3, 7)),
        prompt_logprobs=(None, TokenLogprobs(2, -1e-300, 3)),
        finish_reason=FinishReason.STOP,
        stop_token_id=0,
        num_cached_tokens=16,
        error="é",
    ),
    TokenOutput("cmpl-1-1", ()),
    TokenOutput("cmpl-1-2", (0,), finish_reason=FinishReason.TIMEOUT),
)
STORES: dict[str, Callable[[pytest.FixtureRequest], JobStore]] = {
    "SQLite in a folder": lambda request: SqliteJobStore(request.getfixturevalue("tmp_path")),
    "SQLite in memory": lambda request: SqliteJobStore(None),
    "PostgreSQL": lambda request: PostgresJobStore(request.getfixturevalue("postgres_url")),
    "dictionaries": lambda request: MemoryJobStore(),
}
UseStore = Callable[[Callable[[JobStore], Awaitable[None]]], None]


@pytest.fixture(params=STORES)
def use_store(request: pytest.FixtureRequest) -> UseStore:
    """Run a test with a store of each kind, which is closed after it."""
    store = STORES[request.param](request)

    def use(test: Callable[[JobStore], Awaitable[None]]) -> None:
        async def run() -> None:
            await store.open()
            try:
                await test(store)
            finally:
                await store.close()

        asyncio.run(asyncio.wait_for(run(), 20))

    return use


async def ids(store: JobStore) -> list[str]:
    return [stored.record.completion_id for stored in await store.load()]


def test_what_was_written_is_read_back_as_it_was(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        size = await store.add(RECORD) + await store.append("cmpl-1", 0, OUTPUTS)
        assert await store.read_record("cmpl-1") == RECORD
        assert await store.batches("cmpl-1", 0, 10) == [OUTPUTS]
        assert await store.load() == [StoredJob(STRIPPED, 4, size, num_batches=1)]
        await store.add_attempt((await store.load())[0])
        size += await store.append("cmpl-1", 1, OUTPUTS[1:]) + await store.append("cmpl-1", 2, OUTPUTS[2:])
        await store.end("cmpl-1", END)
        assert await store.batches("cmpl-1", 1, 1) == [OUTPUTS[1:]]
        assert await store.batches("cmpl-1", 1, 10) == [OUTPUTS[1:], OUTPUTS[2:]]
        assert await store.batches("cmpl-1", 3, 10) == []
        assert await store.load() == [StoredJob(STRIPPED, 4, size, num_batches=3, attempts=(1,), end=END)]
        await store.clear_attempts()
        assert await store.load() == [StoredJob(STRIPPED, 4, size, num_batches=3, end=END)]

    use_store(test)


def test_those_that_ended_come_first_in_the_order_of_their_ends(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        for i in range(4):
            await store.add(replace(RECORD, completion_id=str(i), created=i, key=str(i)))
        await store.end("3", replace(END, finished_at=10.0))
        await store.end("0", replace(END, finished_at=20.0))
        assert await ids(store) == ["3", "0", "1", "2"]

    use_store(test)


def test_what_is_forgotten_is_gone_and_the_rest_is_there(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        for completion_id in ("cmpl-1", "other"):
            await store.add(replace(RECORD, completion_id=completion_id, key=completion_id))
            await store.append(completion_id, 0, OUTPUTS)
        await store.end("cmpl-1", END)
        await store.forget(["cmpl-1", "never there"])
        assert await ids(store) == ["other"]
        assert await store.batches("cmpl-1", 0, 10) == []
        assert await store.batches("other", 0, 10) == [OUTPUTS]
        with pytest.raises(JobStoreError, match="it has no completion 'cmpl-1'"):
            await store.read_record("cmpl-1")

    use_store(test)


def test_a_write_that_is_refused_leaves_nothing_behind(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        size = await store.add(RECORD)
        with pytest.raises(JobStoreError):
            await store.add(replace(RECORD, body="another"))
        with pytest.raises(JobStoreError):
            await store.append("unknown", 0, OUTPUTS)
        with pytest.raises(JobStoreError):
            await store.end("unknown", END)
        assert await store.read_record("cmpl-1") == RECORD
        assert await store.load() == [StoredJob(STRIPPED, 4, size)]

    use_store(test)


def test_completions_are_written_at_once_and_each_write_is_told(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        seconds: list[float] = []
        store.on_write = seconds.append
        names = [str(i) for i in range(20)]
        await asyncio.gather(*(store.add(replace(RECORD, completion_id=name, key=None)) for name in names))
        await asyncio.gather(*(store.append(name, 0, OUTPUTS) for name in names))
        assert sorted(await ids(store)) == sorted(names)
        assert min(seconds) >= 0

    use_store(test)


def test_a_closed_store_is_closed_again_in_peace_and_says_what_it_is(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        await store.add(RECORD)
        await store.close()
        with pytest.raises(JobStoreError, match="closed"):
            await store.read_record("cmpl-1")

    use_store(test)


def test_closing_waits_for_what_is_being_written(use_store: UseStore) -> None:
    async def test(store: JobStore) -> None:
        await store.add(RECORD)
        writing = asyncio.create_task(store.append("cmpl-1", 0, OUTPUTS))
        await asyncio.sleep(0)
        await store.close()
        assert await writing > 0
        with pytest.raises(JobStoreError, match="closed"):
            await store.append("cmpl-1", 1, OUTPUTS)

    use_store(test)
