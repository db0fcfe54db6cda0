"""The other ranks of a tensor-parallel engine, as the first one has them: processes here and on other nodes.

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
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.child import ENGINE_NAME, RANK_DIED, start_deaf
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineDiedError, InvalidConfigurationError
from gptserve.engine.model.group import Group, Meeting, RankLostError, choose_order
from gptserve.engine.parallel.links import ChildLink, Link, NodeLink, accept_ranks, cluster_key, listen
from gptserve.engine.parallel.messages import Cache, Failed, Finding, Loaded, Memory, Message, Step, encode, receive
from gptserve.engine.parallel.worker import run_rank
from gptserve.engine.runner.fingerprint import weights_digest
from gptserve.engine.runner.kv_cache import cache_memory_bytes
from gptserve.engine.staging import Array
from gptserve.weights.sharding import Share

_CAUSE_LIMIT_S = 10.0  # a rank that is lost to the others is dead, and its end known, within this

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    link: Link
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
        size, num_local = config.tensor_parallel_size, config.num_local_ranks
        if config.node_rank > 0:
            raise InvalidConfigurationError(f"node_rank must be 0 but for `gptserve serve`, got {config.node_rank}")
        if device.type == "cuda" and num_local > (most := torch.cuda.device_count()):
            each = f" of each of {config.nnodes} nodes" if config.nnodes > 1 else ""
            raise InvalidConfigurationError(
                f"tensor_parallel_size must be at most the number of CUDA devices ({most}){each}, got {size}"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="gptserve-ranks-")
        meeting, nodes = Meeting(str(Path(self._folder.name) / "meeting")), dict[int, NodeLink]()
        own, self._store = meeting, contextlib.ExitStack()
        if config.nnodes > 1:
            key, store = cluster_key(), self._store.enter_context(listen(str(config.master_addr), 0))
            address, port = store.getsockname()[:2]
            meeting = Meeting(address, port, address)
            own = replace(meeting, listener=store.fileno())
            nodes = accept_ranks(config, key, port)
        self.group = Group(Share(0, size), own, device, choose_order(config, device))
        self._config, self._device, self._warnings = config, device, warnings
        self._is_engine = multiprocessing.current_process().name == ENGINE_NAME
        self._end = _End()
        self._ranks: list[_Rank] = []
        threads: list[threading.Thread] = []
        self.close: Callable[[], object] = Finalize(
            self, _close, args=(self._ranks, threads, self._end, self._folder, self._store), exitpriority=1
        )
        for number in range(1, size):
            started: Future[None] = Future()
            if number in nodes:
                rank, theirs = _Rank(number, nodes[number]), None
            else:
                rank, theirs = _make(config, Share(number, size), meeting)
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
            if rank.number >= self._config.num_local_ranks and loaded.digest != weights_digest(self._config):
                raise InvalidConfigurationError(f"rank {rank.number} has other weights than the first node")
            for warning in loaded.warnings:
                if warning not in self._warnings:
                    logger.warning("rank %d: %s", rank.number, warning)
        self._end.takes_engine = self._is_engine  # whoever waits for a dead rank here hears nothing
        self._check()  # one may have died before this
        with self.together():
            self.group.meet()
        self._store.close()  # the group's store has a descriptor of its own
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
        self._send(Cache(num_blocks, max_model_len, has_graphs))
        for rank in self._ranks:
            self._receive(rank)
        self._end.takes_engine = self._is_engine

    def agree(self, found: str | None) -> str | None:
        """Return what keeps this rank from graphs, or else another one, and tell them; None if nothing does."""
        for rank in self._ranks:
            finding: Finding = self._receive(rank)
            if finding.obstacle is not None:
                found = found or f"of rank {rank.number}: {finding.obstacle}"
        self._send(Finding(found))
        return found

    @contextmanager
    def step(self, arrays: Sequence[Array], graph_size: int | None = None) -> Iterator[None]:
        """Have the ranks compute these arrays while the caller does, by their graphs of this size if it is given."""
        step = Step(tuple(arrays), graph_size, torch.get_num_threads(), native.num_threads())
        with self.together():
            self._send(step)
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

    def _send(self, message: Message) -> None:
        self._check()
        data = encode(message)
        with contextlib.suppress(OSError):  # a dead rank; its watch says why
            for rank in self._ranks:
                rank.link.connection.send_bytes(data)

    def _receive(self, rank: _Rank) -> Any:
        message = rank.inbox.get()
        if message is None:
            raise EngineDiedError(self._end.cause or f"rank {rank.number} ended")
        return message


def _make(config: EngineConfig, share: Share, meeting: Meeting) -> tuple[_Rank, Connection]:
    """Return a rank of this node that has not been started, and its end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (os.getpid(), config, share, meeting, theirs)
    process = context.Process(target=run_rank, args=arguments, name=f"gptserve-rank-{share.rank}")
    return _Rank(share.rank, ChildLink(share.rank, process, ours)), theirs


def _run(rank: _Rank, theirs: Connection | None, started: Future[None], ranks: Sequence[_Rank], end: _End) -> None:
    """Start the rank, if it is of this node, and watch it to its end.

    The system kills it when the thread that started it ends.
    """
    try:
        if theirs is not None:
            assert isinstance(rank.link, ChildLink)
            with theirs:  # once the child holds the only copy, the pipe ends with the child
                start_deaf(rank.link.process)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(None)
    _watch(rank, ranks, end)


def _watch(rank: _Rank, ranks: Sequence[_Rank], end: _End) -> None:
    """Take the rank's messages to its inbox; when it ends, end the others."""
    cause = None
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(message := receive(rank.link.connection), Failed):
            rank.inbox.put(message)
        cause = f"rank {rank.number} failed: {message.cause}"
    how = rank.link.wait()
    if end.set(cause or how):
        logger.error("%s; the engine ends with it", end.cause)
        if end.takes_engine:
            os._exit(RANK_DIED + rank.number)
        _kill(ranks)
    rank.inbox.put(None)


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.link.kill()


def _close(
    ranks: Sequence[_Rank],
    threads: Sequence[threading.Thread],
    end: _End,
    folder: tempfile.TemporaryDirectory[str],
    store: contextlib.ExitStack,
) -> None:
    end.set("the engine was closed")
    _kill(ranks)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    for rank in ranks:
        rank.link.close()
    folder.cleanup()
    store.close()
