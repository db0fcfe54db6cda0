"""A second node for tests: `gptserve serve --node-rank 1` in a process of its own, which shares but a socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.server.serving import Process

KEY = "0123456789abcdef"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def of_nodes(port: int) -> dict[str, Any]:
    """Return the engine's options for two nodes of a rank each."""
    return {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}


@contextlib.contextmanager
def second_node(folder: Path, port: int, *flags: str, key: str = KEY) -> Iterator[Process]:
    """Run the second node with the settings of tests/engine/runs.py."""
    nodes = ("--tensor-parallel-size=2", "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1")
    settings = (f"--master-port={port}", "--dtype=float32", f"--kv-cache-bytes={2**24}", *flags)
    process = Process(str(folder), *nodes, *settings, GPTSERVE_CLUSTER_KEY=key)
    try:
        yield process
    finally:
        process.kill()


def rank_of(node: Process) -> psutil.Process:
    """Return the process that computes on this node."""
    (rank,) = (p for p in psutil.Process(node.popen.pid).children() if "spawn_main" in " ".join(p.cmdline()))
    return rank
