"""Throughput through HTTP compared with the engine's own, in one run on one machine.

    python -m bench.serving [--streams 32] [--prompt-len 128] [--max-tokens 128] [--shape gpt2] [--repeats 3]

A server process streams to a client that counts events. An Engine in its own process computes the same prompts. The two
take turns, and the medians are compared. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from bench.machine import versions
from bench.models import SHAPES, write_served_model
from bench.server import running_server
from gptserve.server.cli.bench.load import Load
from gptserve.server.cli.bench.workload import Workload


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_served_model(folder, args.shape)
        arguments = [folder, "--dtype", args.dtype, *["--in-process"] * args.in_process]
        with own_engine(folder, args.dtype) as engine, running_server(*arguments) as (_, port):
            load = Load(f"http://127.0.0.1:{port}", {}, folder.name)
            rates = [measure(engine, load, args) for _ in range(1 + args.repeats)][1:]  # the first warms up
    own, http = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(b / a for a, b in rates)
    print(f"{'streams':>7} {'engine tok/s':>13} {'HTTP tok/s':>11} {'ratio':>6}")
    print(f"{args.streams:>7} {own:>13.1f} {http:>11.1f} {ratio:>6.2f}")
    print(json.dumps({"benchmark": "serving", **vars(args), "engine": own, "http": http, "ratio": ratio, **versions()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-process", action="store_true", help="run the server's engine in a thread")
    return parser.parse_args()


def measure(engine: Connection, load: Load, args: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second of the engine alone and through HTTP, for new random prompts."""
    bodies = Workload(prompt_tokens=args.prompt_len, max_tokens=args.max_tokens).bodies(args.streams)
    num_tokens = args.streams * args.max_tokens
    engine.send(([body["prompt"] for body in bodies], args.max_tokens))
    own = engine.recv()
    start = time.perf_counter()
    outcomes = asyncio.run(load.closed_loop(bodies, args.streams))
    through_http = time.perf_counter() - start
    received = sum(outcome.num_tokens or 0 for outcome in outcomes)
    assert received == num_tokens, f"{received} tokens of {num_tokens}: {outcomes[0].failure}"
    return num_tokens / own, num_tokens / through_http


@contextmanager
def own_engine(folder: Path, dtype: str) -> Iterator[Connection]:
    """Run an Engine in a process that answers (prompts, max_tokens) with seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=compute_on_request, args=(theirs, folder, dtype))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def compute_on_request(pipe: Connection, folder: Path, dtype: str) -> None:
    from bench.engines import seconds
    from gptserve.engine.config import EngineConfig
    from gptserve.engine.engine import Engine

    engine = Engine(EngineConfig(model_dir=folder, dtype=dtype))  # type: ignore[arg-type]
    while True:
        try:
            prompts, max_tokens = pipe.recv()
        except EOFError:
            return
        pipe.send(seconds(engine, prompts, max_tokens, temperature=0.0))


if __name__ == "__main__":
    main()
