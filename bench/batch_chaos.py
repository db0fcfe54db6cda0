"""Kill the engine and the server under batches, fill their disk, and check that each line is answered once and right.

    python -m bench.batch_chaos [--lines 10000] [--engine-kills 20] [--server-kills 3] [--seed 0] [--output FILE]

Half of the lines are texts, half are chats: sampled, greedy, with logprobs, n = 2, a JSON Schema or a refusal. One
server computes them undisturbed. Another, with a state directory of its own, has its engine killed (kill -9) at even
distances and itself with all its processes, too. Its disk is full once while it computes, and once while it writes the
output: a small tmpfs where this process may mount one, else a limit of the size of files (RLIMIT_FSIZE). Each line must
be there once, with the answer of the undisturbed server. Prints a table and one JSON line; exits with status 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from bench.chaos import LIMIT_S, Server
from bench.machine import tell, versions

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
TEXT_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time", "max_tokens": 12},
    {"prompt": "The cat", "max_tokens": 8, "n": 2, "logprobs": 1},
    {"prompt": "x", "max_tokens": 24, "structured_outputs": {"json": SCHEMA}},
    {"prompt": "One morning Mia", "max_tokens": 16, "temperature": 0},
    {"prompt": "x", "stream": True},
)
CHAT_BODIES: tuple[dict[str, Any], ...] = (
    {"max_tokens": 12},
    {"max_tokens": 8, "n": 2, "logprobs": True},
    {"max_tokens": 24, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
)
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox named Mia."}]
DISK_BYTES = 2**26
Event = Literal["engine", "server", "disk"]
Results = dict[str, list[dict[str, Any]]]  # by custom_id


@dataclass(frozen=True, slots=True)
class Found:
    """What became of the lines. `wrong` has a sentence for each that was not as it should be."""

    events: Counter[str]
    wrong: list[str]
    undisturbed_s: float
    disturbed_s: float
    disk: str


class Disk:
    """What holds a state directory: a tmpfs that a ballast fills, or else files that a limit lets grow no more."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._ballast = folder, folder / "ballast"
        mounting = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder)
        self.is_mounted = subprocess.run(mounting, capture_output=True, check=False).returncode == 0

    def result_bytes(self) -> int:
        """Return how much the results so far take."""
        return sum(path.stat().st_size for path in self._folder.glob("batches/*.results"))

    def fill(self, server: Server, room_bytes: int = 0) -> None:
        """Leave no room, or so much where there is a tmpfs."""
        if not self.is_mounted:
            sizes = [path.stat().st_size for path in self._folder.glob("batches/*.results")]
            server.process.rlimit(resource.RLIMIT_FSIZE, (max([1, *sizes]), resource.RLIM_INFINITY))
            return
        with self._ballast.open("wb") as ballast:
            page_bytes = os.statvfs(self._folder).f_frsize
            while (left_bytes := os.statvfs(self._folder).f_bavail * page_bytes - room_bytes) > 0:
                with contextlib.suppress(OSError):  # a result took what was left
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, left_bytes)

    def empty(self, server: Server) -> None:
        """Let everything be written again."""
        self._ballast.unlink(missing_ok=True)
        if not self.is_mounted and server.process.is_running():
            server.process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(("umount", self._folder), check=True)


