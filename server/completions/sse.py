"""Server-sent events for one completion stream, and the connection they go out on.

The part that all chunks share is rendered once a stream, and each chunk adds only the JSON of its text: to serialise a
model for each token would cost more than all the rest. JSON is ASCII only, as some clients split lines at every Unicode
line separator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Send

from gptserve.server.completions.encoding import PIECE_ENTRIES, PiecewiseEncoder
from gptserve.server.completions.shapes import Json, Shape
from gptserve.server.core.error_responses import error_body
from gptserve.server.core.errors import ServiceError
from gptserve.server.text.output import Delta

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
)
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
END_SUFFIX = ".end"  # of the id of the usage, which adds no token to what a reader has
# What follows a comment begins with this one. `vllm bench serve` strips what it receives together, the blank line of a
# comment with it, and would take the next event for a part of that comment; it finds the end of this one.
AFTER_KEEP_ALIVE = b":\n\n"
_TEXT = "\0"  # a placeholder for a chunk's text while the part around the text is rendered


class EventEncoder:
    """Renders the events of one stream. All its chunks begin with the fields of `head`.

    Only a resumable stream has an `event_id`, which returns the id of an event that is sent now. The events that open
    the choices have none, and are left out if `is_open`. In other streams every event begins with `data: `, because
    some clients split a stream at blank lines and strip that prefix from each block.
    """

    opening, keep_alive, num_entries = "", KEEP_ALIVE, 0

    def __init__(
        self,
        head: Json,
        shape: Shape,
        num_choices: int,
        *,
        include_usage: bool,
        event_id: Callable[[], str] | None = None,
        is_open: bool = False,
    ) -> None:
        self._encoder = PiecewiseEncoder(ensure_ascii=True)
        self._encode = self._encoder.encode_short
        self._head = self._encode(head)[:-1] + ',"choices":['
        self._no_usage = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._shape = shape
        self._num_choices = num_choices
        self._event_id = event_id
        self._is_open = is_open or shape.opening is None
        self.include_usage = include_usage
        # A chunk that adds only text is these parts around index and text.
        around = self._encode(shape.part(0, Delta(_TEXT))).removeprefix('{"index":0')
        self._before_text, self._after_text = around.split(self._encode(_TEXT))

    def chunk(self, index: int, delta: Delta, usage: Json | None = None) -> str:
        """Return the event that adds `delta` to a choice; before the first one, also those that open all choices."""
        opening = "" if self._is_open else self._open(usage)
        if delta.is_text_alone:
            choice = f'{{"index":{index}{self._before_text}{self._encode(delta.text)}{self._after_text}'
            return opening + self._event(choice, usage)
        # A whole answer, too, takes these fields from the first choice.
        after_choices = self._shape.after_choices(delta) if index == 0 else {}
        encode = self._encode if delta.num_entries <= PIECE_ENTRIES else self._encoder.encode
        more = f",{encode(after_choices)[1:-1]}" if after_choices else ""
        return opening + self._event(encode(self._shape.part(index, delta)), usage, more)

    def end(self, usage: Json) -> str:
        """Return what closes a stream that did not fail."""
        return (self._event("", usage, suffix=END_SUFFIX) if self.include_usage else "") + DONE

    def error(self, error: ServiceError) -> str:
        """Return the event that ends a failed stream. It has no id, as it is not part of the completion."""
        return f"data: {self._encode(error_body(error))}\n\n"

    def _open(self, usage: Json | None) -> str:
        self._is_open = True
        assert self._shape.opening is not None
        if usage is not None:  # it counts the first token, which comes after this
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        choices = map(self._shape.opening, range(self._num_choices))
        return "".join(self._data(self._encode(choice), usage) for choice in choices)

    def _event(self, choice: str, usage: Json | None, more: str = "", suffix: str = "") -> str:
        event_id = "" if self._event_id is None else f"id: {self._event_id()}{suffix}\n"
        return event_id + self._data(choice, usage, more)

    def _data(self, choice: str, usage: Json | None, more: str = "") -> str:
        end = self._no_usage if usage is None else f',"usage":{self._encode(usage)}}}\n\n'
        return f"data: {self._head}{choice}]{more}{end}"


class Connection:
    """Watches a client that waits for its answer, as an async context; write the last part after the context.

    Calls `on_gone` when the client hangs up. Sends keep_alive when a stream has been silent for keep_alive_s.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        on_gone: Callable[[], None],
        *,
        keep_alive_s: float | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        self.is_gone = False
        self._receive = receive
        self._send = send
        self._on_gone = on_gone
        self._keep_alive_s, self._keep_alive = keep_alive_s, keep_alive
        self._clock = asyncio.get_running_loop().time
        self._is_writing = False
        self._last_write = self._clock()
        self._lead = b""  # to begin the next write with

    async def __aenter__(self) -> Connection:
        self._watch = asyncio.create_task(self._attend())
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self._watch.cancel()
        await asyncio.wait([self._watch])

    async def begin(self, opening: str = "") -> None:
        """Send the head of a stream, and what it opens with."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if opening:
            await self.write(opening.encode("ascii"))

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body; waits while the client reads too slowly."""
        self._is_writing, self._last_write = True, self._clock()
        body, self._lead = self._lead + data, AFTER_KEEP_ALIVE if data == KEEP_ALIVE else b""
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
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
                    self._last_write = self._clock()  # the client has enough to read; that would wait
                elif self._clock() - self._last_write >= (self._keep_alive_s or 0):
                    await self.write(self._keep_alive)
                continue
            if message["type"] == "http.disconnect":
                self.is_gone = True
                self._on_gone()
                return
