"""Times between the tokens of streams beside a running batch, and without one, in turns on one server.

    python -m bench.batch FOLDER [--streams 4] [--max-tokens 128] [--line-tokens 128] [--repeats 5] [flags of serve]

The batch has more lines than a turn computes, and is cancelled after it. Prints a table of the medians of the turns'
percentiles with the ratio of the p99, how many tokens of the batch were generated a second meanwhile and without
streams, and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.load import Load, percentiles
from bench.machine import tell, versions
from bench.server import running_server
from bench.workload import Workload

NUM_LINES = 20_000
NUM_TOKENS = 4_000  # of a batch alone
URL = "/v1/completions"
Row = dict[str, float]


def main() -> None:
    args, flags = parse_arguments()
    with running_server(args.folder, *flags) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        load, lines = Load(str(client.base_url), {}, args.folder.name), upload(client, args)
        turns = [one_turn(client, load, lines, args) for _ in range(1 + args.repeats)][1:]  # the first warms up
        full_rate = fill(client, lines)
    found: dict[str, Row] = {
        name: {key: statistics.median(turn[name][key] for turn in turns) for key in row}
        for name, row in turns[0].items()
    }
    ratio = statistics.median(turn["beside"]["p99"] / turn["alone"]["p99"] for turn in turns)
    print(f"{args.streams:>3} streams" + "".join(f"{key:>14}" for key in found["beside"]))
    for name, row in found.items():
        print(f"{name:>11}" + "".join(f"{value:>14.2f}" for value in row.values()))
    print(f"p99 beside / alone: {ratio:.2f}; the batch without streams: {full_rate:.1f} tokens/s")
    options = {name: value for name, value in vars(args).items() if name not in ("folder", "output")}
    figures = {"model": args.folder.name, **found, "ratio": ratio, "batch_tokens_per_s": full_rate}
    tell({"benchmark": "batch", **options, **figures, **versions("cpu")}, args.output)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--line-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    return parser.parse_known_args()


def upload(client: httpx.Client, args: argparse.Namespace) -> str:
    """Upload the lines of all batches; return the id of the file."""
    bodies = Workload(prompt_tokens=args.prompt_len, max_tokens=args.line_tokens).bodies(NUM_LINES)
    lines = ({"custom_id": str(i), "method": "POST", "url": URL, "body": body} for i, body in enumerate(bodies))
    data = "".join(f"{json.dumps(line)}\n" for line in lines)
    response = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    return str(response.raise_for_status().json()["id"])


def one_turn(client: httpx.Client, load: Load, lines: str, args: argparse.Namespace) -> dict[str, Row]:
    """Measure the streams without a batch, then beside one."""
    alone = asyncio.run(gaps(load, args))
    batch_id, began, before = begin(client, lines), time.perf_counter(), num_generated(client)
    beside = asyncio.run(gaps(load, args))
    num_tokens = num_generated(client) - before - args.streams * args.max_tokens
    rate = num_tokens / (time.perf_counter() - began)
    cancel(client, batch_id)
    return {"alone": {**alone, "batch tok/s": 0.0}, "beside": {**beside, "batch tok/s": rate}}


def fill(client: httpx.Client, lines: str) -> float:
    """Return how many tokens a second of a batch are generated when nothing else is."""
    batch_id, began, before = begin(client, lines), time.perf_counter(), num_generated(client)
    while num_generated(client) - before < NUM_TOKENS:
        time.sleep(0.1)
    rate = (num_generated(client) - before) / (time.perf_counter() - began)
    cancel(client, batch_id)
    return rate


def begin(client: httpx.Client, lines: str) -> str:
    """Begin a batch; return its id once its lines are computed."""
    body = {"input_file_id": lines, "endpoint": URL, "completion_window": "24h"}
    batch: dict[str, Any] = client.post("/v1/batches", json=body).raise_for_status().json()
    while batch["status"] == "validating":
        time.sleep(0.05)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    assert batch["status"] == "in_progress", batch
    return str(batch["id"])


def cancel(client: httpx.Client, batch_id: str) -> None:
    status = client.post(f"/v1/batches/{batch_id}/cancel").json()["status"]
    while status != "cancelled":
        time.sleep(0.05)
        status = client.get(f"/v1/batches/{batch_id}").json()["status"]


def num_generated(client: httpx.Client) -> int:
    """Return how many tokens the server has generated."""
    lines = client.get("/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("gptserve_generation_tokens_total")]
    return int(float(line.split()[-1]))


async def gaps(load: Load, args: argparse.Namespace) -> Row:
    """Return percentiles of the times between tokens while all streams decode."""
    bodies = Workload(prompt_tokens=args.prompt_len, max_tokens=args.max_tokens).bodies(args.streams)
    outcomes = await load.closed_loop(bodies, args.streams)
    failures = {outcome.failure for outcome in outcomes} - {None}
    assert not failures, failures
    begun, ended = max(o.arrivals[0] for o in outcomes), min(o.arrivals[-1] for o in outcomes)
    assert begun < ended, "the first stream has ended before the last one began: raise --max-tokens"
    return percentiles(b - a for o in outcomes for a, b in pairwise(o.arrivals) if begun <= a and b <= ended)


if __name__ == "__main__":
    main()
