"""How long a server takes from the command to its first token.

    python -m bench.startup [--shapes storyteller gpt2] [--repeats 5]

A run starts `gptserve serve`, connects as soon as it listens, and asks for one token until it gets it: while the model
loads the request waits, and after a time the answer is 503. The first run of a shape brings the files into the page
cache and is not counted. Prints the medians as a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
import urllib.request
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

import psutil

from bench.machine import versions
from bench.models import SHAPES, write_served_model
from bench.server import START_LIMIT_S, free_port, serve_command
from gptserve.weights.source import EMBEDDED_MODEL

PAUSE_S = 0.03  # between attempts, which take CPU time from the server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", default=[EMBEDDED_MODEL, "gpt2"], choices=[EMBEDDED_MODEL, *SHAPES], metavar="SHAPE"
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = []
    print(f"{'shape':>12} {'connected, s':>13} {'first token, s':>15}")
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as name:
            if shape != EMBEDDED_MODEL:
                write_served_model(Path(name), shape)
            runs = [start_once(shape if shape == EMBEDDED_MODEL else name) for _ in range(1 + args.repeats)][1:]
        connected_s, first_token_s = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append({"shape": shape, "connected_s": connected_s, "first_token_s": first_token_s})
        print(f"{shape:>12} {connected_s:>13.2f} {first_token_s:>15.2f}", flush=True)
    print(json.dumps({"benchmark": "startup", **vars(args), "rows": rows, **versions()}))


def start_once(model: str) -> tuple[float, float]:
    """Return the seconds from the command until a client is connected, and until it has a token."""
    port = free_port()
    body = json.dumps({"prompt": [100], "max_tokens": 1}).encode()
    start = time.perf_counter()
    process = psutil.Popen(serve_command(port, model, "--log-level", "error"))
    try:
        connect(port, process)
        connected_s = time.perf_counter() - start
        while not is_answered(f"http://127.0.0.1:{port}/v1/completions", body):
            if time.perf_counter() - start > START_LIMIT_S:
                raise TimeoutError("the model did not load")
            time.sleep(PAUSE_S)
        return connected_s, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait()


def is_answered(url: str, body: bytes) -> bool:
    """Ask for a completion; return whether there was one, or the model is yet loading."""
    try:
        with urllib.request.urlopen(url, body) as response:
            response.read()
    except HTTPError as error:
        if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return False
    return True


def connect(port: int, process: psutil.Popen) -> None:
    """Wait until the server listens."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(PAUSE_S)
        else:
            return
    raise TimeoutError("the server did not listen")


if __name__ == "__main__":
    main()
