"""gptserve on Ray Serve: engines are the replicas of one deployment, servers those of another, the ingress.

`build` is what a Serve configuration imports (deploy/ray/serve.yaml). A server reaches engines by FleetClient, whose
streams go on at another replica when theirs dies. Ray places, heals and scales both; it listens for HTTP, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.fleet import Computed
from gptserve.engine.process.fleet_client import FleetClient
from gptserve.engine.process.fleet_replica import FleetReplica
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.server.cluster.options import cluster_settings
from gptserve.server.cluster.prefix_router import PrefixRouter
from gptserve.server.cluster.ray_fleet import RayFleet
from gptserve.server.core.logs import configure_logging
from gptserve.server.parts import make_app, make_engine
from gptserve.server.stores import make_stores, open_store, start_kept
from gptserve.weights.source import resolve_model

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle


class Engine:
    """A replica that computes: an engine in a process of its own, restarted as that of `gptserve serve` is."""

    async def __init__(self, options: Mapping[str, str]) -> None:  # type: ignore[misc]  # Ray awaits it
        settings = cluster_settings(options, os.environ)
        configure_logging(settings.log_format, settings.log_level)
        self._engine = make_engine(settings, await asyncio.to_thread(resolve_model, settings.model, settings.revision))
        await self._engine.start()
        self._replica = FleetReplica(self._engine, serve.get_replica_context().replica_id.unique_id)
        self._watching = asyncio.create_task(self._replica.watch())

    async def describe(self) -> EngineInfo:
        """Return what the engine is."""
        return self._engine.info

    async def compute(self, client: str, requests: Sequence[AnyRequest]) -> AsyncGenerator[Computed]:
        """Compute requests of a client; see FleetReplica."""
        async with aclosing(self._replica.compute(client, requests)) as stream:
            async for computed in stream:
                yield computed

    async def abort(self, client: str, request_ids: Sequence[str]) -> None:
        """Stop computing these requests."""
        self._replica.abort(client, request_ids)

    async def touch(self, client: str) -> Computed:
        """Learn that a client is alive; return what the engine does."""
        return self._replica.touch(client)

    async def look(self) -> BlockMap:
        """Return the engine's blocks."""
        return await self._replica.look()

    async def check_health(self) -> None:
        """Raise if the engine has died for good; Ray then replaces this replica."""
        if not self._engine.is_alive:
            raise await self._engine.wait_until_dead()

    async def __del__(self) -> None:
        self._watching.cancel()
        await self._engine.close()


class Ingress:
    """A replica that serves HTTP: the application of `gptserve serve`, without an engine of its own."""

    async def __init__(self, engines: DeploymentHandle[Any], options: Mapping[str, str]) -> None:  # type: ignore[misc]  # Ray awaits it
        settings = cluster_settings(options, os.environ)
        configure_logging(settings.log_format, settings.log_level)
        folder = await asyncio.to_thread(resolve_model, settings.model, settings.revision)
        self._engine = FleetClient(RayFleet(engines))
        await self._engine.start()
        self._stores = make_stores(settings)
        await open_store(self._stores[0])
        self._application, self._model, self._tracing = await asyncio.to_thread(
            partial(make_app, settings, self._engine, folder, *self._stores, is_one_of_several=True)
        )
        kept = self._state.files, self._state.jobs, self._state.batches
        self._starting = await start_kept(self._stores[0], kept)

    @property
    def _state(self) -> Any:
        return self._application.state

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._application

    async def check_health(self) -> None:
        """Raise if no engine will answer; Ray then replaces this replica."""
        if not self._engine.is_alive:
            raise await self._engine.wait_until_dead()

    async def __del__(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._state.lifecycle.drain()
        await self._state.jobs.suspend()
        await self._engine.close()
        await self._state.jobs.settle()
        await self._state.batches.suspend()
        await self._state.jobs.leave()
        self._model.close()
        for store in self._stores:
            await store.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def build(arguments: Mapping[str, object]) -> Application:
    """Return the application with these options of `gptserve serve`, by name. Raises SettingsError."""
    options = {name: str(value) for name, value in arguments.items()}
    settings = cluster_settings(options, os.environ)
    room = settings.engine.max_num_seqs + settings.engine.max_num_queued_reqs
    router = RequestRouterConfig(request_router_class=PrefixRouter)
    engines = serve.deployment(Engine, max_ongoing_requests=room, request_router_config=router)
    most = settings.max_connections  # more than wait for engines, so that a full queue is told of, and so is health
    ingress = serve.deployment(serve.ingress()(Ingress), max_ongoing_requests=most, max_queued_requests=most)
    return ingress.bind(engines.bind(options), options)
