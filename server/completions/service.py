"""Service: the models, the options, limits and metrics, for every route. `create_app` makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gptserve.engine.errors import EngineError
from gptserve.engine.pooling import AnyRequest, PoolingRequest
from gptserve.engine.process.client import TokenStream
from gptserve.server.completions.app_options import AppOptions
from gptserve.server.completions.fillers import check_filler_room
from gptserve.server.completions.model import Model, ModelRegistry
from gptserve.server.completions.planning import Place, Planning
from gptserve.server.core.errors import ServiceError, shutting_down
from gptserve.server.core.lifecycle import Lifecycle
from gptserve.server.core.limits import KeyLimits
from gptserve.server.core.metrics import Metrics
from gptserve.server.http.body import IncomingBodies

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that a route needs. `place` and `model` are those of the request that is planned with it.

    A service of no request has the default model.
    """

    models: ModelRegistry
    options: AppOptions
    lifecycle: Lifecycle
    metrics: Metrics
    limits: KeyLimits = field(default_factory=KeyLimits)
    bodies: IncomingBodies = field(default_factory=IncomingBodies)
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    planning: Planning = field(default_factory=Planning)
    place: Place = field(default_factory=Place)
    _model: Model | None = None

    @property
    def model(self) -> Model:
        """The model that computes the request."""
        return self._model or self.models.default

    def naming(self, name: str | None) -> Service:
        """Return the same for a request that names its model, or none. Raises ServiceError."""
        return self.using(self.models.find(name))

    def using(self, model: Model) -> Service:
        """Return the same for a request to this model."""
        return replace(self, _model=model)

    def check_shared(self, what: str) -> None:
        """Raise ServiceError where the next request for what this server keeps would go to one that has not got it."""
        if self.options.is_one_of_several and self.options.settings.state_url is None:
            message = f"{what} needs --state-url here, as the next request may go to another server"
            raise ServiceError("not_implemented", message)

    async def in_thread(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Run a long computation in a thread and return its result.

        Only one runs at a time: each of them competes with the event loop for the interpreter's lock.
        """
        async with self._computing:
            return await asyncio.to_thread(call, *arguments)

    async def in_worker(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Make a call that may wait for a worker process, in a thread, as `Planning.run` does; return its result."""
        with self.counting_rejections():
            return await self.planning.run(self.place, call, *arguments)

    def admit(self, owner: str | None) -> None:
        """Raise ServiceError if completions are refused: of this owner, or of all, as the server shuts down."""
        with self.counting_rejections():
            self.check_open()
            self.limits.check(owner, 1)

    def submit(self, requests: Sequence[AnyRequest], owner: str | None, *, go_on: bool = False) -> TokenStream:
        """Queue the requests of an owner. Raises ServiceError or EngineError.

        Those that go_on are the rest of what was let in, in the places of its first ones.
        """
        if self.place.is_filler:
            check_filler_room(self, owner, len(requests))
            stream = self.model.engine.submit(requests)
        else:
            with self.counting_rejections():
                if go_on:
                    self.check_alive()
                else:
                    self.check_open()
                    self.limits.check(owner, len(requests))
                stream = self.model.engine.submit(requests)
            self.limits.begin(owner, stream)
        prompts = [r for r in requests if isinstance(r, PoolingRequest) or r.choice_index == 0]
        self.limits.charge(owner, sum(len(request.prompt_token_ids) for request in prompts))
        return stream

    def check_ready(self) -> None:
        """Raise ServiceError unless an engine is loaded. During a restart requests are accepted and queue."""
        self.check_open()
        if not self.model.engine.is_ready:
            raise ServiceError("engine_restarting", "the engine died and is being started again")

    def check_alive(self) -> None:
        """Raise ServiceError while the engine loads, and after it has died for good."""
        if not self.model.engine.is_alive:
            raise ServiceError("engine_unavailable", "no engine is running: it is loading or has died")

    def check_open(self) -> None:
        """Raise ServiceError if the server shuts down, or no engine is running."""
        if self.lifecycle.is_draining:  # checked first: after draining the engine is closed
            raise shutting_down()
        self.check_alive()

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count a refusal (429 or 503) that is raised within the block."""
        try:
            yield
        except (ServiceError, EngineError) as error:
            self.metrics.count_rejection(error)
            raise
