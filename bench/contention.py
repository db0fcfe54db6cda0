"""Decoding while other processes keep CPUs busy: the share of its undisturbed speed that the engine keeps.

    python -m bench.contention [--shape gpt2] [--batch 1 8] [--neighbours 0 1 2] [--repeats 3]

A neighbour is a child process that spins until it is killed. Runs beside 0, 1 and 2 neighbours take turns. A run is
prefill and decode together, greedy or sampled. The first run after a change of neighbours is not counted. Prints the
medians as a table, and one JSON line with the CPU's name and the load of other processes before it began.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.engines import seconds
from bench.machine import versions
from bench.models import SHAPES, write_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.weights.source import EMBEDDED_MODEL, resolve_model

NEIGHBOUR = "import os, time\nwhile time.monotonic() < {end} and os.getppid() == {parent}: pass"
NEIGHBOUR_LIMIT_S = 600  # longer than any group of runs; a neighbour never outlives it
Speeds = dict[tuple[int, str, int], list[float]]
"""Tokens per second by batch, kind and number of neighbours."""
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
}
KV_CACHE_BYTES = 2**30


def main() -> None:
    args = parse_arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = resolve_model(None) if args.shape == EMBEDDED_MODEL else Path(name)
        if args.shape != EMBEDDED_MODEL:
            write_model(folder, args.shape)
        config = EngineConfig(
            folder, device="cpu", dtype=args.dtype, enable_prefix_caching=False, kv_cache_bytes=KV_CACHE_BYTES
        )
        engine = Engine(config)
    speeds: Speeds = {}
    for _ in range(args.repeats):
        for num_neighbours in args.neighbours:
            with neighbours(num_neighbours):
                measure(engine, num_neighbours, args, speeds)
    rows = [row(speeds, batch, kind, n) for batch in args.batch for kind in KINDS for n in args.neighbours]
    show(rows)
    report = {"benchmark": "contention", **vars(args), "load_before": load, "dtype": engine.info.dtype}
    print(json.dumps({**report, "rows": rows, **versions()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, EMBEDDED_MODEL], default="gpt2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Keep CPUs busy with `number` processes."""
    code = NEIGHBOUR.format(end=time.monotonic() + NEIGHBOUR_LIMIT_S, parent=os.getpid())
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def measure(engine: Engine, num_neighbours: int, args: argparse.Namespace, speeds: Speeds) -> None:
    """Add one run of each batch and kind to `speeds`, after one that is not counted."""
    speed(engine, args.batch[0], args, KINDS["greedy"])
    for batch in args.batch:
        for kind, params in KINDS.items():
            speeds.setdefault((batch, kind, num_neighbours), []).append(speed(engine, batch, args, params))


def speed(engine: Engine, batch: int, args: argparse.Namespace, params: dict[str, Any]) -> float:
    """Return tokens per second, prefill and decode together."""
    prompts = torch.randint(engine.info.vocab_size, (batch, args.prompt_len)).tolist()
    return batch * args.max_tokens / seconds(engine, prompts, args.max_tokens, **params)


def row(speeds: Speeds, batch: int, kind: str, number: int) -> dict[str, Any]:
    """Return the median, and its share of that without neighbours."""
    median, idle = statistics.median(speeds[batch, kind, number]), speeds.get((batch, kind, 0))
    share = None if idle is None else median / statistics.median(idle)
    return {"batch": batch, "kind": kind, "neighbours": number, "tokens_per_s": median, "share": share}


def show(rows: list[dict[str, Any]]) -> None:
    columns = {"tokens_per_s": "tokens/s", "share": "share"}
    shown = {key: title for key, title in columns.items() if rows[0].get(key) is not None}
    print(f"batch {'kind':8} neighbours" + "".join(f"{title:>16}" for title in shown.values()))
    for r in rows:
        print(f"{r['batch']:>5} {r['kind']:8} {r['neighbours']:>10}" + "".join(f"{r[key]:>16.2f}" for key in shown))


if __name__ == "__main__":
    main()
