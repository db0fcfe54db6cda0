"""A node beyond the first: it runs its ranks of an engine that is on another machine, and runs them again.

A rank's process gets the connection to the first rank (links.py). When either ends, the other is ended, too, and the
node connects again: so the supervisor of the first node can start its engine anew. Torch-free but in the ranks; the
command line calls `run_node`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import socket
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from gptserve.engine.child import describe_exit, start_deaf
from gptserve.engine.config import EngineConfig
from gptserve.engine.parallel.links import RefusedError, connect_rank

_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 4.0

logger = logging.getLogger(__name__)


class Stop:
    """Tells the threads of a node to end; they may wait for it beside other descriptors."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.descriptor, self._other = os.pipe()
        self.refusal: RefusedError | None = None

    def set(self, refusal: RefusedError | None = None) -> None:
        """Have them end; they cannot go on if there is a refusal."""
        self.refusal = self.refusal or refusal
        if not self._event.is_set():
            self._event.set()
            os.close(self._other)  # the descriptor is at its end

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._event.wait(timeout_s)


def run_node(config: EngineConfig, key: bytes, stop: Stop) -> None:
    """Run the ranks of this node until `stop` is set. Raises RefusedError if the first node takes none of them."""
    first = config.node_rank * config.num_local_ranks
    numbers = range(first, first + config.num_local_ranks)
    logger.info("node %d of %d: ranks %s", config.node_rank, config.nnodes, ", ".join(map(str, numbers)))
    threads = [threading.Thread(target=_run_ranks, args=(config, n, key, stop), name=f"rank-{n}") for n in numbers]
    try:
        for thread in threads:  # the system kills a rank when its thread ends
            thread.start()
        stop.wait()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if stop.refusal is not None:
        raise stop.refusal


def _run_ranks(config: EngineConfig, number: int, key: bytes, stop: Stop) -> None:
    """Run the rank of this number, one process after another."""
    place = f"{config.master_addr} port {config.master_port}"
    delay_s, was_there = _FIRST_DELAY_S, True
    while not stop.wait(0):
        try:
            peer, welcome = connect_rank(config, number, key)
        except RefusedError as error:
            stop.set(error)
            return
        except (OSError, EOFError, ValueError) as error:
            if was_there:
                logger.info("rank %d waits for the first node at %s: %s", number, place, error or "it hung up")
            was_there = False
            stop.wait(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            continue
        logger.info("rank %d is connected to the first node at %s", number, place)
        delay_s, was_there = _FIRST_DELAY_S, True
        with peer:
            end = _run_rank(config, number, peer, welcome.store_port, stop)
        if not stop.wait(0):
            logger.warning("%s; connecting again", end)


def _run_rank(config: EngineConfig, number: int, peer: socket.socket, store_port: int, stop: Stop) -> str:
    """Run one process of the rank until it or its connection ends; return how it ended."""
    context = multiprocessing.get_context("spawn")
    address = peer.getsockname()[0]
    with Connection(os.dup(peer.fileno())) as connection:
        arguments = (os.getpid(), config, number, store_port, address, connection)
        process = context.Process(target=_compute, args=arguments, name=f"gptserve-rank-{number}")
        start_deaf(process)
    is_connected = _wait(process, peer, stop)
    process.kill()
    process.join()
    how = describe_exit(f"rank {number}", process.exitcode)[0] if is_connected else "the first node hung up"
    process.close()
    return how


def _wait(process: SpawnProcess, peer: socket.socket, stop: Stop) -> bool:
    """Wait until the process, its connection, of which it reads alone, or the node ends; return whether it is
    connected."""
    poll = select.poll()
    poll.register(process.sentinel, select.POLLIN)
    poll.register(stop.descriptor, select.POLLIN)
    poll.register(peer, select.POLLRDHUP)  # beside the errors, which are always told
    return peer.fileno() not in dict(poll.poll())


def _compute(
    parent_pid: int, config: EngineConfig, number: int, store_port: int, address: str, connection: Connection
) -> None:
    """Run in the rank's process."""
    from gptserve.engine.model.group import Meeting
    from gptserve.engine.parallel.worker import run_rank
    from gptserve.weights.sharding import Share

    meeting = Meeting(str(config.master_addr), store_port, address)
    run_rank(parent_pid, config, Share(number, config.tensor_parallel_size), meeting, connection)
