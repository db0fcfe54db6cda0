"""Kill engines, nodes and servers of a Ray cluster under streams, and check that each one is whole and right.

    python -m bench.ray_chaos [--engine-kills 6] [--node-kills 2] [--server-kills 1] [--seed 0] [--scale] [--output F]

Two engines and two servers run on nodes of this machine (bench/ray_nodes.py). 64 clients stream texts, chats and
responses, again and again: greedy, sampled, with penalties, logprobs and n = 3, a grammar, a JSON Schema, tools. Each
stream must equal the undisturbed one, token by token. What dies is replaced before the next one is killed. No stream is
cut when an engine dies, or a node of engines. When a server dies, a client with a key asks again, where it left off.
With --scale there is one engine at first, which Serve makes three of and one again; nothing is killed. Prints a table
and one JSON line; exits with status 1 on any difference, or if a stream is cut by what may not cut it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.machine import tell, versions
from bench.ray_nodes import LIMIT_S, RayNodes

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}</tool_call>\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
"""One that knows tools, as the embedded model's does not."""
PROMPTS = ("Once upon a time", "The old sailor", "In a small village", "A fox and a crow")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 8, "maxItems": 9},
    },
    "required": ["name", "friends"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tale", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"temperature": 0, "max_tokens": 300}),
    "n = 3 with logprobs": ("completions", {"n": 3, "logprobs": 2, "presence_penalty": 0.4, "max_tokens": 150}),
    "penalties": ("completions", {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "max_tokens": 300}),
    "grammar": ("completions", {"structured_outputs": {"regex": "([a-z]{1,9} ){60,90}"}, "max_tokens": 300}),
    "JSON Schema": ("chat/completions", {"response_format": FORMAT, "max_tokens": 300}),
    "tools": ("chat/completions", {"tools": [TOOL], "tool_choice": "required", "max_tokens": 300}),
    "chat": ("chat/completions", {"logprobs": True, "top_p": 0.9, "max_tokens": 300}),
    "responses": ("responses", {"max_output_tokens": 300}),
}
NUM_CLIENTS = 64
ARGUMENTS = {
    "num-threads": 1,
    "num-blocks": 4096,
    "max-num-seqs": 128,
    "max-num-queued-reqs": 128,
    "tool-call-format": "hermes",
}
ON_ENGINES = {"num_cpus": 0, "resources": {"engines": 1}}  # one on each node but the first
SERVERS = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0, "resources": {"servers": 0.5}}}
TWO = {"autoscaling_config": None, "num_replicas": 2, "ray_actor_options": ON_ENGINES}
MAX_ENGINES = 3
SCALED = {
    "autoscaling_config": {
        "min_replicas": 1,
        "max_replicas": MAX_ENGINES,
        "target_ongoing_requests": 8,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "look_back_period_s": 3,
        "metrics_interval_s": 1,
    },
    "graceful_shutdown_timeout_s": 1,  # streams that last longer go on at another engine
    "ray_actor_options": {"num_cpus": 0, "resources": {"engines": 0.2}},
}
DEPLOYMENTS = {"engine": "Engine", "server": "Ingress"}
FEW = 4  # clients that go on while the others rest, for engines to be scaled down
PAUSES_S = 0.5, 3.0  # before something is killed
REMARKABLE_S = 0.05

Said = dict[str, Any]  # what a stream says, by the place that it says it of


@dataclass(slots=True)
class Case:
    """A stream to ask for, and what it says when nothing disturbs it."""

    kind: str
    path: str
    body: dict[str, Any]
    is_keyed: bool
    said: Said = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """What the clients saw. `wrong` has a sentence for each stream that was not as it should be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """When something was killed, and what."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """The beginning and the end of each pause between two events of a stream, if it was longer than REMARKABLE_S."""
    longest_s: float = 0.0

    def note(self, latest: float | None, now: float) -> float:
        """Take the times of a stream's event and the one before it."""
        if latest is not None and now - latest > REMARKABLE_S:
            self.pauses.append((latest, now))
            self.longest_s = max(self.longest_s, now - latest)
        return now

    def longest_by_event(self) -> dict[str, float]:
        """Return the longest pause, in seconds, that ended or began between one event and the next."""
        ends = [when for when, _ in self.events[1:]] + [float("inf")]
        found: dict[str, float] = defaultdict(float)
        for (begin, what), end in zip(self.events, ends, strict=True):
            pauses = [until - since for since, until in self.pauses if since < end and until > begin]
            found[what] = round(max([found[what], *pauses]), 2)
        return dict(found)


