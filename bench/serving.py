"""Throughput through HTTP compared with the engine's own, in one run on one machine.

    python -m bench.serving [--streams 32] [--prompt-len 128] [--max-tokens 128] [--shape gpt2] [--repeats 3]
    python -m bench.serving --beside 512 --streams 31 --max-tokens 512

A server process streams to a client that counts events. An Engine in its own process computes the same prompts. The two
take turns, and the medians are compared. Prints a table and one JSON line.

`--beside 512` instead measures the times between the tokens of the streams, once all of them decode: alone, and beside
one more client that sends one prompt of 512 tokens after the other and asks for few tokens. The two take turns, and the
medians of the turns' percentiles are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.load import Load, percentiles
from bench.machine import tell, versions
from bench.models import SHAPES, served_model
from bench.server import running_server
from bench.workload import Body, Workload
from gptserve.weights.source import EMBEDDED_MODEL, resolve_model

TOKENS_BESIDE = 4
"""How many tokens the client beside the streams asks for."""


def main() -> None:
    args = parse_arguments()
    is_embedded = args.shape == EMBEDDED_MODEL
    with nullcontext(resolve_model(None)) if is_embedded else served_model(args.shape, args.models) as folder:
        cache = [] if args.kv_cache_bytes is None else ["--kv-cache-bytes", str(args.kv_cache_bytes)]
        arguments = [folder, "--dtype", args.dtype, *cache, *["--in-process"] * args.in_process]
        with running_server(*arguments) as (_, port):
            load = Load(f"http://127.0.0.1:{port}", {}, folder.name)
            found = measure_gaps(load, args) if args.beside else measure_rates(load, folder, args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {name: value for name, value in vars(args).items() if name not in ("models", "output")}
    tell({"benchmark": "serving", **options, **found, **versions(device)}, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shape", choices=[*SHAPES, EMBEDDED_MODEL], default="gpt2")
    parser.add_argument("--beside", type=int, metavar="TOKENS", help="measure times between tokens beside such prompts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-process", action="store_true", help="run the server's engine in a thread")
    parser.add_argument("--kv-cache-bytes", type=int, help="of each engine: two must fit on one GPU")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models written")
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    return parser.parse_args()


def measure_rates(load: Load, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    with own_engine(folder, args.dtype, args.kv_cache_bytes) as engine:
        rates = [measure(engine, load, args) for _ in range(1 + args.repeats)][1:]  # the first warms up
    own, http = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(b / a for a, b in rates)
    print(f"{'streams':>7} {'engine tok/s':>13} {'HTTP tok/s':>11} {'ratio':>6}")
    print(f"{args.streams:>7} {own:>13.1f} {http:>11.1f} {ratio:>6.2f}")
    return {"engine": own, "http": http, "ratio": ratio}


def measure_gaps(load: Load, args: argparse.Namespace) -> dict[str, Any]:
    turns = [
        {name: asyncio.run(gaps(load, args, prompts_arrive=name == "beside")) for name in ("alone", "beside")}
        for _ in range(1 + args.repeats)
    ][1:]  # the first warms up
    medians = {
        name: {key: statistics.median(turn[name][key] for turn in turns) for key in row}
        for name, row in turns[0].items()
    }
    print(f"{args.streams:>3} streams" + "".join(f"{key:>10}" for key in medians["alone"]))
    for name, row in medians.items():
        print(f"{name:>11}" + "".join(f"{value:>10.2f}" for value in row.values()))
    return medians


async def gaps(load: Load, args: argparse.Namespace, *, prompts_arrive: bool) -> dict[str, float]:
    """Return percentiles of the times between tokens, from when all streams have begun until one ends."""
    bodies = Workload(prompt_tokens=args.prompt_len, max_tokens=args.max_tokens).bodies(args.streams)
    prompts = Workload(prompt_tokens=args.beside, max_tokens=TOKENS_BESIDE)
    streams = asyncio.create_task(load.closed_loop(bodies, args.streams))
    others = await load.closed_loop(until(streams, prompts) if prompts_arrive else (), 1)
    outcomes = await streams
    failures = {outcome.failure for outcome in [*outcomes, *others]} - {None}
    assert not failures, failures
    begun, ended = max(o.arrivals[0] for o in outcomes), min(o.arrivals[-1] for o in outcomes)
    assert begun < ended, "the first stream has ended before the last one began: raise --max-tokens"
    found = percentiles(b - a for o in outcomes for a, b in pairwise(o.arrivals) if begun <= a and b <= ended)
    ratio = found["p99"] / found["p50"] if found["p50"] else math.inf  # 0 where most events came with the one before
    return {"p50 ms": found["p50"], "p99 ms": found["p99"], "p99/p50": ratio, "prompts": len(others)}


def until(end: asyncio.Future[Any], workload: Workload) -> Iterator[Body]:
    while not end.done():
        yield from workload.bodies(1)


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
def own_engine(folder: Path, dtype: str, kv_cache_bytes: int | None) -> Iterator[Connection]:
    """Run an Engine in a process that answers (prompts, max_tokens) with seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=compute_on_request, args=(theirs, folder, dtype, kv_cache_bytes))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def compute_on_request(pipe: Connection, folder: Path, dtype: str, kv_cache_bytes: int | None) -> None:
    from bench.engines import seconds
    from gptserve.engine.config import EngineConfig
    from gptserve.engine.engine import Engine

    config = EngineConfig(model_dir=folder, dtype=dtype, kv_cache_bytes=kv_cache_bytes)  # type: ignore[arg-type]
    engine = Engine(config)
    while True:
        try:
            prompts, max_tokens = pipe.recv()
        except EOFError:
            return
        pipe.send(seconds(engine, prompts, max_tokens, temperature=0.0))


if __name__ == "__main__":
    main()