class Batches:
    """The two batches of one server, over its deaths."""

    def __init__(self, server: Server, num_lines: int) -> None:
        self._server, self.num_lines = server, num_lines
        self._http = httpx.AsyncClient(base_url=server.url, timeout=100.0)
        self._ids: list[str] = []
        self.now: list[dict[str, Any]] = []

    async def begin(self) -> None:
        for url, bodies in ((TEXTS, TEXT_BODIES), (CHATS, CHAT_BODIES)):
            chosen = range(url == CHATS, self.num_lines, 2)
            lines = [line(i, url, bodies[i // 2 % len(bodies)]) for i in chosen]
            data = "".join(f"{json.dumps(one)}\n" for one in lines)
            sent = await self._http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
            body = {"input_file_id": sent.json()["id"], "endpoint": url, "completion_window": "24h"}
            self._ids.append((await self._http.post("/v1/batches", json=body)).raise_for_status().json()["id"])

    async def wait(self, num_done: int | None = None) -> int:
        """Return how many lines are done, once they are so many or both batches have ended."""
        while True:
            self.now = [(await self._http.get(f"/v1/batches/{name}")).json() for name in self._ids]
            counts = [batch["request_counts"] for batch in self.now]
            done: int = sum(count["completed"] + count["failed"] for count in counts)
            if all(batch["status"] in ("completed", "failed") for batch in self.now):
                return done
            if num_done is not None and done >= num_done:
                return done
            await asyncio.sleep(0.05)

    def done_and_left(self) -> tuple[int, int]:
        """Return how many lines of batches that have not ended are done, and how many are left."""
        counts = [batch["request_counts"] for batch in self.now if batch["status"] != "completed"]
        done = sum(count["completed"] + count["failed"] for count in counts)
        return done, sum(count["total"] for count in counts) - done

    async def results(self) -> Results:
        """Return all results, without what differs from one batch to another or says when they were computed."""
        found: Results = {}
        for batch in self.now:
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is None:
                    continue
                async with self._http.stream("GET", f"/v1/files/{batch[name]}/content") as response:
                    async for text in response.aiter_lines():
                        result = json.loads(text)
                        body = result["response"]["body"]
                        del result["id"], result["response"]["request_id"]
                        for its in ("id", "created"):
                            body.pop(its, None)
                        body.get("usage", {}).pop("prompt_tokens_details", None)  # what the cache had
                        found.setdefault(result["custom_id"], []).append(result)
        return found

    async def close(self) -> None:
        await self._http.aclose()


class Disturbance:
    """Kills and fills at even distances of lines that are done; then a full disk and a kill while output is written."""

    def __init__(self, server: Server, disk: Disk, batches: Batches, log: Path) -> None:
        self._server, self._disk, self._batches, self._log = server, disk, batches, log
        self.counts = Counter[str]()

    async def run(self, events: list[Event]) -> None:
        num_lines, num_parts, done = self._batches.num_lines, len(events) + 2, 0
        last = (num_parts - 1) * num_lines // num_parts
        for i, event in enumerate(events):
            # Where a busy machine is late, the next kill still waits: who is there in each of several is to blame.
            least = done + num_lines // (2 * num_parts)
            done = await self._batches.wait(min(last, max((i + 1) * num_lines // num_parts, least)))
            self.counts[event] += 1
            if event == "engine":
                await self._kill_engine()
            elif event == "server":
                self._server.kill_all()
                await self._server.start()
            else:
                with self._no_room():
                    await self._warning()
        await self._batches.wait(0)  # no later: the rest of a small batch takes less than a second
        done, left = self._batches.done_and_left()
        assert left, "the lines were done before the disk was full: give more"
        room_bytes = 2 * self._disk.result_bytes() * left // done  # too little for the output
        with self._no_room(room_bytes):
            await self._warning()
            await self._batches.wait(0)
            assert not self._disk.is_mounted or "finalizing" in {batch["status"] for batch in self._batches.now}
            self._server.kill_all()
        self.counts.update(("disk", "server"))
        await self._server.start()

    async def _kill_engine(self) -> None:
        """Kill it, once it is there: /ready may not have noticed that the one before is dead."""
        while True:
            await self._server.wait_until_ready()
            try:
                self._server.kill_engine(signal.SIGKILL)
            except IndexError:
                await asyncio.sleep(0.1)
                continue
            return

    @contextlib.contextmanager
    def _no_room(self, room_bytes: int = 0) -> Iterator[None]:
        self._begin = self._log.stat().st_size
        self._disk.fill(self._server, room_bytes)
        try:
            yield
        finally:
            self._disk.empty(self._server)

    async def _warning(self) -> None:
        """Return once a batch says that it waits for room."""
        deadline = time.monotonic() + LIMIT_S
        while " goes on in " not in self._log.read_text()[self._begin :]:
            assert time.monotonic() < deadline, "no batch waits for room"
            await asyncio.sleep(0.1)


def line(i: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = {"seed": i, "temperature": 0.8, **body, **({"messages": MESSAGES} if url == CHATS else {})}
    return {"custom_id": f"line {i}", "method": "POST", "url": url, "body": asked}


def compare(num_lines: int, found: Results, expected: Results) -> list[str]:
    """Return a sentence for each line that is not there once with the answer expected."""
    wrong = []
    for name in (f"line {i}" for i in range(num_lines)):
        once, answers = expected[name], found.pop(name, [])
        if len(once) != 1 or answers != once:
            wrong.append(f"{name}: {str(answers)[-300:]} instead of {str(once)[-300:]}")
    return [*wrong, *(f"{name}: nobody asked for it" for name in found)]


async def run(folder: Path, num_lines: int, num_engines: int, num_servers: int, seed: int) -> Found:
    """Compute so many lines undisturbed, and through so many kills, the last one of a server that writes its output."""
    seconds: list[float] = []
    results: list[Results] = []
    events: list[Event] = ["disk", *["engine"] * num_engines, *["server"] * (num_servers - 1)]  # type: ignore[list-item]
    random.Random(seed).shuffle(events)
    disturbed = folder / "disturbed"
    disturbed.mkdir()
    disk = Disk(disturbed / "state")
    try:
        for place in (folder, disturbed):
            server, counts = Server(place, "cpu"), Counter[str]()
            await server.start()
            try:
                batches, began = Batches(server, num_lines), time.monotonic()
                await batches.begin()
                if place is disturbed:
                    disturbance = Disturbance(server, disk, batches, place / "log")
                    await disturbance.run(events)
                    counts = disturbance.counts
                await batches.wait()
                seconds.append(time.monotonic() - began)
                results.append(await batches.results())
                await batches.close()
            finally:
                server.kill_all()
    finally:
        disk.close()
    wrong = compare(num_lines, results[1], results[0])
    undisturbed_s, disturbed_s = seconds
    return Found(counts, wrong, undisturbed_s, disturbed_s, "tmpfs" if disk.is_mounted else "RLIMIT_FSIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--engine-kills", type=int, default=20)
    parser.add_argument("--server-kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(run(Path(name), args.lines, args.engine_kills, args.server_kills, args.seed))
    table = {
        "lines": args.lines,
        "engines killed": found.events["engine"],
        "servers killed": found.events["server"],
        "times that the disk was full": found.events["disk"],
        "disk": found.disk,
        "lines not once as undisturbed": len(found.wrong),
        "undisturbed, s": round(found.undisturbed_s, 1),
        "disturbed, s": round(found.disturbed_s, 1),
    }
    for what, value in table.items():
        print(f"{what:32} {value:>14}")
    for sentence in found.wrong[:20]:
        print("WRONG", sentence)
    tell({"benchmark": "batch_chaos", "seed": args.seed, **versions("cpu"), **table}, args.output)
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
