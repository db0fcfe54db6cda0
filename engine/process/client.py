"""How the server talks to an engine: submit requests, read token outputs, abort.

`EngineClient` is the contract. `ProcessClient` (process_client.py) and `ThreadClient` (thread_client.py) implement it
by `LoopClient`, which knows neither processes nor threads. `Supervisor` (supervisor.py) implements it over a succession
of ProcessClients. Token ids only; torch-free.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gptserve.engine.errors import DeathKind, EngineDiedError, EngineStartError, QueueFullError, ScarcityError
from gptserve.engine.process.loop import Abort, Command, EngineFactory, Failed, Message, Ready, Stepped, Submit
from gptserve.engine.request import EngineInfo, FinishReason, Request, TokenOutput
from gptserve.engine.stats import EngineStats

SCARCITY = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""What pipe, fork and pthread_create fail with for want of descriptors, processes, threads or memory."""


class EngineClient(Protocol):
    """A running engine seen from an event loop. All methods are called on the loop `start` ran on."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is; valid once `start` has returned."""

    @property
    def stats(self) -> EngineStats:
        """The counters as of the latest step."""

    @property
    def is_alive(self) -> bool:
        """Whether what is submitted will be answered."""

    @property
    def is_ready(self) -> bool:
        """Whether an engine is loaded that can answer now."""

    @property
    def restarts(self) -> Mapping[DeathKind, int]:
        """How many engines died and were replaced, by the kind of their death."""

    async def start(self) -> None:
        """Load the model and decode one real token. Raises EngineStartError; of its kind, ScarcityError."""

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queue all the requests or none of them; their ids have never been used with this client.

        Raises QueueFullError when they do not fit into the queue, EngineDiedError when there is no engine, and
        InvalidRequestError when the engine cannot compute one of them.
        """

    async def wait_until_dead(self) -> EngineDiedError:
        """Return the cause once the engine has died on its own; never returns if `close` came first."""

    async def close(self) -> None:
        """End the engine and every stream; idempotent, leaves no thread or process."""


class OutputSink(Protocol):
    """Where a client leaves what the engine made."""

    def push(self, output: TokenOutput) -> None:
        """Take an output; called on the event loop."""

    def fail(self, error: EngineDiedError) -> None:
        """Know that nothing more comes; called on the event loop."""


class TokenStream:
    """The outputs of the requests of one `submit`, in the order the engine made them.

    Each iteration gives everything that arrived since the last one, never an empty tuple. Ends when every request has
    finished or was aborted; raises EngineDiedError when the engine died or was closed. Whoever stops iterating early
    calls `abort`. Memory is bounded by the requests' own max_tokens. Invariant: after `abort()`, or once iteration has
    ended, the client holds no reference to this stream.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._live = set(request_ids)
        self._abort = abort
        self._arrived: list[TokenOutput] = []
        self._failure: EngineDiedError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> tuple[TokenOutput, ...]:
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if not self._live:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        outputs = tuple(self._arrived)
        self._arrived.clear()
        return outputs

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Stop computing these requests (None: all that still live) and forget what had arrived for them."""
        ids = [i for i in (self._live if request_ids is None else request_ids) if i in self._live]
        self._live.difference_update(ids)
        gone = set(ids)
        self._arrived = [output for output in self._arrived if output.request_id not in gone]
        self._changed.set()
        if ids:
            self._abort(ids)

    def expire(self) -> None:
        """Stop computing all that still lives: each ends, after what has arrived, with FinishReason.TIMEOUT."""
        if self._failure is not None:
            return
        ids = sorted(self._live)
        for request_id in ids:
            self.push(TokenOutput(request_id, (), finish_reason=FinishReason.TIMEOUT))
        if ids:
            self._abort(ids)

    def push(self, output: TokenOutput) -> None:
        """Take what the engine made; called by the client only."""
        if output.request_id not in self._live:
            return
        if output.finish_reason is not None:
            self._live.discard(output.request_id)
        self._arrived.append(output)
        self._changed.set()

    def fail(self, error: EngineDiedError) -> None:
        """End the stream with `error` after what has arrived; called by the client only."""
        self._failure = error
        self._changed.set()


class LoopClient(ABC):
    """A client of the loop in engine/process/loop.py, wherever that runs; subclasses launch it and carry its messages.

    A subclass hands every message to `_receive` by `_post` and, once the loop has ended and all it held is free, the
    reason to `_ended`. Invariant: `_sinks` holds the live requests and nothing else.
    """

    def __init__(self, factory: EngineFactory) -> None:
        self._factory = factory
        self._sinks: dict[str, OutputSink] = {}
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._cause: str | None = None
        self._kind = DeathKind.LOAD
        self._waiting_since: float | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = asyncio.Event()
        self._died = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not been started"
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def is_alive(self) -> bool:
        return self._info is not None and self._cause is None

    @property
    def is_ready(self) -> bool:
        return self.is_alive

    @property
    def restarts(self) -> Mapping[DeathKind, int]:
        return {}

    @property
    def waiting_since(self) -> float | None:
        """Since when, on the event loop's clock, the engine owes a message; None if it owes none."""
        return self._waiting_since

    async def start(self) -> None:
        assert self._loop is None, "a client is started once"
        if self._cause is None:
            self._loop = asyncio.get_running_loop()
            try:
                self._launch()
            except Exception as error:
                self._ended(f"the engine could not be started: {error}", DeathKind.LOAD)
                is_scarce = isinstance(error, OSError) and error.errno in SCARCITY
                raise (ScarcityError if is_scarce else EngineStartError)(self._cause) from error
            await self._started.wait()
        if not self.is_alive:
            raise EngineStartError(self._cause)

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        if not self.is_alive:
            raise EngineDiedError(self._cause or "the engine has not been started", self._kind)
        check_admission(requests, self.info, len(self._sinks))
        stream = TokenStream((request.request_id for request in requests), self.abort)
        self.enqueue(requests, stream)
        return stream

    def enqueue(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Have requests computed that passed `check_admission`; what they give goes to `sink`."""
        sinks = {request.request_id: sink for request in requests}
        assert len(sinks) == len(requests), "a request id is used once"
        assert self._sinks.keys().isdisjoint(sinks), "a request id is used once"
        self._command(Submit(tuple(requests)))
        self._sinks |= sinks

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop computing these requests, and push nothing more for them; those that have ended are passed over."""
        live = tuple(request_id for request_id in request_ids if self._sinks.pop(request_id, None))
        if live:
            self._command(Abort(live))

    async def wait_until_dead(self) -> EngineDiedError:
        await self._died.wait()
        assert self._cause is not None
        return EngineDiedError(self._cause, self._kind)

    async def close(self) -> None:
        self._closed = True
        self._end_streams("the engine was closed", DeathKind.CLOSED)
        if self._loop is not None and not self._gone.is_set():
            await self._stop()

    @abstractmethod
    def _launch(self) -> None:
        """Begin to run `serve` elsewhere; leaves nothing when it raises."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Give `command` to the loop without waiting; to one that has ended it may be given in vain."""

    @abstractmethod
    async def _stop(self) -> None:
        """End the loop, by force where that is possible, and return once `_ended` has run."""

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back on the event loop, from any thread. Raises ConnectionError when that loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError as error:
            raise ConnectionError("the event loop is closed") from error

    def _command(self, command: Command) -> None:
        assert self._loop is not None
        self._send(command)
        if self._waiting_since is None:
            self._waiting_since = self._loop.time()

    def _receive(self, message: Message) -> None:
        assert self._loop is not None
        match message:
            case Stepped(outputs, stats):
                self._stats = stats
                for output in outputs:
                    self._deliver(output)
                self._waiting_since = self._loop.time() if self._sinks else None
            case Ready(info, stats):
                self._info, self._stats = info, stats
                self._started.set()
            case Failed(cause):
                self._blame(cause, DeathKind.RAISED)  # the streams hear of it in `_ended`, when all of it is over

    def _deliver(self, output: TokenOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return  # aborted while this was on the wire
        if output.finish_reason is not None:
            del self._sinks[output.request_id]
        sink.push(output)

    def _blame(self, cause: str, kind: DeathKind) -> None:
        """Note why there is no engine; the first cause is the one that is told."""
        if self._cause is None:
            self._cause, self._kind = cause, kind

    def _ended(self, cause: str, kind: DeathKind) -> None:
        self._end_streams(cause, kind)
        self._waiting_since = None
        self._started.set()
        self._gone.set()
        if not self._closed:
            self._died.set()

    def _end_streams(self, cause: str, kind: DeathKind) -> None:
        self._blame(cause, kind)
        assert self._cause is not None
        for sink in set(self._sinks.values()):
            sink.fail(EngineDiedError(self._cause, self._kind))
        self._sinks.clear()


def check_admission(requests: Sequence[Request], info: EngineInfo, num_live: int) -> None:
    """Raise InvalidRequestError or QueueFullError unless an engine that has num_live requests takes all of these."""
    for request in requests:
        request.check(info)
    limit = info.max_num_seqs + info.max_num_queued_reqs
    if num_live + len(requests) > limit:
        raise QueueFullError(
            f"the queue is full: at most {limit} requests may run or wait, {num_live} do and {len(requests)} more came"
        )
