"""Ranks on a CPU that record decoding steps, with a stand-in: a replay computes anew, and notes in a file that it did.

A spawned rank cannot be reached from a test, so it is started by `run_recording_rank` with the name of its Capture.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.gpu import graphs as cuda_graphs
from gptserve.engine.backends.gpu.recorded_steps import Capture, Replay
from gptserve.engine.parallel import ranks, worker
from gptserve.engine.runner import step_memory


class Noting:
    """Records nothing: a replay computes anew, and `notes` gets a character."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        def replay() -> Tensor:
            with self._notes.open("a") as file:
                file.write("r")
            return compute()

        return replay


class Failing(Noting):
    """Cannot record the second of three sizes."""

    num_recorded, the_one = 0, 2

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        self.num_recorded += 1
        if self.num_recorded == self.the_one:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().__call__(compute)


class FailingLater(Failing):
    """Records all of them, as the first rank does to measure its memory, and then not the second."""

    the_one = 5


class Dying(Noting):
    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Differing(Noting):
    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        replay = super().__call__(compute)
        return lambda: replay() + 1


class Forgetting(Noting):
    """Its replays store no keys."""

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        replay = super().__call__(compute)

        def forget() -> Tensor:
            write = CpuAttention.write
            CpuAttention.write = lambda *arguments: None  # type: ignore[method-assign, assignment]
            try:
                return replay()
            finally:
                CpuAttention.write = write  # type: ignore[method-assign]

        return forget


class Memory:
    """A device whose steps take nothing."""

    def reset(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def free(self) -> int:
        return 2**30


def run_recording_rank(make: Callable[[Path], Capture], notes: Path, *arguments: Any) -> None:
    """Run a rank that records by `make(notes)`."""
    worker.capture_of = lambda device: make(notes)
    worker.run_rank(*arguments)


def record(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    first: Callable[[Path], Capture] = Noting,
    others: Callable[[Path], Capture] = Noting,
) -> tuple[Path, Path]:
    """Have the next engine record as on a GPU; return the notes of the first rank and of the others."""
    notes = folder / "first", folder / "others"
    for path in notes:
        path.touch()
    monkeypatch.setattr(step_memory, "memory_of", lambda device: Memory())
    capture = first(notes[0])
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda device: capture)
    monkeypatch.setattr(ranks, "run_rank", partial(run_recording_rank, others, notes[1]))
    return notes


def num_replays(notes: Path) -> int:
    return notes.stat().st_size
