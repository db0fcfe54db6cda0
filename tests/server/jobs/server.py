"""A store around a fake engine, which a test starts, restarts and reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path
from typing import Any

from gptserve.engine.request import Request, TokenOutput
from gptserve.server.completions.model import ModelRegistry
from gptserve.server.completions.plan import CompletionPlan, plan_completion, restore_plan
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import TEXT_SHAPE
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.lifecycle import Lifecycle
from gptserve.server.core.metrics import Metrics
from gptserve.server.jobs.background import BackgroundJobs
from gptserve.server.jobs.job import BackgroundJob, BackgroundRequest
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStore
from gptserve.server.schemas.completions import CompletionRequest
from tests.server.app_options import model_and_options
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A store around a fake engine; the next one with the same folder is the server started again."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        clock: Clock | None = None,
        engine: FakeEngineClient | None = None,
        store: JobStore | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or FakeEngineClient(auto=False)
        self.clock = clock or Clock()
        self.store = store or SqliteJobStore(folder)
        self.lifecycle = Lifecycle()
        metrics = Metrics(self.engine, "m")
        model, app_options = model_and_options(self.engine, ByteTokenizer(), **options)
        self.service = Service(ModelRegistry(model), app_options, self.lifecycle, metrics)
        restore = {TEXT_SHAPE.object: partial(restore_plan, schema=CompletionRequest, shape=TEXT_SHAPE)}
        self.jobs = BackgroundJobs(self.service, self.store, restore, clock=self.clock)

    async def begin(self, key: str | None = None, *, owner: str | None = None, **fields: Any) -> BackgroundJob:
        fields = {"prompt": "x", "seed": 1, **fields}

        async def plan() -> CompletionPlan:
            return await plan_completion(CompletionRequest.model_validate(fields), self.service, owner)

        request = BackgroundRequest.of("/v1/completions", fields, owner, key, time.perf_counter())
        return await self.jobs.begin_or_find(request, plan)

    async def read(self, job: BackgroundJob) -> list[TokenOutput]:
        """Return all outputs of a completion, which it follows to its end. Raises ServiceError."""
        return [output async for outputs in self.jobs.reader(job) for output in outputs]

    async def finish(self, job: BackgroundJob) -> None:
        """Step the engine until a completion has ended, with no regard to how many steps pile up."""
        while job.running is not None:
            self.engine.step()
            await asyncio.sleep(0)

    async def submitted(self) -> list[Request]:
        """Return what the engine was given, once it was."""
        await asyncio.to_thread(self.engine.wait_for, lambda: bool(self.engine.submitted))
        return self.engine.submitted

    async def advance(self, job: BackgroundJob, num_steps: int) -> None:
        """Make that many steps, each a batch of its own."""
        reader = aiter(self.jobs.reader(job))
        for _ in range(num_steps):
            self.engine.step()
            await anext(reader)

    async def text(self, job: BackgroundJob) -> str:
        choices: Any = (await self.jobs.result(job))["choices"]
        return str(choices[0]["text"])


@contextlib.asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    """A server from its start to a death at which its engine goes first."""
    await server.jobs.start()
    try:
        yield server
    finally:
        await server.engine.close()
        await server.jobs.settle()
        await server.jobs.leave()
        await server.store.close()


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def find(server: Server, job: BackgroundJob) -> BackgroundJob:
    """Find a job again, as its owner does, perhaps with a later server."""
    return await server.jobs.find(job.completion_id, job.record.owner)


async def found(server: Server, job: BackgroundJob) -> bool:
    try:
        await find(server, job)
    except ServiceError as error:
        return {"completion_not_found": False}[error.code]
    return True
