"""The engine's loop and its messages. ProcessClient runs it in a process, ThreadClient in a thread.

It receives commands from a channel, steps the engine and sends one message a step. It knows no event loop, process or
torch: a factory makes the engine where the loop runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from gptserve.engine.errors import InvalidRequestError, explain
from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap, Look
from gptserve.engine.stats import EngineStats

_output_fields = attrgetter(*TokenOutput.__slots__)
_stats_fields = attrgetter(*EngineStats.__slots__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute these requests."""

    requests: tuple[AnyRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests; unknown and ended ones are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the loop, even with live requests."""


Command = Submit | Abort | Look | Shutdown


@dataclass(frozen=True, slots=True)
class Loading:
    """How many bytes of the weights are loaded, of how many. Any number of these come before Ready or Failed."""

    num_bytes: int
    num_bytes_total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded. This is the first message but for Loading, unless loading failed."""

    info: EngineInfo
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Stepped:
    """The outputs of one turn of the loop; none if it only handled commands or computed part of a prompt."""

    outputs: tuple[TokenOutput, ...]
    stats: EngineStats

    def __reduce__(self) -> tuple[Any, ...]:
        # 64 outputs pickle seven times and unpickle twice as fast as tuples than as dataclasses.
        return _stepped, (tuple(map(_output_fields, self.outputs)), _stats_fields(self.stats))


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be loaded, or it raised. This is the last message; `cause` is one sentence."""

    cause: str


Message = Loading | Ready | Stepped | BlockMap | Failed


class StepEngine(Protocol):
    """What the loop drives: engine.engine.Engine, or a fake in tests."""

    @property
    def info(self) -> EngineInfo:
        """A description of the engine."""

    @property
    def stats(self) -> EngineStats:
        """The counters of this moment."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""

    def add(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it cannot be computed."""

    def abort(self, request_id: str) -> None:
        """Forget a request; one that has ended or is unknown is ignored."""

    def draw_blocks(self) -> BlockMap:
        """Return a map of the blocks of the KV cache."""

    def step(self) -> list[TokenOutput]:
        """Compute one batch. A failed step is repeated, or ends a request with FinishReason.ERROR."""


Report = Callable[[int, int], None]
"""Is told how many bytes of the weights are loaded, and of how many."""


class EngineFactory(Protocol):
    """Makes an engine, where the loop runs."""

    def __call__(self, *, report: Report) -> StepEngine:
        """Load the engine and report the progress."""


class Channel(Protocol):
    """The engine's end of the connection to its client, such as a multiprocessing Connection.

    `recv` and `send` raise EOFError or ConnectionError if the client is gone.
    """

    def poll(self) -> bool:
        """Whether `recv` would return or raise at once."""

    def recv(self) -> Command:
        """Wait for the next command."""

    def send(self, message: Message) -> None:
        """Send a message to the client."""


def serve(factory: EngineFactory, channel: Channel) -> None:
    """Load an engine and run it until Shutdown or a failure. Raises what `channel` raises if the client is gone."""
    try:
        engine = factory(report=lambda done, total: channel.send(Loading(done, total)))
    except Exception as error:
        channel.send(Failed(explain(error)))
        return
    channel.send(Ready(engine.info, engine.stats))
    try:
        _run(engine, channel)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        channel.send(Failed(explain(error)))


def _run(engine: StepEngine, channel: Channel) -> None:
    while True:
        outputs: list[TokenOutput] = []
        idle = not engine.has_work
        while idle or channel.poll():
            idle = False  # wait for the first command only
            match channel.recv():
                case Submit(requests):
                    outputs += [refusal for request in requests if (refusal := _add(engine, request))]
                case Abort(request_ids):
                    for request_id in request_ids:
                        engine.abort(request_id)
                case Look():
                    channel.send(engine.draw_blocks())
                case Shutdown():
                    return
        if engine.has_work:
            outputs += engine.step()
        channel.send(Stepped(tuple(outputs), engine.stats))


def _add(engine: StepEngine, request: AnyRequest) -> TokenOutput | None:
    try:
        engine.add(request)
    except InvalidRequestError as error:
        return TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error=str(error))
    return None


def _stepped(outputs: tuple[tuple[Any, ...], ...], stats: tuple[Any, ...]) -> Stepped:
    return Stepped(tuple(TokenOutput(*fields) for fields in outputs), EngineStats(*stats))
