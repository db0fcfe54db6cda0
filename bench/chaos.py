"""Kill the engine and the server under clients of every kind, and check that no completion is lost or changed.

    python -m bench.chaos [--minutes 2] [--clients 32] [--seed 0] [--device cuda] [--output FILE]

First each completion of a catalogue is computed alone, on an undisturbed server. Then clients stream, ask without a
stream, in the background and with idempotency keys; they reconnect, hang up, read slowly and send bad bodies. Meanwhile
the engine is killed every few seconds and, half-way, the server with all its processes (kill -9). Each completion must
equal the one computed alone; streams are compared event by event. Completions that are not kept end with the server
("cut off"); all others must be complete. Prints a table and one JSON line; exits with status 1 on any difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.machine import tell, versions
from bench.server import free_port, serve_command

LIMIT_S = 300.0  # a start on a GPU compiles kernels and compares each of them
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
PROMPTS = ("Once upon a time", "The old fox", "A long way from here, in a small house,", "One morning Mia", "")
BAD_BODIES: tuple[dict[str, Any] | str, ...] = (
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": [10**9]},
    {"prompt": "x", "max_token": 1},
    {"prompt": ["x"] * 10_000},
    {"prompt": "x" * 100_000},
    "[" * 10_000,
    "no JSON",
)
DEVICE_FLAGS = {"cpu": ("--device", "cpu"), "cuda": ("--device", "cuda", "--batch-invariant")}
"""Those with which a completion does not depend on its neighbours."""
Event = tuple[str, str]  # id and choices


@dataclass(slots=True)
class Case:
    """A completion to ask for, and what it gives when it is alone."""

    body: dict[str, Any]
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(choice["text"] for _, choices in self.events for choice in json.loads(choices))


@dataclass(slots=True)
class Tally:
    """What the clients saw. `wrong` has a sentence for each completion that was not as it should be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    repeated: int = 0
    different: int = 0
    lost: int = 0
    longest_pause_s: float = 0.0
    longest_pause_of_restart_s: float = 0.0

    def compare(self, kind: str, found: object, expected: object) -> None:
        self.counts[kind] += 1
        self.compared += 1
        if found != expected:
            self.different += 1
            self.wrong.append(f"{kind}: {str(found)[-200:]} instead of {str(expected)[-200:]}")


