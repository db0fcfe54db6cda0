"""The pause of streams when the engine is killed, as a client sees it.

    python -m bench.recovery [--shapes storyteller gpt2] [--streams 8] [--repeats 5]

Streams run through HTTP while the engine's process is killed. The pause of a stream is the time from the kill to its
next event. Meanwhile a new engine is spawned, imports torch, loads the weights and computes the streams' tokens so far.
Prints the medians of the shortest and the longest pause of a kill as a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from bench.machine import versions
from bench.models import SHAPES, write_served_model
from bench.server import running_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["storyteller", "gpt2"], choices=["storyteller", *SHAPES])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = [{"shape": shape, **measure(shape, args.streams, args.repeats)} for shape in args.shapes]
    print(f"{'shape':>12} {'first stream, s':>16} {'last stream, s':>15}")
    for row in rows:
        print(f"{row['shape']:>12} {row['first_s']:>16.2f} {row['last_s']:>15.2f}")
    print(json.dumps({"benchmark": "recovery", **vars(args), "rows": rows, **versions()}))


def measure(shape: str, num_streams: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        model = []
        if shape != "storyteller":
            write_served_model(Path(name), shape)
            model.append(name)
        with running_server("--log-level", "error", *model, stderr=subprocess.DEVNULL) as (process, port):
            pauses = [asyncio.run(kill_once(port, process, num_streams)) for _ in range(repeats)]
    first, last = zip(*((min(found), max(found)) for found in pauses), strict=True)
    return {"first_s": statistics.median(first), "last_s": statistics.median(last)}


async def kill_once(port: int, server: psutil.Popen, num_streams: int) -> list[float]:
    """Kill the engine once every stream has sent some events; return each stream's pause."""
    readers = [await open_stream(port, seed) for seed in range(num_streams)]
    for reader, _ in readers:
        for _ in range(20):
            await next_event(reader)
    [engine] = [p for p in server.children() if "spawn_main" in " ".join(p.cmdline())]
    killed_at = time.perf_counter()
    engine.kill()
    pauses = await asyncio.gather(*(pause(reader, killed_at) for reader, _ in readers))
    for _, writer in readers:
        writer.close()
    return pauses


async def pause(reader: asyncio.StreamReader, killed_at: float) -> float:
    """Read on past what was on its way when the engine was killed; return how long nothing came then."""
    latest = killed_at
    while True:
        await next_event(reader)
        now = time.perf_counter()
        if now - latest > 0.3:  # a step takes less, a restart more
            return now - killed_at
        latest = now


async def open_stream(port: int, seed: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True, "seed": seed}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}"
    writer.write(head.encode() + b"\r\n\r\n" + data)
    return reader, writer


async def next_event(reader: asyncio.StreamReader) -> None:
    while not (line := await reader.readline()).startswith(b"data: {"):
        assert line, "the stream broke off"


if __name__ == "__main__":
    main()
