"""Runs code that comes with a model, such as a template or a regex, in worker processes within limits.

Such code may never end, fill memory or crash. In a worker it harms nobody: a worker that passes a limit dies, its
caller gets a ForeignCodeError, and the next call starts another worker. Knows neither templates nor tokenizers.
`chat/template.py` and `tokenizers/worker_encoder.py` call it.

A worker is a Python without torch that calls `main` with its end of a socket. It gets an opener and its argument, then
requests, one at a time, all as JSON. Each has one reply: a byte for its kind, then text or token ids. Its stdin is a
pipe that is never written to: when the caller closes it or dies, the kernel kills the worker. Before it opens anything
foreign it gives up what the system lets it give up (confinement.py).
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, socketpair
from typing import Any

from gptserve.weights.confinement import confine

logger = logging.getLogger(__name__)

NUM_WORKERS = 4  # so many slow calls must come at once to hold up another

TEXT, TOKEN_IDS, FAULT = b"t", b"i", b"f"
OUT_OF_MEMORY = 3  # the exit status of a worker that has passed its limit
PARENT_DEATH_FD = 0  # stdin, a pipe whose other end the parent holds
MAX_CAUSE = 1000  # characters of a fault

# All that a worker sees of the server's environment, which may hold keys: where Python's own parts are, and what
# decides how text and the local time are written.
ENVIRONMENT = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
# What a worker may have of each.
RESOURCES = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 64}

Reply = str | list[int]


class ForeignCodeError(Exception):
    """Foreign code failed or passed a limit; the message is the cause in one sentence."""


class CannotOpenError(ForeignCodeError):
    """It fails before it is called, and will every time."""


class WorkerDiedError(ForeignCodeError):
    """A worker died, or stood still, of something else than a limit of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """CPU time in seconds, and memory in bytes beyond that of Python and what was opened; open_ is for the opening."""

    cpu_s: int = 5  # a hundred times what the longest conversation takes
    memory_bytes: int = 2**29
    open_cpu_s: int = 5
    open_memory_bytes: int = 2**29
    reply_bytes: int = 2**24  # eight times the largest request body
    wait_s: float = 120.0  # by the clock, for a worker that neither uses CPU time nor reads or writes
    starts_threads: bool = False  # or processes; such a worker is not confined


class Workers:
    """At most NUM_WORKERS processes that hold what `opener` returned, started as they are needed. Threads share it.

    `opener` is the "module:name" of a function: it takes `argument` and returns the function that answers requests. Of
    files that are not Python's own both may read those named, and what lies in folders named.
    """

    def __init__(self, opener: str, argument: object, limits: Limits, readable: Iterable[str | Path] = ()) -> None:
        self._limits = limits
        paths = [str(Path(path).absolute()) for path in readable]
        self._first = json.dumps([opener, argument, asdict(self._limits), paths]).encode()
        self._slots = threading.BoundedSemaphore(NUM_WORKERS)
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._refusal: str | None = None
        self._closing = weakref.finalize(self, _end_all, self._all, self._lock)

    def open(self) -> None:
        """Have a worker ready for the first call. Raises ForeignCodeError."""
        with self._slots:
            self._idle.append(self._take())

    def call(self, **request: object) -> Reply:
        """Return the answer to a request. Waits while all workers are busy. Raises ForeignCodeError."""
        data = json.dumps(request).encode()
        with self._slots:
            worker = self._take()
            try:
                return worker.ask(data, self._limits.cpu_s, self._limits.memory_bytes)
            finally:
                self._idle.append(worker)

    def close(self) -> None:
        """End all workers at once; whoever waits for one gets a ForeignCodeError."""
        self._closing()

    def _take(self) -> _Worker:
        with suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._drop(worker)
        return self._start()

    def _start(self) -> _Worker:
        """Return a new worker. What cannot be opened is not tried again."""
        if self._refusal is not None:
            raise CannotOpenError(self._refusal)
        with self._lock:
            if not self._closing.alive:
                raise ForeignCodeError("the server is shutting down")
            worker = _Worker(self._limits)
            self._all.add(worker)
        try:
            confinement = worker.ask(self._first, self._limits.open_cpu_s, self._limits.open_memory_bytes)
        except BaseException as fault:
            self._drop(worker)
            if isinstance(fault, WorkerDiedError) or not isinstance(fault, ForeignCodeError):
                raise
            self._refusal = str(fault)
            raise CannotOpenError(self._refusal) from fault
        logger.debug("workers: %s", confinement)
        return worker

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
            worker.end()


def _end_all(workers: set[_Worker], lock: threading.Lock) -> None:
    with lock:
        for worker in workers:
            worker.end()
        workers.clear()


