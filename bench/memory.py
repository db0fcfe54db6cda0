"""The most memory that a server and its engine take while they load, compared with the weights and the KV cache.

    python -m bench.memory [--shapes tiny gpt2 gpt2-large] [--dtype bfloat16]

A sample of all processes is taken every few milliseconds from the command until the server is ready. `private` is what
only these processes hold (anonymous and shared memory); `resident` has the pages of mapped files as well, which the
system may drop. `held` is what is private once the server is ready, and `of held` private / held. `needed` is the
weights in the type that computes and the KV cache. The shape `tiny` shows what Python and its libraries take. Linux
only. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
import threading
from pathlib import Path

import psutil

from bench.machine import versions
from bench.models import SHAPES, write_served_model
from bench.server import free_port, serve_command, wait_until_ready
from gptserve.engine.runner.memory import parameter_counts
from gptserve.weights.families import load_config

KV_CACHE_BYTES = 64 * 2**20
INTERVAL_S = 0.005
COLUMNS = ("needed", "held", "private", "resident")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Peak:
    """The largest sum over a process and its children, sampled in a thread until `stop`."""

    def __init__(self, process: psutil.Process) -> None:
        self.private = self.resident = 0
        self._process = process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample."""
        self._stopped.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes = [sizes_of(p.pid) for p in (self._process, *self._process.children(recursive=True))]
            self.private = max(self.private, sum(private for private, _ in sizes))
            self.resident = max(self.resident, sum(resident for _, resident in sizes))


def sizes_of(pid: int) -> tuple[int, int]:
    """Return the private and the resident bytes of a process, 0 of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    anon, file, shared = (
        1024 * sum(map(int, re.findall(rf"^Rss{kind}:\s*(\d+) kB$", status, re.M)))
        for kind in ("Anon", "File", "Shmem")
    )
    return anon + shared, anon + file + shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny", "gpt2", "gpt2-large"], choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)
    args = parser.parse_args()
    rows = []
    print(f"{'shape':>12} {'needed MiB':>11} {'held':>6} {'private':>8} {'of held':>8} {'resident':>9}")
    for shape in args.shapes:
        row = measure(shape, args.dtype)
        rows.append({"shape": shape, **row})
        needed, held, private, resident = (row[f"{name}_bytes"] / 2**20 for name in COLUMNS)
        print(
            f"{shape:>12} {needed:>11.0f} {held:>6.0f} {private:>8.0f} {private / held:>8.2f} {resident:>9.0f}",
            flush=True,
        )
    print(json.dumps({"benchmark": "memory", **vars(args), "rows": rows, **versions()}))


def measure(shape: str, dtype: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_served_model(folder, shape)
        weights = sum(parameter_counts(load_config(folder)).values()) * DTYPE_BYTES[dtype]
        port = free_port()
        flags = ("--dtype", dtype, "--kv-cache-bytes", str(KV_CACHE_BYTES), "--log-level", "error")
        process = psutil.Popen(serve_command(port, folder, *flags), start_new_session=True)
        peak = Peak(process)
        try:
            wait_until_ready(port, process)
            held = sum(sizes_of(p.pid)[0] for p in (process, *process.children(recursive=True)))
        finally:
            peak.stop()
            process.kill()
            process.wait()
    sizes = weights + KV_CACHE_BYTES, held, peak.private, peak.resident
    return {f"{name}_bytes": size for name, size in zip(COLUMNS, sizes, strict=True)}


if __name__ == "__main__":
    main()
