"""The engine in a thread of this process, for debugging and tests.

It shares the interpreter with its caller: a slow step slows the event loop, and a crash ends the whole process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

from gptserve.engine.errors import DeathKind
from gptserve.engine.process.client import LoopClient
from gptserve.engine.process.loop import Command, EngineFactory, Message, Shutdown, serve


class ThreadClient(LoopClient):
    """An EngineClient whose engine runs in a thread. `close` waits for the current load or step to end."""

    def __init__(self, factory: EngineFactory) -> None:
        super().__init__(factory)
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gptserve-engine")

    def _launch(self) -> None:
        self._thread.start()

    def _send(self, command: Command) -> None:
        self._inbox.put(command)

    async def _stop(self) -> None:
        self._send(Shutdown())
        await self._gone.wait()

    def _run(self) -> None:
        channel = _QueueChannel(self._inbox, lambda message: self._post(self._receive, message))
        with contextlib.suppress(ConnectionError):  # the event loop is closed
            try:
                serve(self._factory, channel)
            finally:
                self._post(self._joined, "the engine's thread ended")

    def _joined(self, cause: str) -> None:
        self._thread.join()  # it ends after posting this call
        self._ended(cause, DeathKind.EXITED)


class _QueueChannel:
    """A Channel between two threads."""

    def __init__(self, inbox: SimpleQueue[Command], send: Callable[[Message], None]) -> None:
        self._inbox = inbox
        self.send = send
        self.recv = inbox.get

    def poll(self) -> bool:
        return not self._inbox.empty()
