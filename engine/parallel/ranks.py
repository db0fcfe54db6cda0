"""The other ranks of a tensor-parallel engine, as the first one has them: child processes that compute with it.

The first rank is the engine itself. It sends each step to the others (worker.py), and all meet in the Group of
group.py. The others may get a step while they compute the one before (overlap.py): they need no token ids, as the first
rank embeds them. If one of them dies, no rank can go on: the engine's process ends too, and its supervisor starts
another. ModelRunner makes one of these where tensor_parallel_size is above 1.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.child import ENGINE_NAME, RANK_DIED, describe_exit, start_deaf
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineDiedError, InvalidConfigurationError
from gptserve.engine.model.group import Group, RankLostError, choose_order
from gptserve.engine.parallel.messages import Cache, Failed, Finding, Loaded, Memory, Step
from gptserve.engine.parallel.worker import run_rank
from gptserve.engine.runner.kv_cache import cache_memory_bytes
from gptserve.engine.staging import Array
from gptserve.weights.sharding import Share

_EXIT_LIMIT_S = 5.0  # a rank's process must end within this after its pipe has
_CAUSE_LIMIT_S = 10.0  # a rank that is lost to the others is dead, and its end known, within this

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: SpawnProcess
    connection: Connection
    inbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Its messages, then None."""


@dataclass(slots=True)
class _End:
    """Why the ranks compute no more; shared with the threads that watch them."""

    cause: str | None = None
    takes_engine: bool = False
    """Whether the death of a rank ends this process at once, even while it waits for the device or a command."""
    known: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, cause: str) -> bool:
        """Return whether this is the first cause; later ones follow from it."""
        with self.lock:
            is_first, self.cause = self.cause is None, self.cause or cause
        self.known.set()
        return is_first


