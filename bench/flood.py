"""Attack a server in many ways and measure what it holds and what its other clients notice.

    python -m bench.flood [--attacks trailers idle ...] [--connections 64] [--seconds 5] [--max-mb 64]

Each attack gets its own server on 127.0.0.1. It holds --connections at once, reopens those that are closed, and ends
after --seconds; each connection sends at most --max-mb. Meanwhile one well-behaved client asks for /health on new
connections and another one streams. Prints one row for each attack and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import psutil

from bench.server import running_server

LIMIT_S = 60.0
MAX_GROWTH_BYTES = 4 * 2**30  # an attack that comes so far is ended: the machine has other uses
CHUNKED = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
COMPLETION = CHUNKED % b"/v1/completions"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
SCORES = {"prompt": "Once", "max_tokens": 600, "n": 16, "ignore_eos": True, "logprobs": 5}
NOBODY_READS = 4096  # bytes of a receive buffer


@dataclass(frozen=True, slots=True)
class Attack:
    """What each connection sends once, and then again and again; without the latter it keeps still."""

    opening: bytes = b""
    repeated: bytes = b""
    times: int = 1  # so many connections for each one asked for


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return POST % len(data) + data


ATTACKS = {
    "idle": Attack(times=16),
    "trailers": Attack(COMPLETION + b"2\r\n{}\r\n0\r\n", b"a:b\r\n" * 4096),
    "one long trailer": Attack(COMPLETION + b"2\r\n{}\r\n0\r\na:", b"b" * 16384),
    "chunk extension": Attack(COMPLETION + b"2;", b"a=b;" * 4096),
    "tiny chunks": Attack(CHUNKED % b"/nowhere", b"1\r\nx\r\n" * 4096),
    "blank lines": Attack(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n" * 8192),
    "pipelined": Attack(repeated=b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1024),
    "half heads": Attack(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 12_000, times=4),
    "half bodies": Attack(POST % (2 * 2**20) + b" " * (2 * 2**20 - 1)),
    "brackets": Attack(repeated=POST % 2_000_000 + b"[" + (b"[" * 190 + b"]" * 190 + b",") * 5249 + b"0]" + b" " * 128),
    "standing readers": Attack(post(SCORES)),
    "standing streams": Attack(post({**SCORES, "stream": True})),
}


@dataclass(slots=True)
class Finding:
    """What one attack came to."""

    attack: str
    connections: int = 0
    sent_mb: float = 0.0
    rss_before_mb: float = 0.0
    rss_growth_mb: float = 0.0
    health_ms: list[float] = field(default_factory=list)
    num_health_failures: int = 0
    longest_gap_ms: float = 0.0

    def row(self) -> dict[str, Any]:
        row = asdict(self)
        health = row.pop("health_ms")
        row |= {"num_health": len(health), "health_median_ms": statistics.median(health) if health else None}
        return row | {"health_max_ms": max(health, default=None)}


def main() -> None:
    args = parse_arguments()
    rows = []
    for name in args.attacks:
        rows.append(asyncio.run(suffer(name, args)).row())
        print(
            "  ".join(f"{key}={round(v, 1) if isinstance(v, float) else v}" for key, v in rows[-1].items()), flush=True
        )
    settings = {"connections": args.connections, "seconds": args.seconds, "max_mb": args.max_mb}
    print(json.dumps({"benchmark": "flood", **settings, "attacks": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--max-mb", type=int, default=64, help="that one connection sends")
    return parser.parse_args()


async def suffer(name: str, args: argparse.Namespace) -> Finding:
    """Start a server and return what it and its clients noticed of one attack."""
    finding = Finding(name)
    with running_server("--device", "cpu", "--num-threads", "1", "--log-level", "error") as (process, port):
        url = f"http://127.0.0.1:{port}"
        finding.rss_before_mb = process.memory_info().rss / 2**20
        done = asyncio.Event()
        watchers = [ask_for_health(url, finding, done), read_stream(url, finding, done)]
        async with asyncio.TaskGroup() as group:
            for watcher in watchers:
                group.create_task(watcher)
            group.create_task(watch_memory(process, finding, done))
            try:
                await strike(name, port, args, finding)
            finally:
                done.set()
    return finding


async def strike(name: str, port: int, args: argparse.Namespace, finding: Finding) -> None:
    """Let another process attack, so that its work delays none of the clients that are measured here."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, name, port, args.connections, args.seconds, args.max_mb * 10**6)
    attacker = context.Process(target=attack, args=arguments, daemon=True)
    attacker.start()
    sender.close()
    waiting = asyncio.create_task(asyncio.to_thread(receiver.poll, LIMIT_S))
    while not waiting.done() and finding.rss_growth_mb < MAX_GROWTH_BYTES / 2**20:
        await asyncio.wait([waiting], timeout=0.1)
    if waiting.done():
        finding.connections, finding.sent_mb = receiver.recv()
    attacker.kill()
    attacker.join()
    await waiting


