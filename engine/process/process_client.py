"""The engine in its own process: a crash or hang there harms no HTTP connection, and the server needs no torch.

One duplex pipe joins the two processes. One thread reads it and reaps the process, another writes to it. So the event
loop never waits for the engine and wakes up once a step. The app makes one of `functools.partial(load_engine, config)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from queue import SimpleQueue

from gptserve.engine.child import describe_exit
from gptserve.engine.errors import DeathKind
from gptserve.engine.process.client import LoopClient
from gptserve.engine.process.engine_process import EngineProcess, take_process
from gptserve.engine.process.loop import Command, EngineFactory, Shutdown

SHUTDOWN_LIMIT_S = 5.0  # for the current step and the teardown of CUDA; an engine holds nothing worth a longer wait
EXIT_LIMIT_S = 5.0  # the child's process must end within this after its pipe has


class ProcessClient(LoopClient):
    """An EngineClient whose engine is a process of its own. The factory must be picklable.

    The child blocks SIGINT and SIGTERM, which reach the whole process group: the parent decides when it ends. If the
    parent dies, the child is killed at once, even while it loads; on systems other than Linux it ends after its current
    step. On Linux the parent is the thread that called `start`.
    """

    _engine: EngineProcess

    def __init__(self, factory: EngineFactory, *, shutdown_limit_s: float = SHUTDOWN_LIMIT_S) -> None:
        super().__init__(factory)
        self._shutdown_limit_s = shutdown_limit_s
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="gptserve-engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="gptserve-engine-writer", daemon=True)

    def kill(self, cause: str, kind: DeathKind) -> None:
        """Kill the engine at once, for `cause`; its live requests are lost."""
        if not self._gone.is_set():
            self._blame(cause, kind)
            self._process.kill()

    def _launch(self) -> None:
        self._outbox.put(pickle.dumps(self._factory))
        self._engine = take_process()
        self._connection, self._process = self._engine.connection, self._engine.process
        try:
            self._writer.start()
            self._reader.start()
        except BaseException:
            if self._writer.ident is not None:
                self._outbox.put(None)
                self._writer.join()
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._engine.release()
            raise

    def _send(self, command: Command) -> None:
        # Pickled here, not in the writer thread: it holds the interpreter as long, but here an error has a caller.
        self._outbox.put(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    async def _stop(self) -> None:
        if self._info is not None:  # an engine that is still loading reads no commands
            self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), self._shutdown_limit_s)
        if not self._gone.is_set():
            self._process.kill()
            await self._gone.wait()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the engine is gone; the reader thread handles that
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)

    def _read(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):  # the engine or the event loop is gone
                while True:
                    self._post(self._receive, self._connection.recv())
        finally:
            self._reap()

    def _reap(self) -> None:
        self._process.join(EXIT_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._outbox.put(None)
        self._writer.join()
        self._connection.close()
        with contextlib.suppress(ConnectionError):  # the event loop is closed
            self._post(self._reaped, *describe_exit("the engine process", self._process.exitcode))

    def _reaped(self, cause: str, kind: DeathKind) -> None:
        self._reader.join()  # it ends after posting this call
        self._engine.release()
        self._ended(cause, kind)
