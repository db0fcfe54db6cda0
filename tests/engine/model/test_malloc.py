"""What loading leaves behind in malloc's memory, which is lost to others as long as the engine lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, sys
from pathlib import Path
from gptserve.engine.config import EngineConfig
from gptserve.engine.runner.runner import ModelRunner

class Found(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks used free top"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo is None:
    sys.exit("no mallinfo2")
mallinfo.restype = Found
runner = ModelRunner(EngineConfig(Path(sys.argv[1]), device="cpu", dtype="bfloat16", kv_cache_bytes=2**24))
print(mallinfo().free - mallinfo().top)
"""
LARGEST_BYTES = 4 * 256 * 1024  # a feed-forward's weight in fp32


@pytest.mark.slow
def test_vectors_that_stay_do_not_split_what_matrices_leave(make_gpt2: Callable[..., Path]) -> None:
    folder = make_gpt2(n_layer=24, n_embd=256, n_head=4, vocab_size=300)
    found = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, check=False)

    if found.stderr.strip() == "no mallinfo2":
        pytest.skip("the C library does not tell what is free")
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 4 * LARGEST_BYTES, "24 layers left 24 times as much"
