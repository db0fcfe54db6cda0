"""What stored completions cost in a database, against SQLite: time, and CPU time of each process.

    python -m bench.stored --state-url URL [--streams 1 8] [--tokens 400] [--turns 5] [--state-sync full] [--plain]

One server has a folder and one the database, a PostgreSQL on this machine that nobody else uses. They take turns: all
streams begin in the background at once, and a turn lasts until the last has ended; with --plain none of them is stored.
Prints medians over the turns, against SQLite's the tokens a second and a second of CPU time, and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from typing import Any

import httpx
import psutil
import psycopg

from bench.machine import versions
from bench.server import running_server

POLL_S = 0.01  # between two looks at the last stream: a hundredth of a turn
COLUMNS = ("turn_ms", "server_ms", "engine_ms", "database_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-url", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--state-sync", nargs="+", default=["normal", "full"], choices=["normal", "full"])
    args = parser.parse_args()
    rows = [row for sync in args.state_sync for row in measure(args, sync)]
    print(" ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>12}" for value in row.values()))
    print(json.dumps({"benchmark": "stored", **vars(args), "state_url": None, "rows": rows, **versions()}))


def measure(args: argparse.Namespace, sync: str) -> list[dict[str, Any]]:
    """Return a row for each store and number of streams."""
    rows = []
    common = ("--log-level", "error", "--state-sync", sync)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(*common, "--state-dir", folder, stderr=subprocess.DEVNULL) as sqlite,
        running_server(*common, "--state-url", args.state_url, stderr=subprocess.DEVNULL) as postgres,
    ):
        database = find_database(args.state_url)
        servers = {
            name: (port, [process, engine_of(process), database])
            for name, (process, port) in (("sqlite", sqlite), ("postgres", postgres))
        }
        for num_streams in args.streams:
            turns: dict[str, list[list[float]]] = {name: [] for name in servers}
            for number in range(args.turns + 1):
                for name, (port, processes) in servers.items():
                    found = asyncio.run(take_turn(port, processes, num_streams, args.tokens, is_stored=not args.plain))
                    if number:  # the first turn warms up
                        turns[name].append(found)
            medians = {
                name: [statistics.median(column) for column in zip(*of, strict=True)] for name, of in turns.items()
            }
            for name, of in medians.items():
                figures = {column: round(value) for column, value in zip(COLUMNS, of, strict=True)}
                throughput = round(medians["sqlite"][0] / of[0], 2)
                cpu = round(sum(medians["sqlite"][1:]) / sum(of[1:]), 2)
                ratios = {"throughput": throughput, "cpu": cpu}
                rows.append({"store": name, "sync": sync, "streams": num_streams, **figures, **ratios})
    return rows


async def take_turn(
    port: int, processes: list[psutil.Process], num_streams: int, num_tokens: int, *, is_stored: bool
) -> list[float]:
    """Run the streams; return the milliseconds that it takes, and those of CPU of each process."""
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "background": is_stored}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        before, started_at = list(map(cpu_ms, processes)), time.perf_counter()
        bodies = [body | {"seed": seed} for seed in range(num_streams)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        ids = [answer.raise_for_status().json()["id"] for answer in answers]
        for completion_id in ids if is_stored else ():
            while (await client.get(f"/v1/completions/{completion_id}")).json()["status"] != "completed":  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        seconds, after = time.perf_counter() - started_at, map(cpu_ms, processes)
    return [1e3 * seconds, *(later - earlier for earlier, later in zip(before, after, strict=True))]


def engine_of(server: psutil.Popen) -> psutil.Process:
    """Return the engine's process of a server."""
    [engine] = [p for p in server.children() if "spawn_main" in " ".join(p.cmdline())]
    return engine


def find_database(url: str) -> psutil.Process:
    """Return the process of a PostgreSQL on this machine that starts all others."""
    with psycopg.connect(url) as connection:
        return psutil.Process(connection.info.backend_pid).parent()


def cpu_ms(process: psutil.Process) -> float:
    """Return the CPU time of a process, and for a database of all that it started, too."""
    if process.name() != "postgres":
        return 1e3 * sum(process.cpu_times()[:2])
    total = sum(process.cpu_times()[:4])  # with those that have ended
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return 1e3 * total


if __name__ == "__main__":
    main()