class Ranks:
    """The ranks from 1 on: started by the constructor, killed when this object or the process ends.

    Raises InvalidConfigurationError if there are fewer devices. The other methods raise EngineDiedError, with the
    cause, once a rank is dead.
    """

    def __init__(self, config: EngineConfig, device: torch.device, warnings: Collection[str] = ()) -> None:
        """Start the ranks. `warnings` are those of this rank, to which loading may add; others do not repeat them."""
        size = config.tensor_parallel_size
        if device.type == "cuda" and size > (most := torch.cuda.device_count()):
            raise InvalidConfigurationError(
                f"tensor_parallel_size must be at most the number of CUDA devices ({most}), got {size}"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="gptserve-ranks-")
        path = str(Path(self._folder.name) / "meeting")
        self.group = Group(Share(0, size), path, device, choose_order(config, device))
        self._config, self._device, self._warnings = config, device, warnings
        self._is_engine = multiprocessing.current_process().name == ENGINE_NAME
        self._end = _End()
        self._ranks: list[_Rank] = []
        threads: list[threading.Thread] = []
        self.close: Callable[[], object] = Finalize(
            self, _close, args=(self._ranks, threads, self._end, self._folder), exitpriority=1
        )
        for number in range(1, size):
            rank, theirs = _make(config, Share(number, size), path)
            started: Future[None] = Future()
            arguments = (rank, theirs, started, self._ranks, self._end)
            threads.append(threading.Thread(target=_run, args=arguments, name=f"gptserve-rank-{number}", daemon=True))
            threads[-1].start()
            started.result()
            self._ranks.append(rank)

    def least_memory(self, reserved_bytes: int) -> tuple[int, int]:
        """Wait until all ranks have loaded, and meet them, which takes memory, too; return the least that is left.

        That is the least of cache_memory_bytes. Each rank reserves as much as this one.
        """
        for rank in self._ranks:
            loaded: Loaded = self._receive(rank)
            for warning in loaded.warnings:
                if warning not in self._warnings:
                    logger.warning("rank %d: %s", rank.number, warning)
        self._end.takes_engine = self._is_engine  # whoever waits for a dead rank here hears nothing
        self._check()  # one may have died before this
        with self.together():
            self.group.meet()
        self._end.takes_engine = False
        others: list[Memory] = [self._receive(rank) for rank in self._ranks]
        self._folder.cleanup()  # only now: until a rank has met all others, it reads their addresses there
        free, budget = cache_memory_bytes(self._config, self._device, reserved_bytes)  # now that they took theirs
        for memory in others:
            free = min(free, max(0, memory.free_bytes - reserved_bytes))
            budget = min(budget, max(0, memory.budget_bytes - reserved_bytes))
        return free, budget

    def begin(self, num_blocks: int, max_model_len: int, *, has_graphs: bool) -> None:
        """Have all ranks allocate their caches, and then record steps if there are graphs (capture_decoding).

        From here on the death of a rank is the engine's.
        """
        self._send(pickle.dumps(Cache(num_blocks, max_model_len, has_graphs)))
        for rank in self._ranks:
            self._receive(rank)
        self._end.takes_engine = self._is_engine

    def agree(self, found: str | None) -> str | None:
        """Return what keeps this rank from graphs, or else another one, and tell them; None if nothing does."""
        for rank in self._ranks:
            finding: Finding = self._receive(rank)
            if finding.obstacle is not None:
                found = found or f"of rank {rank.number}: {finding.obstacle}"
        self._send(pickle.dumps(Finding(found)))
        return found

    @contextmanager
    def step(self, arrays: Sequence[Array], graph_size: int | None = None) -> Iterator[None]:
        """Have the ranks compute these arrays while the caller does, by their graphs of this size if it is given."""
        step = Step(tuple(arrays), graph_size, torch.get_num_threads(), native.num_threads())
        with self.together():
            self._send(pickle.dumps(step, pickle.HIGHEST_PROTOCOL))
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compute what the other ranks compute. If the caller raises, they can compute no more.

        They are killed by the next `_check`, as a step that was launched before may need them until it is collected.
        Raises EngineDiedError if one of them has ended.
        """
        try:
            yield
        except RankLostError as error:
            self._end.known.wait(_CAUSE_LIMIT_S)
            raise EngineDiedError(self._end.cause or str(error)) from error
        except EngineDiedError:
            raise
        except BaseException as error:  # the others would wait for the rest of this step
            self._end.set(f"the first rank raised {type(error).__name__} in the middle of a step")
            raise

    def _check(self) -> None:
        """Raise EngineDiedError if the ranks can compute no more, and kill those that live."""
        if self._end.cause is not None:
            _kill(self._ranks)
            raise EngineDiedError(self._end.cause)

    def _send(self, data: bytes) -> None:
        self._check()
        with contextlib.suppress(OSError):  # a dead rank; its watch says why
            for rank in self._ranks:
                rank.connection.send_bytes(data)

    def _receive(self, rank: _Rank) -> Any:
        message = rank.inbox.get()
        if message is None:
            raise EngineDiedError(self._end.cause or f"rank {rank.number} ended")
        return message


def _make(config: EngineConfig, share: Share, path: str) -> tuple[_Rank, Connection]:
    """Return a rank that has not been started, and its end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (os.getpid(), config, share, path, theirs)
    process = context.Process(target=run_rank, args=arguments, name=f"gptserve-rank-{share.rank}")
    return _Rank(share.rank, process, ours), theirs


def _run(rank: _Rank, theirs: Connection, started: Future[None], ranks: Sequence[_Rank], end: _End) -> None:
    """Start the rank and watch it to its end: the system kills it when the thread that started it ends."""
    try:
        with theirs:  # once the child holds the only copy, the pipe ends with the child
            start_deaf(rank.process)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(None)
    _watch(rank, ranks, end)


def _watch(rank: _Rank, ranks: Sequence[_Rank], end: _End) -> None:
    """Take the rank's messages to its inbox; when it ends, end the others."""
    cause = None
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(message := rank.connection.recv(), Failed):
            rank.inbox.put(message)
        cause = f"rank {rank.number} failed: {message.cause}"
    rank.process.join(_EXIT_LIMIT_S)
    if rank.process.is_alive():
        rank.process.kill()
        rank.process.join()
    if end.set(cause or describe_exit(f"rank {rank.number}", rank.process.exitcode)[0]):
        logger.error("%s; the engine ends with it", end.cause)
        if end.takes_engine:
            os._exit(RANK_DIED + rank.number)
        _kill(ranks)
    rank.inbox.put(None)


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()


def _close(
    ranks: Sequence[_Rank],
    threads: Sequence[threading.Thread],
    end: _End,
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    end.set("the engine was closed")
    _kill(ranks)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    for rank in ranks:
        rank.connection.close()
        rank.process.join()  # where this is the thread that watches it, nobody has
        rank.process.close()
    folder.cleanup()
