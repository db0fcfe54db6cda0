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

import torch

from bench.machine import versions
from bench.models import SHAPES, write_model, write_tokenizer
from bench.server import running_server

Prompts = list[list[int]]


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.shape)
        write_tokenizer(folder)
        arguments = [folder, "--dtype", args.dtype, *["--in-process"] * args.in_process]
        with own_engine(folder, args.dtype) as engine, running_server(*arguments) as (_, port):
            rates = [measure(engine, port, repeat, args) for repeat in range(args.repeats + 1)][1:]
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


def measure(engine: Connection, port: int, repeat: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second of the engine alone and through HTTP, for new random prompts."""
    generator = torch.Generator().manual_seed(repeat)
    prompts = torch.randint(50000, (args.streams, args.prompt_len), generator=generator).tolist()
    num_tokens = args.streams * args.max_tokens
    engine.send((prompts, args.max_tokens))
    own = engine.recv()
    start = time.perf_counter()
    received = asyncio.run(stream_all(port, prompts, args.max_tokens))
    through_http = time.perf_counter() - start
    assert received == num_tokens, f"{received} token events of {num_tokens}"
    return num_tokens / own, num_tokens / through_http


async def stream_all(port: int, prompts: Prompts, max_tokens: int) -> int:
    return sum(await asyncio.gather(*(stream(port, prompt, max_tokens) for prompt in prompts)))


async def stream(port: int, prompt: list[int], max_tokens: int) -> int:
    """Read one completion to its end and return how many tokens its last event says were made."""
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **options}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\n" + body)
    tail = b""
    while b"data: [DONE]" not in tail:
        data = await reader.read(65536)
        assert data, f"the stream broke off: {tail!r}"
        tail = (tail + data)[-2000:]
    writer.close()
    return int(tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0])


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