class Server:
    """`gptserve serve` on one port and one state directory, in a process group of its own, as often as need be."""

    def __init__(self, folder: Path, device: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._flags = DEVICE_FLAGS[device]
        self.starts = 0
        self.is_down = asyncio.Event()

    async def start(self) -> None:
        command = serve_command(self.port, *self._flags, "--state-dir", self._folder / "state")
        with (self._folder / "log").open("a") as log:
            self.process = psutil.Popen(command, stderr=log, start_new_session=True)
        self.starts += 1
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.url) as client, asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return
                assert self.process.poll() is None, f"the server ended: {(self._folder / 'log').read_text()[-2000:]}"
                await asyncio.sleep(0.02)

    def kill_engine(self, number: signal.Signals) -> None:
        engines = [p for p in self.process.children() if "spawn_main" in " ".join(p.cmdline())]
        engines[0].send_signal(number)

    def kill_all(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        status: int = self.process.wait(LIMIT_S)
        return status

    async def resources(self) -> dict[str, float]:
        """Return what an idle server holds, once its pool of threads is as large as it gets."""
        async with httpx.AsyncClient(base_url=self.url, timeout=LIMIT_S) as client:
            long = {"prompt": "Once upon a time " * 150, "max_tokens": 1}  # encoded in a thread
            await asyncio.gather(*(client.post("/v1/completions", json=long) for _ in range(64)))
            while True:
                lines = (await client.get("/metrics")).text.splitlines()
                values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
                if not values["gptserve_num_requests_running"] + values["gptserve_num_requests_waiting"]:
                    break
                await asyncio.sleep(0.1)
        # The connection of these requests closes after the client does.
        await asyncio.sleep(1.0)
        held = {"kv cache": values["gptserve_kv_cache_usage_perc"], "descriptors": self.process.num_fds()}
        return {**held, "threads": self.process.num_threads(), "processes": len(self.process.children(recursive=True))}


class Clients:
    """The kinds of clients; each method is one visit."""

    def __init__(self, server: Server, catalogue: list[Case], tally: Tally, rng: random.Random) -> None:
        self._server, self._catalogue, self._tally, self._rng = server, catalogue, tally, rng
        self._http = httpx.AsyncClient(
            base_url=server.url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    def kinds(self) -> list[Callable[[Case], Awaitable[None]]]:
        return [
            self.stream,
            self.plain,
            self.background,
            self.background_events,
            self.keyed,
            self.slow_reader,
            self.hang_up,
            self.bad_body,
        ]

    async def visit_until(self, deadline: float, number: int) -> None:
        """Be one client after the other, beginning with another kind for each number."""
        kinds = self.kinds()
        while time.monotonic() < deadline:
            kind = kinds[number % len(kinds)]
            number += 1
            starts = self._server.starts
            try:
                await kind(self._rng.choice(self._catalogue))
            except httpx.TransportError as error:
                if not self._server.is_down.is_set() and self._server.starts == starts:
                    self._tally.lost += 1
                    self._tally.wrong.append(f"{kind.__name__}: {error!r}")
                else:
                    self._tally.counts["cut off with the server"] += 1
                    await self._server.wait_until_ready()

    async def close(self) -> None:
        await self._http.aclose()

    async def stream(self, case: Case, pause_s: float = 0.0, kind: str = "streams") -> None:
        async with self._ask({**case.body, "stream": True}) as response:
            events = [event async for event in self._events(response, pause_s)]
        self._compare_events(kind, events, case)

    async def slow_reader(self, case: Case) -> None:
        await self.stream(case, 0.05, "slow readers")

    async def plain(self, case: Case) -> None:
        async with self._ask(case.body) as response:
            answer = json.loads(await response.aread())
        self._tally.compare("plain", text_of(answer), case.text)

    async def hang_up(self, case: Case) -> None:
        async with self._ask({**case.body, "stream": True}) as response:
            num_events = self._rng.randrange(10)
            async for _ in self._events(response):
                num_events -= 1
                if num_events <= 0:
                    break
        self._tally.counts["hang-ups"] += 1

    async def bad_body(self, _case: Case) -> None:
        body = self._rng.choice(BAD_BODIES)
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"content-type": "application/json"}
        response = await self._http.post("/v1/completions", content=content, headers=headers)
        if response.status_code == 503:
            return
        self._tally.counts["bad bodies"] += 1
        if response.status_code != 400:
            self._tally.wrong.append(f"a bad body got status {response.status_code}")

    async def background(self, case: Case) -> None:
        """Ask in the background and look now and then, whatever happens to the server meanwhile."""
        async with self._ask({**case.body, "background": True}) as response:
            completion_id = json.loads(await response.aread())["id"]
        while True:
            answer = await self._persist(lambda: self._http.get(f"/v1/completions/{completion_id}"))
            if answer.get("status") not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.2)
        if answer.get("status") != "completed":
            self._tally.lost += 1
            self._tally.wrong.append(f"background: {answer}")
            return
        self._tally.compare("background", text_of(answer), case.text)

    async def background_events(self, case: Case) -> None:
        """Follow the events of a background completion, hanging up and coming back."""
        async with self._ask({**case.body, "background": True}) as response:
            path = f"/v1/completions/{json.loads(await response.aread())['id']}/events"
        events: list[Event] = []
        while not events or events[-1][1] != "[DONE]":
            headers = {"Last-Event-ID": events[-1][0]} if events else {}
            num_events = self._rng.randrange(1, 80)
            try:
                async with self._http.stream("GET", path, headers=headers) as response:
                    if response.status_code == 404:
                        self._tally.lost += 1
                        self._tally.wrong.append(f"events: {path} is not found")
                        return
                    if response.status_code == 204:  # it had all events but this one
                        events.append((events[-1][0], "[DONE]"))
                        break
                    async for event in self._events(response):
                        events.append(event)
                        num_events -= 1
                        if num_events == 0:
                            break
            except (httpx.TransportError, BrokenOffError):
                await self._server.wait_until_ready()
        self._compare_events("events, resumed", events, case)

    async def keyed(self, case: Case) -> None:
        """Ask with a key, hang up after a moment and ask again, until there is an answer."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        timeouts = iter((0.05, 0.3))

        async def ask() -> httpx.Response:
            limit_s = next(timeouts, LIMIT_S)
            try:
                return await self._http.post("/v1/completions", json=case.body, headers=headers, timeout=limit_s)
            except httpx.ReadTimeout:
                return await ask()

        self._tally.compare("keyed", text_of(await self._persist(ask)), case.text)

    @contextlib.asynccontextmanager
    async def _ask(self, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Post a completion, again for as long as the server is full."""
        while True:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code in (429, 503):
                    self._tally.counts["told to wait"] += 1
                else:
                    yield response
                    return
            await asyncio.sleep(0.2)

    async def _persist(self, ask: Callable[[], Awaitable[httpx.Response]]) -> dict[str, Any]:
        """Ask until there is an answer, over the server's death."""
        while True:
            try:
                response = await ask()
            except httpx.TransportError:
                await self._server.wait_until_ready()
                continue
            if response.status_code not in (429, 503):
                answer: dict[str, Any] = response.json()
                return answer
            await asyncio.sleep(0.2)

    async def _events(self, response: httpx.Response, pause_s: float = 0.0) -> AsyncIterator[Event]:
        """Read events; an error event raises BrokenOffError."""
        event_id, latest, starts = "", time.monotonic(), self._server.starts
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            if name != "data":
                continue
            now = time.monotonic()
            if not pause_s and self._server.starts == starts and not self._server.is_down.is_set():
                self._tally.longest_pause_s = max(self._tally.longest_pause_s, now - latest)
            latest = now
            if value == "[DONE]":
                yield event_id, value
                return
            data = json.loads(value)
            if "error" in data:
                raise BrokenOffError(data["error"])
            yield event_id, json.dumps(data["choices"])
            if pause_s:
                await asyncio.sleep(pause_s)
        raise BrokenOffError("the stream ended before [DONE]")

    def _compare_events(self, kind: str, events: list[Event], case: Case) -> None:
        *events, (_, end) = events
        ids = [event_id for event_id, _ in events if event_id]  # a plain stream has none
        self._tally.repeated += len(ids) - len(set(ids))
        expected = [data for _, data in case.events]
        self._tally.compare(kind, ([data for _, data in events], end), (expected, "[DONE]"))


