"""A proxy before a database: what it carries arrives late, in both directions, and only later while it is cut."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import chain
from pathlib import Path

_CHUNK = 2**16


class LateProxy:
    """Joins a port with a socket in the file system. Set delay_s at any time; what is on its way then keeps its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._joined: dict[asyncio.Task[None] | None, list[asyncio.StreamWriter]] = {}
        self.delay_s = 0.0

    @property
    def port(self) -> int:
        """Where clients connect, once it is open."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def open(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)

    async def close(self) -> None:
        """Close all connections, and take no more."""
        self.mend()
        if self._server is not None:
            self._server.close()
        for writer in chain.from_iterable(self._joined.values()):
            writer.close()
        while tasks := [task for task in self._joined if task is not None]:
            await asyncio.wait(tasks)

    def cut(self) -> None:
        """Carry nothing until `mend`, and lose nothing."""
        self._whole.clear()

    def mend(self) -> None:
        """Deliver what came meanwhile, also of clients that have gone."""
        self._whole.set()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            others = await asyncio.open_unix_connection(self._path)
        except OSError:  # the database is away
            writer.close()
            return
        me = asyncio.current_task()
        self._joined[me] = [writer, others[1]]
        try:
            await asyncio.gather(self._carry(reader, others[1]), self._carry(others[0], writer))
        finally:
            del self._joined[me]

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        carried = asyncio.Queue[tuple[float, bytes]]()

        async def receive() -> None:
            chunk = b"?"
            while chunk:
                try:
                    chunk = await source.read(_CHUNK)
                except OSError:
                    chunk = b""
                carried.put_nowait((clock() + self.delay_s, chunk))

        receiving = asyncio.create_task(receive())
        with suppress(OSError):
            while True:
                due_at, chunk = await carried.get()
                await asyncio.sleep(due_at - clock())
                await self._whole.wait()
                if not chunk:
                    break
                target.write(chunk)
                await target.drain()
        target.close()
        await receiving
