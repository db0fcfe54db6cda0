"""The engine's loop and the messages on its wire; both clients run it, one in a process and one in a thread.

It takes commands from a channel, steps the engine and sends one message a step. It knows no event loop, no process
and no torch: the engine comes from a factory that runs where the loop runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineError, InvalidRequestError
from gptserve.engine.request import EngineInfo, FinishReason, Request, TokenOutput
from gptserve.engine.stats import EngineStats
from gptserve.weights.errors import WeightsError

_output_fields = attrgetter(*TokenOutput.__slots__)
_stats_fields = attrgetter(*EngineStats.__slots__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute these requests."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests; ids that are unknown or have ended are fine."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the loop, whatever still runs."""


Command = Submit | Abort | Shutdown


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded; the first message, unless it is Failed."""

    info: EngineInfo
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one turn of the loop made; no outputs when it only took commands or computed part of a prompt."""

    outputs: tuple[TokenOutput, ...]
    stats: EngineStats

    def __reduce__(self) -> tuple[Any, ...]:
        # As bare tuples 64 outputs pickle seven times and unpickle twice as fast as the dataclasses themselves.
        return _stepped, (tuple(map(_output_fields, self.outputs)), _stats_fields(self.stats))


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be loaded or raised; the last message, `cause` says why in one sentence."""

    cause: str


Message = Ready | Stepped | Failed


class StepEngine(Protocol):
    """What the loop drives: engine.engine.Engine, or a fake."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""

    @property
    def stats(self) -> EngineStats:
        """The counters of this moment."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError when it cannot be computed."""

    def abort(self, request_id: str) -> None:
        """Forget a request; one that has ended or was never there is no error."""

    def step(self) -> list[TokenOutput]:
        """Compute one batch; a step that fails ends its requests with FinishReason.ERROR instead of raising."""


EngineFactory = Callable[[], StepEngine]


class Channel(Protocol):
    """The engine's end of the wire; a multiprocessing Connection is one.

    recv raises EOFError and send ConnectionError when the client is gone; either may raise either.
    """

    def poll(self) -> bool:
        """Whether `recv` would return or raise at once."""

    def recv(self) -> Command:
        """Wait for the next command."""

    def send(self, message: Message) -> None:
        """Hand a message to the client."""


def load_engine(config: EngineConfig) -> StepEngine:
    """Load the real engine, its progress on stderr; torch is imported here and not before."""
    from gptserve.engine.engine import Engine
    from gptserve.engine.model.loading_bar import LoadingBar

    with LoadingBar() as bar:
        return Engine(config, bar.update)


def serve(factory: EngineFactory, channel: Channel) -> None:
    """Load an engine and run it until Shutdown or its failure. Raises what `channel` raises once the client is gone."""
    try:
        engine = factory()
    except Exception as error:
        channel.send(Failed(_explain(error)))
        return
    channel.send(Ready(engine.info, engine.stats))
    try:
        _run(engine, channel)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        channel.send(Failed(_explain(error)))


def _run(engine: StepEngine, channel: Channel) -> None:
    while True:
        outputs: list[TokenOutput] = []
        idle = not engine.has_work
        while idle or channel.poll():
            idle = False  # only the first command is waited for
            match channel.recv():
                case Submit(requests):
                    outputs += [refusal for request in requests if (refusal := _add(engine, request))]
                case Abort(request_ids):
                    for request_id in request_ids:
                        engine.abort(request_id)
                case Shutdown():
                    return
        if engine.has_work:
            outputs += engine.step()
        channel.send(Stepped(tuple(outputs), engine.stats))


def _add(engine: StepEngine, request: Request) -> TokenOutput | None:
    try:
        engine.add(request)
    except InvalidRequestError as error:
        return TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error=str(error))
    return None


def _explain(error: Exception) -> str:
    if isinstance(error, EngineError | WeightsError):
        return str(error)
    logging.getLogger(__name__).error("the engine failed", exc_info=error)
    first_line = str(error).partition("\n")[0]
    return f"the engine raised {type(error).__name__}: {first_line}"


def _stepped(outputs: tuple[tuple[Any, ...], ...], stats: tuple[int, ...]) -> Stepped:
    return Stepped(tuple(TokenOutput(*fields) for fields in outputs), EngineStats(*stats))