class BrokenOffError(httpx.TransportError):
    """A stream ended with an error."""


def text_of(answer: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in answer["choices"]) if "choices" in answer else str(answer)


def make_catalogue(rng: random.Random, num_cases: int = 40) -> list[Case]:
    return [
        Case(
            {
                "prompt": rng.choice(PROMPTS) or [0],
                "max_tokens": rng.choice((20, 100, 300)),
                "temperature": rng.choice((0.0, 0.8, 1.1)),
                "seed": seed,
                "logprobs": rng.choice((None, 1)),
                "stop": rng.choice((None, "friend")),
                "ignore_eos": rng.random() < 0.5,
            }
        )
        for seed in range(num_cases)
    ]


async def kill_engines(server: Server, deadline: float, rng: random.Random) -> int:
    """Kill the engine every few seconds, and half-way the whole server, which is started again; return how often."""
    num_kills, killing_all_at = 0, (time.monotonic() + deadline) / 2
    while time.monotonic() < deadline:
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        if time.monotonic() > killing_all_at:
            killing_all_at = float("inf")
            server.is_down.set()
            server.kill_all()
            await server.start()
            server.is_down.clear()
        else:
            server.kill_engine(rng.choice(KILLS))
            num_kills += 1
            await asyncio.sleep(0.2)
        await server.wait_until_ready()
    return num_kills


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, server, tally = random.Random(args.seed), Server(folder, args.device), Tally()
    await server.start()
    try:
        catalogue = make_catalogue(rng)
        alone = Clients(server, catalogue, Tally(), rng)
        for case in catalogue:
            async with alone._ask({**case.body, "stream": True}) as response:
                case.events = [event async for event in alone._events(response)][:-1]
        await asyncio.gather(*(alone.visit_until(time.monotonic() + 5, i) for i in range(args.clients)))
        await alone.close()
        assert not alone._tally.wrong, alone._tally.wrong
        before = await server.resources()
        clients = Clients(server, catalogue, tally, rng)
        deadline = time.monotonic() + 60 * args.minutes
        num_kills, *_ = await asyncio.gather(
            kill_engines(server, deadline, rng), *(clients.visit_until(deadline, i) for i in range(args.clients))
        )
        await clients.close()
        after = await server.resources()
    finally:
        status = server.stop()
    return {"tally": tally, "before": before, "after": after, "engines killed": num_kills, "exit status": status}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=DEVICE_FLAGS, default="cpu")
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(run(args, Path(name)))
    tally: Tally = found.pop("tally")
    table = {
        **tally.counts,
        "engines killed": found["engines killed"],
        "servers killed": 1,
        "completions compared": tally.compared,
        "lost": tally.lost,
        "events repeated": tally.repeated,
        "different": tally.different,
        "longest pause of a stream, s": round(tally.longest_pause_s, 2),
        **{
            f"{what}, idle, before and after": f"{found['before'][what]:g} {value:g}"
            for what, value in found["after"].items()
        },
        "exit status": found["exit status"],
    }
    for what, value in table.items():
        print(f"{what:42} {value:>12}")
    for sentence in tally.wrong[:20]:
        print("WRONG", sentence)
    has_failed = bool(tally.wrong or found["before"] != found["after"] or found["exit status"])
    options = {"minutes": args.minutes, "clients": args.clients, "seed": args.seed, "passed": not has_failed}
    tell({"benchmark": "chaos", **options, **versions(args.device), **table}, args.output)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
