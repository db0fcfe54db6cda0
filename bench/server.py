"""A server for benchmarks: `gptserve serve` in a process of its own, on a free port. Imports no torch."""

from __future__ import annotations

import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

START_LIMIT_S = 300.0  # a first start on a GPU compiles kernels and compares each of them


@contextmanager
def running_server(*arguments: str | Path, **options: Any) -> Iterator[tuple[psutil.Popen, int]]:
    """Run a server with these arguments, its process with these options; yield the process and the port when ready."""
    port = free_port()
    process = psutil.Popen(serve_command(port, *arguments), start_new_session=True, **options)
    try:
        wait_until_ready(port, process)
        yield process, port
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve_command(port: int, *arguments: str | Path) -> list[str | Path]:
    return [Path(sys.executable).with_name("gptserve"), "serve", "--port", str(port), *arguments]


def wait_until_ready(port: int, process: psutil.Popen) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server did not become ready")
