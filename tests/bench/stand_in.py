"""A stand-in server in the event loop of a test, and a clock that it moves while a client waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench.load import Load

LIMIT_S = 30  # for what a test waits for; nothing takes that long unless it never comes
OK = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = "0\r\n\r\n"


class Clock:
    """A client's clock. It stands still until `advance`; `was_read` is set by each reading."""

    def __init__(self) -> None:
        self.now = 0.0
        self.was_read = asyncio.Event()

    def __call__(self) -> float:
        self.was_read.set()
        return self.now


@dataclass
class Request:
    """What a client sent, and the way back to it."""

    head: str
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    clock: Clock

    async def send(self, *parts: tuple[float, str]) -> None:
        """Send each part so many seconds after the client has read the one before."""
        for seconds, part in parts:
            self.clock.was_read.clear()
            self.clock.now += seconds
            self.writer.write(part.encode())
            await asyncio.wait_for(self.clock.was_read.wait(), LIMIT_S)

    def hang_up(self) -> None:
        self.writer.close()


def chunk(*events: str) -> str:
    """Return a chunk of a body."""
    data = "".join(events)
    return f"{len(data.encode()):x}\r\n{data}\r\n"


def event(payload: object) -> str:
    return f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n"


def token(text: str = "a", **more: object) -> str:
    return event({"choices": [{"index": 0, "text": text, **more}]})


def usage(num_prompt: int, num_tokens: int, **more: object) -> str:
    return event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, **more}})


DONE = event("[DONE]")

Use = Callable[[Load, "asyncio.Queue[Request]", Clock], Awaitable[Any]]


def with_server(use: Use, path: str = "", **options: Any) -> Any:
    """Run `use` with a load on a stand-in, the requests that it receives, and the load's clock."""

    async def run() -> Any:
        clock, requests = Clock(), asyncio.Queue[Request]()

        async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.partition("content-length: ")[2].split()[0])
            requests.put_nowait(Request(head, json.loads(await reader.readexactly(length)), writer, clock))

        server = await asyncio.start_server(receive, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        headers = {"authorization": "Bearer key"}
        async with server:
            load = Load(f"http://127.0.0.1:{port}{path}", headers, "teller", clock=clock, **options)
            return await asyncio.wait_for(use(load, requests, clock), LIMIT_S)

    return asyncio.run(run())


def bodies(*lengths: int) -> list[dict[str, object]]:
    return [{"prompt": [i], "max_tokens": length} for i, length in enumerate(lengths)]
