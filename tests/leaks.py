"""What this process holds: children, threads, unfinished tasks and descriptors, each with a name to find it by.

The suite's conftest.py compares the end of a run with its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil
import uvloop

KEPT_THREADS = ("tqdm_monitor",)
"""Threads that libraries keep for good."""
KEPT_FILES = ("/dev/", "/proc/")
"""Where the files are that libraries open once and keep."""
LIMIT_S = 20.0


def holdings() -> set[str]:
    """Return what this process holds, but for what libraries keep for good."""
    resource_tracker.ensure_running()  # multiprocessing's process that outlives all others, and its descriptor
    uvloop.new_event_loop().close()  # the first one opens a pipe that the library keeps for all of them
    gc.collect()  # a cycle may hold what nobody uses
    return {*_children(), *_threads(), *_tasks(), *_descriptors()}


def freeze() -> None:
    """Let searches pass by all objects that are there, such as modules, unless a task is among them."""
    gc.collect()
    if not any(_tasks()):
        gc.freeze()


def open_gpu() -> None:
    """Have CUDA open what it keeps until the process ends, so that it is there before anything is counted."""
    import torch

    if torch.cuda.is_available():
        x = torch.ones(2, 2).pin_memory().cuda()
        with torch.cuda.stream(torch.cuda.Stream()):
            (x @ x).cpu()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x + x


def wait_until_gone(before: set[str]) -> list[str]:
    """Return what is held beyond `before` and stays so; what is ending gets LIMIT_S to end."""
    deadline = time.monotonic() + LIMIT_S
    while (left := holdings() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return sorted(left)


def _children() -> Iterator[str]:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid != resource_tracker._resource_tracker._pid:
                yield f"process {child.pid}: {' '.join(child.cmdline()) or child.name()}"


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.name not in KEPT_THREADS:
            yield f"thread {thread.native_id}: {thread.name}"


def _tasks() -> Iterator[str]:
    for thing in gc.get_objects():
        if issubclass(type(thing), asyncio.Task) and not thing.done():  # isinstance would ask the thing, and some warn
            yield f"task {thing.get_name()}: {thing.get_coro()}"


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith(KEPT_FILES) and int(number) != resource_tracker._resource_tracker._fd:
                yield f"descriptor {number}: {target}"
