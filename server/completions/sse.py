"""Server-sent events for one completion stream, and the connection they go out on.

A chunk is a part rendered once per stream plus the JSON of its text: serialising a model per token would cost more than
all the rest. JSON is kept to ASCII, for clients that split lines at every Unicode line separator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType

from starlette.types import Receive, Send

from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.output import Delta
from gptserve.server.completions.shapes import Shape

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
)
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_TEXT = "\0"  # stands for a chunk's own while what is around it is rendered


class EventEncoder:
    """Renders the events of one stream. `head` is what all its chunks share.

    Only a resumable stream has ids, which count its events from 1; the events up to the `after`-th come out empty, as
    the client has them. Every event of any other stream begins with `data: `: clients split a stream at blank lines and
    strip that prefix from each block.
    """

    def __init__(
        self,
        head: Mapping[str, object],
        shape: Shape,
        *,
        include_usage: bool,
        is_resumable: bool = False,
        after: int = 0,
    ) -> None:
        self._encode = PiecewiseEncoder(ensure_ascii=True).encode
        self._head = self._encode(head)[:-1] + ',"choices":['
        self._no_usage = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._shape = shape
        self._opened: set[int] = set()
        # What is around index and text when a chunk adds nothing but text.
        around = self._encode(shape.part(0, Delta(_TEXT))).removeprefix('{"index":0')
        self._before_text, self._after_text = around.split(self._encode(_TEXT))
        self._is_resumable = is_resumable
        self._num_events = 0
        self._after = after

    def chunk(self, index: int, delta: Delta, usage: Mapping[str, object] | None = None) -> str:
        """Return the event for what was added to choice `index`, after the one that opens it where it is the first."""
        opening = ""
        if self._shape.opening is not None and index not in self._opened:
            self._opened.add(index)
            opening = self._event(self._encode(self._shape.opening(index)), usage)
        if delta.is_text_alone:
            choice = f'{{"index":{index}{self._before_text}{self._encode(delta.text)}{self._after_text}'
            return opening + self._event(choice, usage)
        # What stands beside the choices of a whole answer is that of the first.
        beside = self._shape.beside(delta) if index == 0 else {}
        return opening + self._event(self._encode(self._shape.part(index, delta)), usage, beside)

    def usage_chunk(self, usage: Mapping[str, object]) -> str:
        """Return the event that closes a stream with include_usage."""
        return self._event("", usage)

    def error(self, body: Mapping[str, object]) -> str:
        """Return the event that ends a stream that failed; it has no id, for it is no part of the completion."""
        return f"data: {self._encode(body)}\n\n"

    def _event(
        self, choice: str, usage: Mapping[str, object] | None, beside: Mapping[str, object] | None = None
    ) -> str:
        self._num_events += 1
        if self._num_events <= self._after:
            return ""
        event_id = f"id: {self._num_events}\n" if self._is_resumable else ""
        end = self._no_usage if usage is None else f',"usage":{self._encode(usage)}}}\n\n'
        more = f",{self._encode(beside)[1:-1]}" if beside else ""
        return f"{event_id}data: {self._head}{choice}]{more}{end}"


class Connection:
    """A client that waits for its answer: calls `on_gone` when it hangs up, comments on a stream that is silent.

    An async context: within it the connection is watched, after it the response can be ended.
    """

    def __init__(
        self, receive: Receive, send: Send, on_gone: Callable[[], None], *, keep_alive_s: float | None = None
    ) -> None:
        self.is_gone = False
        self._receive = receive
        self._send = send
        self._on_gone = on_gone
        self._keep_alive_s = keep_alive_s
        self._clock = asyncio.get_running_loop().time
        self._is_writing = False
        self._last_write = self._clock()

    async def __aenter__(self) -> Connection:
        self._watch = asyncio.create_task(self._attend())
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._watch.cancel()
        await asyncio.wait([self._watch])

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client reads too slowly."""
        self._is_writing, self._last_write = True, self._clock()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._is_writing = False

    async def _attend(self) -> None:
        while True:
            silent_at = None if self._keep_alive_s is None else self._last_write + self._keep_alive_s
            try:
                async with asyncio.timeout_at(silent_at):
                    message = await self._receive()
            except TimeoutError:
                if self._is_writing:
                    self._last_write = self._clock()  # there is enough to read; a comment would wait behind it
                elif self._clock() - self._last_write >= (self._keep_alive_s or 0):
                    await self.write(KEEP_ALIVE)
                continue
            if message["type"] == "http.disconnect":
                self.is_gone = True
                self._on_gone()
                return
