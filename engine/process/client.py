"""How the server talks to an engine: submit requests, read token outputs, abort.

`EngineClient` is the contract. `ProcessClient` (process_client.py) and `ThreadClient` (thread_client.py) keep it for a
process and a thread; both derive from `LoopClient`. `Supervisor` (supervisor.py) keeps it over one ProcessClient after
another. Token ids only; torch-free.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gptserve.engine.errors import DeathKind, EngineDiedError, EngineStartError, QueueFullError, start_error
from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.loop import Abort, Command, EngineFactory, Failed, Loading, Message, Ready, Stepped, Submit
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap, Look
from gptserve.engine.stats import EngineStats


class OutputSink(Protocol):
    """Receives the outputs of an engine from a client."""

    def push(self, output: TokenOutput) -> None:
        """Receive an output; called on the event loop."""

    def fail(self, error: EngineDiedError) -> None:
        """Learn that no more outputs come; called on the event loop."""


class TokenStream:
    """The outputs of the requests of one `submit`, in the order in which the engine made them.

    Each iteration yields all outputs that arrived since the last one, at least one. It ends once every request has
    finished or was aborted. It raises EngineDiedError if the engine died or was closed. A caller that stops early must
    call `abort`. The requests' max_tokens bound the memory. Invariant: after `abort()`, and after the last iteration,
    the client holds no reference to this stream.
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

    @property
    def num_live(self) -> int:
        """How many of the requests have not ended."""
        return len(self._live)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Stop computing these requests (None: all live ones) and drop their outputs that were not read."""
        gone = self._live.intersection(self._live if request_ids is None else request_ids)
        self._live -= gone
        self._arrived = [output for output in self._arrived if output.request_id not in gone]
        self._changed.set()
        if gone:
            self._abort(sorted(gone))

    def expire(self) -> None:
        """Stop computing all live requests; each ends with FinishReason.TIMEOUT, after the outputs that arrived."""
        if self._failure is not None:
            return
        ids = sorted(self._live)
        for request_id in ids:
            self.push(TokenOutput(request_id, (), finish_reason=FinishReason.TIMEOUT))
        if ids:
            self._abort(ids)

    def push(self, output: TokenOutput) -> None:
        """Add an output; only the client calls it."""
        if output.request_id not in self._live:
            return
        if output.finish_reason is not None:
            self._live.discard(output.request_id)
        self._arrived.append(output)
        self._changed.set()

    def fail(self, error: EngineDiedError) -> None:
        """End the stream with `error`, after the outputs that arrived; only the client calls it."""
        self._failure = error
        self._changed.set()


class EngineClient(ABC):
    """A running engine seen from an event loop. Call all methods on the loop that `start` ran on.

    Invariant: the keys of `_live` are the ids of the live requests.
    """

    _live: Mapping[str, object]

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._load_progress = (0, 0)
        self._restarts: Counter[DeathKind] = Counter()
        self._death: EngineDiedError | None = None
        self._died = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        """A description of the engine; valid once `start` has returned."""
        assert self._info is not None, "the engine has not been started"
        return self._info

    @property
    def load_progress(self) -> tuple[int, int]:
        """How many bytes of the weights are loaded, and of how many; 0 of 0 while that is not known."""
        return self._load_progress

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """The counters as of the latest step."""

    @property
    def is_alive(self) -> bool:
        """Whether submitted requests will be answered."""
        return self._info is not None and self._death is None

    @property
    def is_ready(self) -> bool:
        """Whether a loaded engine can answer now."""
        return self.is_alive

    @property
    def restarts(self) -> Mapping[DeathKind, int]:
        """How many engines died and were replaced, by the kind of their death."""
        return self._restarts

    @abstractmethod
    async def start(self) -> None:
        """Load the model and decode one token. Raises EngineStartError or its subclass ScarcityError."""

    def submit(self, requests: Sequence[AnyRequest]) -> TokenStream:
        """Queue all the requests or none of them. Their ids must be new to this client.

        Raises QueueFullError if they do not fit into the queue, EngineDiedError if there is no engine, and
        InvalidRequestError if the engine cannot compute one of them.
        """
        if not self.is_alive:
            raise self._dead()
        for request in requests:
            request.check(self.info)
        self.check_room(len(requests))
        ids = {request.request_id for request in requests}
        assert len(ids) == len(requests) and self._live.keys().isdisjoint(ids), "a request id is used once"
        stream = TokenStream(ids, self.abort)
        self.enqueue(requests, stream)
        return stream

    def check_room(self, num_more: int, num_others: int = 0) -> None:
        """Raise QueueFullError if so many requests do not fit into the queue beside others that are to come."""
        limit, num_live = self.info.max_num_seqs + self.info.max_num_queued_reqs, len(self._live) + num_others
        if num_live + num_more > limit:
            counts = f"at most {limit} requests may run or wait, {num_live} do, got {num_more} more"
            raise QueueFullError(f"the queue is full: {counts}")

    @abstractmethod
    def enqueue(self, requests: Sequence[AnyRequest], sink: OutputSink) -> None:
        """Queue requests that `submit` would take; their outputs go to `sink`."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop computing these requests and push nothing more for them; ignore those that have ended."""

    @abstractmethod
    def look(self, show: Callable[[BlockMap], None]) -> None:
        """Ask for a map of the blocks. One look at a time: a later `show` replaces an earlier one that still waits.

        If there is no engine, or it dies, `show` is never called.
        """

    async def wait_until_dead(self) -> EngineDiedError:
        """Return the cause once the engine has died; never returns if `close` came first."""
        await self._died.wait()
        return self._dead()

    @abstractmethod
    async def close(self) -> None:
        """End the engine and every stream. Idempotent; leaves no thread or process."""

    def _blame(self, cause: str, kind: DeathKind, sinks: Iterable[OutputSink] = ()) -> None:
        """Note why there is no engine, and end these streams; only the first cause is kept."""
        self._death = self._death or EngineDiedError(cause, kind)
        for sink in set(sinks):
            sink.fail(self._dead())

    def _dead(self) -> EngineDiedError:
        """Return why there is no engine, as an error of its own for each stream that raises it."""
        death = self._death or EngineDiedError("the engine has not been started", DeathKind.LOAD)
        return EngineDiedError(str(death), death.kind)


