"""Pieces are computed by threads of their own, each of which computes with torch alone, and give what one thread gives.

What torch's own threads would do is seen in a process of its own: once they are there, they never end.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.weights.loading_threads import loading_threads, map_pieces
from tests.conftest import MakeGPT2

LIMIT_S = 100  # within that of a test


def test_pieces_are_computed_at_once_and_come_in_order() -> None:
    meeting = threading.Barrier(2, timeout=LIMIT_S)  # which one thread would never pass

    def compute(piece: int, other: str) -> tuple[int, str, int]:
        meeting.wait()
        return piece, other, torch.get_num_threads()

    before = torch.get_num_threads()
    with loading_threads(2):
        assert torch.get_num_threads() == 1
        assert list(map_pieces(compute, [3, 1, 2, 0], "abcd")) == [(3, "a", 1), (1, "b", 1), (2, "c", 1), (0, "d", 1)]
    assert torch.get_num_threads() == before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gptserve-loading")]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_mode_of_the_caller_is_that_of_its_pieces(num_threads: int) -> None:
    with loading_threads(num_threads):
        for is_inference in (True, False):
            with torch.inference_mode(is_inference):
                modes = list(map_pieces(lambda _: torch.is_inference_mode_enabled(), range(4)))
            assert modes == [is_inference] * 4


def test_one_thread_and_no_context_compute_in_the_caller() -> None:
    def compute(_: int) -> str:
        return threading.current_thread().name

    own = threading.current_thread().name
    assert set(map_pieces(compute, range(3))) == {own}
    with loading_threads(1):
        assert set(map_pieces(compute, range(3))) == {own}
    with loading_threads(3):
        assert list(map_pieces(compute, range(1))) == [own]


def test_what_a_piece_raises_ends_the_loading() -> None:
    before = torch.get_num_threads()

    def compute(piece: int) -> int:
        if piece == 2:
            raise MemoryError("no room")
        return piece

    with pytest.raises(MemoryError, match=r"^no room$"), loading_threads(2):
        list(map_pieces(compute, range(100)))
    assert torch.get_num_threads() == before


MEMORY_KEPT = """
import threading, torch
from pathlib import Path
from gptserve.weights.loading_threads import loading_threads, map_pieces

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def compute(_):
    together.wait()  # so that each thread has memory of its own
    held = [torch.ones(2**14) for _ in range(400)]
    kept = torch.ones(2**7)  # behind it all, so that free alone gives nothing back
    del held
    return kept

together = threading.Barrier(4)
with loading_threads(4):
    kept = list(map_pieces(compute, range(4)))
    before = resident_mib()
print(before, resident_mib())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory for each thread")
def test_what_threads_held_is_given_back() -> None:
    command = [sys.executable, "-P", "-c", MEMORY_KEPT]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    before, after = map(int, printed.split())
    assert after < before - 40  # of 4 threads that held 25 MiB


NUM_NEW_THREADS = """
import os, sys, threading, time, torch
from contextlib import suppress
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from pathlib import Path

def threads():
    tasks = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # it has ended
            if Path(f"/proc/self/task/{task}/comm").read_text() != "gptserve-team\\n":
                tasks.add(int(task))
    return tasks - {thread.native_id for thread in threading.enumerate()}

torch.set_num_threads(4)  # which starts other threads of torch, that never wait by spinning
before = threads()
quantization = sys.argv[2] or None
engine = Engine(EngineConfig(Path(sys.argv[1]), device="cpu", num_threads=4, quantization=quantization, num_blocks=8))
assert torch.get_num_threads() == 4
end = time.monotonic() + 5
while threads() - before and time.monotonic() < end:  # for Linux, a thread that Python has joined may still end
    pass
print(len(threads() - before))
torch.ones(2**20) + 1
print(len(threads() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in Linux's /proc")
@pytest.mark.skipif(not native.is_available(), reason="the library is not built, so oneDNN is asked with many threads")
@pytest.mark.parametrize("quantization", ["int8", pytest.param("", marks=pytest.mark.slow)])
def test_no_thread_of_torchs_pool_starts_while_a_model_loads(make_gpt2: MakeGPT2, quantization: str) -> None:
    folder = make_gpt2(n_embd=256, vocab_size=1000)  # of so large tensors torch computes parts in its threads
    command = [sys.executable, "-P", "-c", NUM_NEW_THREADS, str(folder), quantization]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert printed.split() == ["0", "3"]