class Clients:
    """Clients that stream the cases of a catalogue. `may_cut` is set while a server may be dead."""

    def __init__(self, url: str, catalogue: list[Case], tally: Tally) -> None:
        self._catalogue, self._tally = catalogue, tally
        self.may_cut = False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=f"{url}/v1/", timeout=LIMIT_S, limits=limits)
        self._numbers = itertools.count()

    async def listen(self, case: Case) -> Said:
        """Return what a stream says. With a key it asks again if it is cut. Raises TransportError without one."""
        said: Said = {}
        headers = {"Idempotency-Key": f"{id(self)}-{next(self._numbers)}"} if case.is_keyed else {}
        latest = None
        while True:
            try:
                async with self._http.stream("POST", case.path, json=case.body, headers=headers) as response:
                    if response.status_code in (429, 503):
                        self._tally.counts["told to wait"] += 1
                        await asyncio.sleep(PAUSES_S[0])
                        continue
                    if response.status_code != 200:
                        raise httpx.RemoteProtocolError(f"{response.status_code}: {(await response.aread())!r}")
                    async for event_id, data in _events(response):
                        latest = self._tally.note(latest, time.monotonic())
                        if event_id:
                            headers["Last-Event-ID"] = event_id
                        if data.get("error"):
                            raise httpx.RemoteProtocolError(f"an error event: {data['error']}")
                        take(data, said)
                        if data.get("type") in ("response.completed", "response.incomplete"):
                            return said
                    if case.path != "responses":
                        return said
            except httpx.TransportError:
                if not (case.is_keyed and self.may_cut):
                    raise
                self._tally.counts["asked again"] += 1
                await asyncio.sleep(PAUSES_S[0])

    async def visit_while(self, case: Case, goes_on: Callable[[], bool]) -> None:
        """Stream a case again and again, once at least."""
        while True:
            try:
                said = await self.listen(case)
            except httpx.TransportError as error:
                if self.may_cut:
                    self._tally.counts["cut off with their server"] += 1
                    await asyncio.sleep(PAUSES_S[0])
                else:
                    self._tally.wrong.append(f"{case.kind} was cut: {error!r}")
            else:
                self._tally.counts[case.kind] += 1
                if said != case.said:
                    self._tally.wrong.append(f"{case.kind}: {_difference(said, case.said)}")
            if not goes_on():
                return

    async def close(self) -> None:
        await self._http.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield each event's id and data. Raises RemoteProtocolError if the last one is missing."""
    event_id = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        if name == "data":
            if value == "[DONE]":
                return
            data = json.loads(value)
            yield event_id, data
            if data.get("type") in ("response.completed", "response.incomplete"):
                return
    raise httpx.RemoteProtocolError("the stream ended before its last event")


def take(data: dict[str, Any], said: Said) -> None:
    """Add what an event says. The last tokens of a choice may come in one event or in two, with the same tokens."""

    def add(what: str, value: str | list[Any]) -> None:
        said[what] = said.get(what, type(value)()) + value

    for choice in data.get("choices", ()):
        place, delta = choice["index"], choice.get("delta") or {}
        add(f"{place} text", choice.get("text") or delta.get("content") or "")
        add(f"{place} ids", choice.get("token_ids") or [])
        for call in delta.get("tool_calls") or ():
            add(f"{place} call {call['index']}", (call["function"].get("name") or "") + call["function"]["arguments"])
        logprobs = choice.get("logprobs") or {}
        add(
            f"{place} logprobs",
            logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or ()],
        )
        if choice.get("finish_reason"):
            said[f"{place} end"] = choice["finish_reason"]
    if "delta" in data:
        add(f"{data['output_index']} {data['type']}", data["delta"])
    if data.get("type") in ("response.completed", "response.incomplete"):
        said["usage"] = {name: data["response"]["usage"][name] for name in ("input_tokens", "output_tokens")}


def _difference(found: Said, wanted: Said) -> str:
    places = sorted(place for place in found.keys() | wanted.keys() if found.get(place) != wanted.get(place))
    return f"{places[0]} is {str(found.get(places[0]))[-100:]!r} instead of {str(wanted.get(places[0]))[-100:]!r}"