def attack(sender: Any, name: str, port: int, num_connections: int, seconds: float, max_bytes: int) -> None:
    """Open the connections, keep them busy until the time is over, and send how many there were and the megabytes."""

    async def run() -> tuple[int, float]:
        chosen = ATTACKS[name]
        deadline = time.monotonic() + seconds
        sent = await asyncio.gather(
            *(occupy(chosen, port, deadline, max_bytes) for _ in range(num_connections * chosen.times))
        )
        return sum(number for number, _ in sent), sum(num_bytes for _, num_bytes in sent) / 10**6

    sender.send(asyncio.run(run()))


async def occupy(chosen: Attack, port: int, deadline: float, max_bytes: int) -> tuple[int, int]:
    """Be one connection, and another as soon as it is closed; return how many that were and the bytes they sent."""
    num_connections = num_sent = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline - time.monotonic()):
            while num_sent < max_bytes:
                with contextlib.suppress(OSError):
                    async with connection(port) as send:
                        num_connections += 1
                        num_sent += await send(chosen.opening)
                        while num_sent < max_bytes and chosen.repeated:
                            num_sent += await send(chosen.repeated)
                        await asyncio.sleep(deadline - time.monotonic())
                await asyncio.sleep(0.01)
    return num_connections, num_sent


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[Callable[[bytes], Awaitable[int]]]:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NOBODY_READS)
        await loop.sock_connect(client, ("127.0.0.1", port))

        async def send(data: bytes) -> int:
            await loop.sock_sendall(client, data)
            return len(data)

        yield send


async def ask_for_health(url: str, finding: Finding, done: asyncio.Event) -> None:
    while not done.is_set():
        started_at = time.perf_counter()
        try:
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
                started_at = time.perf_counter()
                response = await client.get("/health")
            finding.num_health_failures += response.status_code != 200
        except httpx.TransportError:
            finding.num_health_failures += 1
        finding.health_ms.append((time.perf_counter() - started_at) * 1000)
        await asyncio.sleep(0.02)


async def read_stream(url: str, finding: Finding, done: asyncio.Event) -> None:
    """Stream one completion after the other; the pause before a first event does not count."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        while not done.is_set():
            with contextlib.suppress(httpx.TransportError):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for gap_ms in gaps(response):
                        finding.longest_gap_ms = max(finding.longest_gap_ms, gap_ms)
                        if done.is_set():
                            break
            await asyncio.sleep(0.02)


async def gaps(response: httpx.Response) -> AsyncIterator[float]:
    latest: float | None = None
    async for _ in response.aiter_raw():
        now = time.perf_counter()
        if latest is not None:
            yield (now - latest) * 1000
        latest = now


async def watch_memory(process: psutil.Popen, finding: Finding, done: asyncio.Event) -> None:
    while not done.is_set():
        with contextlib.suppress(psutil.Error):
            growth = process.memory_info().rss / 2**20 - finding.rss_before_mb
            finding.rss_growth_mb = max(finding.rss_growth_mb, growth)
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    main()