class LoopClient(EngineClient):
    """A client of the loop in engine/process/loop.py. Subclasses launch the loop and carry its messages.

    Its life:
    1. `start` calls `_launch`, which begins to run `serve` elsewhere.
    2. The subclass calls `_post(self._receive, message)` for each message. The first one is Ready or Failed.
    3. `close` calls `_stop`, or the loop ends by itself.
    4. Once the loop has ended and its resources are free, the subclass calls `_ended` with the reason.
    """

    def __init__(self, factory: EngineFactory) -> None:
        super().__init__()
        self._factory = factory
        self._live: dict[str, OutputSink] = {}
        self._stats = EngineStats()
        self.waiting_since: float | None = None
        """When, on the event loop's clock, the engine began to owe a message; None if it owes none."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        assert self._loop is None, "a client is started once"
        if self._death is None:
            self._loop = asyncio.get_running_loop()
            try:
                self._launch()
            except Exception as error:
                self._ended(f"the engine could not be started: {error}", DeathKind.LOAD)
                raise start_error(str(self._death), error) from error
            await self._started.wait()
        if not self.is_alive:
            raise EngineStartError(str(self._death))

    def enqueue(self, requests: Sequence[AnyRequest], sink: OutputSink) -> None:
        self._command(Submit(tuple(requests)))
        self._live |= {request.request_id: sink for request in requests}

    def abort(self, request_ids: Sequence[str]) -> None:
        live = tuple(request_id for request_id in request_ids if self._live.pop(request_id, None))
        if live:
            self._command(Abort(live))

    def look(self, show: Callable[[BlockMap], None]) -> None:
        self._show = show
        self._command(Look())

    async def close(self) -> None:
        self._closed = True
        self._blame("the engine was closed", DeathKind.CLOSED, self._live.values())
        self._live.clear()
        if self._loop is not None and not self._gone.is_set():
            await self._stop()

    @abstractmethod
    def _launch(self) -> None:
        """Begin to run `serve` elsewhere; clean up before raising."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Send `command` to the loop without waiting; if the loop has ended, nothing happens."""

    @abstractmethod
    async def _stop(self) -> None:
        """End the loop, by force if possible, and return once `_ended` has run."""

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Run `callback` on the event loop, from any thread. Raises ConnectionError if that loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError as error:
            raise ConnectionError("the event loop is closed") from error

    def _command(self, command: Command) -> None:
        assert self._loop is not None
        self._send(command)
        if self.waiting_since is None:
            self.waiting_since = self._loop.time()

    def _receive(self, message: Message) -> None:
        assert self._loop is not None
        match message:
            case Stepped(outputs, stats):
                self._stats = stats
                for output in outputs:
                    self._deliver(output)
                self.waiting_since = self._loop.time() if self._live else None
            case Loading(num_bytes, num_bytes_total):
                self._load_progress = num_bytes, num_bytes_total
            case BlockMap():
                self._show(message)
            case Ready(info, stats):
                self._info, self._stats = info, stats
                self._started.set()
            case Failed(cause):
                self._blame(cause, DeathKind.RAISED)  # `_ended` tells the streams

    def _deliver(self, output: TokenOutput) -> None:
        sink = self._live.get(output.request_id)
        if sink is None:
            return  # aborted while this was in transit
        if output.finish_reason is not None:
            del self._live[output.request_id]
        sink.push(output)

    def _ended(self, cause: str, kind: DeathKind) -> None:
        self._blame(cause, kind, self._live.values())
        self._live.clear()
        self.waiting_since = None
        self._started.set()
        self._gone.set()
        if not self._closed:
            self._died.set()