class _Worker:
    """One process and the socket to it. In a process group of its own, as Ctrl-C is for the server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._asking = threading.RLock()
        ours, theirs = socketpair()
        with theirs:
            for option in (SO_SNDTIMEO, SO_RCVTIMEO):
                ours.setsockopt(SOL_SOCKET, option, _timeval(limits.wait_s))
            self._socket = Connection(ours.detach())
            # With this process's path, as Python's own may begin with the current folder, which may be the model's.
            code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; main({theirs.fileno()})"
            command = [sys.executable, "-P", "-c", code]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, data: bytes, cpu_s: int, memory_bytes: int) -> Reply:
        """Send a message and return the reply. Raises ForeignCodeError, of which the worker may have died."""
        with self._asking:
            try:
                self._socket.send_bytes(data)
                reply = self._socket.recv_bytes(self._limits.reply_bytes + 1)
            except BlockingIOError as fault:
                self.end()
                raise WorkerDiedError(f"it took longer than {self._limits.wait_s:g} s") from fault
            except (EOFError, OSError) as fault:
                raise self._why_dead(cpu_s, memory_bytes) from fault
            except BaseException:
                self.end()  # the next message would get the reply to this one
                raise
        kind, content = reply[:1], reply[1:]
        if kind == TOKEN_IDS:
            return array("I", content).tolist()
        text = content.decode("utf-8", errors="surrogatepass")
        if kind == FAULT:
            raise ForeignCodeError(text)
        return text

    def end(self) -> None:
        """Kill the process, if it has not ended, and reap it. Whoever waits for its reply learns of it."""
        self._process.kill()
        self._process.wait()
        with self._asking:
            self._socket.close()
            assert self._process.stdin is not None, "stdin is a pipe"
            self._process.stdin.close()

    def _why_dead(self, cpu_s: int, memory_bytes: int) -> ForeignCodeError:
        self.end()  # a process that is ending already keeps its status
        status = self._process.returncode
        if status == -signal.SIGXCPU:
            return ForeignCodeError(f"it took more than {cpu_s} s of CPU time")
        if status in (OUT_OF_MEMORY, -signal.SIGABRT):  # Rust aborts
            return ForeignCodeError(f"it needed more than {memory_bytes // 2**20} MiB of memory")
        how = f"by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"with status {status}"
        return WorkerDiedError(f"its process ended {how}")


def main(descriptor: int) -> None:
    """Be a worker at this end of a socket until it ends."""
    with Connection(descriptor) as socket, suppress(EOFError, ConnectionError):  # the caller is gone
        _obey_signals()
        _work(socket)


def _obey_signals() -> None:
    """Exit with the parent or at the limit of CPU time; ignore SIGINT and SIGTERM."""
    # The server decides when its workers end; a service manager may send this to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # the caller may have ignored or blocked it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG would kill the worker as soon as the thread that started it ends.
        with suppress(OSError):  # in a sandbox that has no such signals, a worker ends when it next reads
            fcntl.fcntl(PARENT_DEATH_FD, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(PARENT_DEATH_FD, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(PARENT_DEATH_FD, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([PARENT_DEATH_FD], (), (), 0)[0]:
        raise EOFError  # before the kernel was asked


def _work(socket: Connection) -> None:
    with suppress(OSError):  # where memory runs out, a worker is to die and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    opener, argument, values, readable = json.loads(socket.recv_bytes())
    limits = Limits(**values)
    module_name, _, name = opener.partition(":")
    open_it = getattr(importlib.import_module(module_name), name)
    confinement = _give_up_rights(limits, readable)
    answer: list[Callable[..., Any]] = []

    def opening() -> str:
        answer.append(open_it(argument))
        return confinement

    _limit_memory(limits.open_memory_bytes)
    _reply(socket, opening, {}, limits.open_cpu_s, limits.reply_bytes)
    _limit_memory(limits.memory_bytes)
    while True:
        request = json.loads(socket.recv_bytes())
        _reply(socket, answer[0], request, limits.cpu_s, limits.reply_bytes)


def _give_up_rights(limits: Limits, readable: list[str]) -> str:
    """Keep what escapes from a sandbox from the log, files, sockets and processes; return what holds it."""
    with open(os.devnull, "wb") as nowhere:  # what libraries print of their faults, any client could have them print
        os.dup2(nowhere.fileno(), 2)
    # These limits do not hold for root, and do where the system cannot confine a process.
    for kind, value in (RESOURCES if limits.starts_threads else {**RESOURCES, resource.RLIMIT_NPROC: 0}).items():
        _limit(kind, value, for_good=True)
    return "" if limits.starts_threads else str(confine(readable))


def _reply(
    socket: Connection, answer: Callable[..., Any], request: Mapping[str, object], cpu_s: int, max_bytes: int
) -> None:
    """Send the answer, or the cause why there is none. The process dies of what passes a limit of time or memory."""
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)
    try:
        reply = answer(**request)
        kind, data = (TEXT, reply.encode("utf-8", "surrogatepass")) if isinstance(reply, str) else _packed(reply)
        if len(data) > max_bytes:
            kind, data = FAULT, f"it made more than {max_bytes // 2**20} MiB".encode()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as fault:  # a panic in Rust is no Exception
        kind, data = FAULT, _cause(fault)[:MAX_CAUSE].encode("utf-8", "surrogatepass")
    socket.send_bytes(kind + data)


def _packed(token_ids: list[int]) -> tuple[bytes, bytes]:
    return TOKEN_IDS, array("I", token_ids).tobytes()


def _cause(fault: BaseException) -> str:
    """Return the cause as text, with its type unless it is of those whose texts are sentences."""
    text = str(fault)
    return text if type(fault).__module__.startswith(("jinja2.", "gptserve.")) else f"{type(fault).__name__}: {text}"


def _limit_memory(more_bytes: int) -> None:
    """Limit the address space to what there is and more_bytes. Elsewhere than on Linux there is no limit."""
    with suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + more_bytes)


def _timeval(duration_s: float) -> bytes:
    """Return the duration as the time-outs of a socket want it."""
    return struct.pack("@ll", int(duration_s), int(duration_s % 1 * 1e6))


def _limit(kind: int, value: int, *, for_good: bool = False) -> None:
    """Set the soft limit; the hard one, which may be lower, stays unless it is `for_good`."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value if for_good else hard))
