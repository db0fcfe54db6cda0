"""The process of an engine, which gets its factory over the pipe: it can start before anybody knows the model.

Importing torch takes most of a start and needs nothing to be known, so the command line starts a process ahead.
process_client.py takes it, or starts one, and talks with it. Torch-free; it imports little, as the process imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import threading
from multiprocessing.connection import Connection

from gptserve.engine.child import ENGINE_NAME, end_with_parent, limit_spinning, start_deaf
from gptserve.engine.process.garbage import without_collections

_ahead: list[EngineProcess] = []


class EngineProcess:
    """A new process with its end of the pipe: it takes a pickled factory, then what the loop of its engine takes.

    The process blocks SIGINT and SIGTERM. If its parent dies, it is killed; on systems other than Linux it ends when it
    next reads or writes. On Linux the parent is the thread that made this. Unless `release` was called, it is killed
    before this interpreter exits.
    """

    def __init__(self, *, imports_torch: bool = False, forks: bool = False) -> None:
        """Start it; with `imports_torch` it does that at once, while it waits. Raises OSError.

        It is spawned. With `forks` it is a copy of this process, which must have one thread and have imported little:
        that begins sooner.
        """
        context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        copied = (self.connection,) if forks else ()
        self.process = context.Process(target=_run, args=(os.getpid(), theirs, imports_torch, copied), name=ENGINE_NAME)
        try:
            with theirs:  # once the child holds the only copy, the pipe ends with the child
                start_deaf(self.process)
        except BaseException:
            self.connection.close()
            if self.process.pid is not None:
                self.process.kill()
                self.process.join()
                self.process.close()
            raise
        atexit.register(self.process.kill)  # an interpreter that exits would wait for this child for ever

    def release(self) -> None:
        """Let go of the process, which has ended."""
        atexit.unregister(self.process.kill)
        self.process.close()


def start_ahead(*, forks: bool = False) -> None:
    """Start a process that imports torch, for the next `take_process`, which raises what keeps this from it.

    If there is one already, this does nothing. EngineProcess says what `forks` is.
    """
    if not _ahead:
        with contextlib.suppress(OSError):
            _ahead.append(EngineProcess(imports_torch=True, forks=forks))


def end_ahead() -> None:
    """End the process that was started ahead, if there is one: this server has no engine's process."""
    while _ahead:
        ahead = _ahead.pop()
        ahead.connection.close()
        ahead.process.kill()
        ahead.process.join()
        ahead.release()


def take_process() -> EngineProcess:
    """Return the process that was started ahead, once, and then new ones. Raises OSError."""
    return _ahead.pop() if _ahead else EngineProcess()


def _run(parent_pid: int, connection: Connection, imports_torch: bool, copied: tuple[Connection, ...]) -> None:
    """Run in the engine's process. It closes its copies of the parent's connections: the pipe ends with the parent."""
    for copy in copied:
        copy.close()
    with connection, contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        end_with_parent(parent_pid)
        limit_spinning()
        if imports_torch:
            threading.Thread(target=_import_torch, name="gptserve-torch", daemon=True).start()
        factory = connection.recv_bytes()
        from gptserve.engine.process.loop import serve

        # Loaded where a fault gets its sentence: this imports what makes the engine.
        serve(lambda report: pickle.loads(factory)(report=report), connection)


def _import_torch() -> None:
    """Import torch; whoever imports it meanwhile waits, and raises what may be wrong with it."""
    from gptserve.engine.process.deferred_imports import DEFERRED, deferred, torch_can_be_deferred

    with contextlib.suppress(Exception), without_collections(), deferred(DEFERRED if torch_can_be_deferred() else ()):
        import torch  # noqa: F401