def make_catalogue(num_clients: int = NUM_CLIENTS) -> list[Case]:
    """Return a case for each client; every other one of a kind is keyed."""
    cases = []
    for number, (kind, (path, options)) in zip(range(num_clients), itertools.cycle(KINDS.items()), strict=False):
        prompt = f"{PROMPTS[number // len(KINDS) % len(PROMPTS)]}, {number}"
        asked: dict[str, Any] = {"prompt": prompt, "return_token_ids": True}
        if path == "chat/completions":
            asked = {"messages": [{"role": "user", "content": prompt}], "return_token_ids": True}
        elif path == "responses":
            asked = {"input": prompt}
        body = {**asked, "seed": number, "stream": True, **options}
        cases.append(Case(kind, path, body, is_keyed=path != "responses" and number // len(KINDS) % 2 == 0))
    return cases


async def kill(nodes: RayNodes, clients: Clients, tally: Tally, rng: random.Random, victims: list[str]) -> None:
    """Kill one thing after another, each when what was killed before it has been replaced."""
    for what in victims:
        await asyncio.sleep(rng.uniform(*PAUSES_S))
        clients.may_cut = what == "server"
        tally.events.append((time.monotonic(), what))
        if what == "node":
            await asyncio.to_thread(nodes.tell, "lose a node")
            await asyncio.to_thread(nodes.tell, "add a node")
        else:
            await asyncio.to_thread(nodes.kill, DEPLOYMENTS[what])
        for deployment in DEPLOYMENTS.values():
            await asyncio.to_thread(nodes.heal, deployment, 2)
        clients.may_cut = False
        tally.counts[f"{what}s killed"] += 1


async def run_kills(nodes: RayNodes, catalogue: list[Case], tally: Tally, victims: list[str], seed: int) -> None:
    """Stream while these are killed in turn; servers may cut streams."""
    clients = Clients(nodes.url, catalogue, tally)
    killing = asyncio.create_task(kill(nodes, clients, tally, random.Random(seed), victims))
    await asyncio.gather(killing, *(clients.visit_while(case, lambda: not killing.done()) for case in catalogue))
    await clients.close()


async def run_scales(nodes: RayNodes, catalogue: list[Case], tally: Tally) -> None:
    clients = Clients(nodes.url, catalogue, tally)
    seen: list[int] = []

    async def watch() -> None:
        for num_engines in (MAX_ENGINES, 1):
            while len(await asyncio.to_thread(nodes.replicas, "Engine")) != num_engines:  # noqa: ASYNC110
                await asyncio.sleep(PAUSES_S[0])
            await asyncio.to_thread(nodes.tell, "start")
            seen.append(num_engines)
            tally.events.append((time.monotonic(), f"{num_engines} engines"))

    visits = [
        clients.visit_while(case, lambda few=i < FEW: len(seen) < 1 + few)  # type: ignore[misc]
        for i, case in enumerate(catalogue)
    ]
    await asyncio.gather(watch(), *visits)
    await clients.close()


async def compute_alone(nodes: RayNodes, catalogue: list[Case]) -> Tally:
    """Set what each case says when nothing disturbs it."""
    alone = Tally()
    clients = Clients(nodes.url, catalogue, alone)
    for begin in range(0, len(catalogue), FEW):
        cases = catalogue[begin : begin + FEW]
        for case, said in zip(cases, await asyncio.gather(*map(clients.listen, cases)), strict=True):
            case.said = said
    await clients.close()
    return alone


@contextmanager
def cluster(engines: dict[str, Any], num_nodes: int) -> Iterator[RayNodes]:
    """Run a cluster whose model knows tools."""
    with tempfile.TemporaryDirectory() as name:
        template = Path(name) / "template.jinja"
        template.write_text(TEMPLATE)
        arguments = {**ARGUMENTS, "chat-template": str(template)}
        with RayNodes(num_nodes, arguments, {"Engine": engines, "Ingress": SERVERS}) as nodes:
            yield nodes


async def run(nodes: RayNodes, args: argparse.Namespace) -> tuple[Tally, Tally]:
    catalogue, tally = make_catalogue(), Tally()
    alone = await compute_alone(nodes, catalogue)
    if args.scale:
        await run_scales(nodes, catalogue, tally)
    else:
        victims = ["engine"] * args.engine_kills + ["node"] * args.node_kills
        random.Random(args.seed).shuffle(victims)
        await run_kills(nodes, catalogue, tally, victims + ["server"] * args.server_kills, args.seed)
    return alone, tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-kills", type=int, default=6)
    parser.add_argument("--node-kills", type=int, default=2)
    parser.add_argument("--server-kills", type=int, default=1)
    parser.add_argument("--scale", action="store_true", help="scale engines from 1 to 3 and back, and kill nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    with cluster(SCALED, 2) if args.scale else cluster(TWO, 3) as nodes:
        alone, tally = asyncio.run(run(nodes, args))
    table = {
        **tally.counts,
        "streams compared": sum(tally.counts[kind] for kind in KINDS),
        "wrong": len(tally.wrong),
        "longest pause undisturbed, s": round(alone.longest_s, 2),
        **{f"longest pause after: {what}, s": longest for what, longest in tally.longest_by_event().items()},
    }
    for what, value in table.items():
        print(f"{what:42} {value:>12}")
    for sentence in tally.wrong[:20]:
        print("WRONG", sentence)
    options = {"scale": args.scale, "seed": args.seed, "passed": not tally.wrong}
    tell({"benchmark": "ray_chaos", **options, **versions(), **table}, args.output)
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
