"""A Fleet whose replicas are those of a Ray Serve deployment, `Engine` in ray_app.py.

It turns Ray's errors into those of a fleet and keeps this client's lease. It knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from gptserve.engine.errors import EngineStartError, QueueFullError
from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.fleet import Computed, ReplicaLostError
from gptserve.engine.process.fleet_replica import LEASE_S, TOUCHES_PER_LEASE
from gptserve.engine.scheduling.block_map import BlockMap

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_TOUCH_S = LEASE_S / TOUCHES_PER_LEASE
BUSY_PAUSE_S = 0.2  # before a replica without room is asked again; Ray's own pauses are as long

logger = logging.getLogger(__name__)


class RayFleet:
    """The replicas behind a handle, which finds new ones by itself."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._engines = engines
        self._streaming = engines.options(stream=True)
        self._name = uuid.uuid4().hex
        self._tasks: set[asyncio.Task[object]] = set()

    async def start(self) -> EngineInfo:
        """Wait for a replica and return its description. Raises EngineStartError."""
        try:
            info: EngineInfo = await self._engines.describe.remote()
        except (RayError, RayServeException) as error:
            raise EngineStartError(f"no replica answers: {_cause(error)}") from error
        return info

    async def compute(self, requests: Sequence[AnyRequest]) -> AsyncGenerator[Computed]:
        """Have one replica compute all these requests to their ends; see Fleet."""
        while True:
            stream = self._streaming.compute.remote(self._name, requests)
            try:
                async for computed in stream:
                    yield computed
                return
            except QueueFullError:
                await asyncio.sleep(BUSY_PAUSE_S)
            except (RayError, RayServeException) as error:
                raise ReplicaLostError(_cause(error)) from error
            finally:
                stream.cancel()  # without it a call that nobody reads would go on

    def abort(self, request_ids: Sequence[str]) -> None:
        """Tell all replicas to stop computing these requests."""
        self._keep(self._tell("abort", tuple(request_ids)))

    async def watch(self) -> AsyncGenerator[Sequence[Computed]]:
        """Tell again and again what all replicas do, and keep this client's lease."""
        while True:
            yield [answer for answer in await self._tell("touch") if isinstance(answer, Computed)]
            await asyncio.sleep(_TOUCH_S)

    async def look(self) -> BlockMap:
        """Return the blocks of any one replica. Raises ReplicaLostError."""
        try:
            blocks: BlockMap = await self._engines.look.remote()
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(_cause(error)) from error
        return blocks

    async def close(self) -> None:
        """Let go of the replicas; they forget this client after its lease."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _keep(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of all replicas; return their answers. One that does not hear it forgets this client."""
        try:
            told = self._engines.broadcast(method, self._name, *arguments)
            return await told.results_async(timeout_s=_TOUCH_S, return_exceptions=True)  # type: ignore[no-any-return]
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("not all replicas could be told to %s: %s", method, _cause(error))
            return []


def _cause(error: Exception) -> str:
    """Return one sentence, without the traceback of a remote call."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return next(iter(str(cause).splitlines()), type(cause).__name__)
