"""Disturb servers that share a PostgreSQL database, and check that each stored completion is there once and right.

    python -m tests.e2e.replica_chaos [--kills 12] [--stops 6] [--cuts 4] [--restarts 3] [--completions 48] [--seed 0]
        [--unfenced]

One server without a database computes all completions and responses undisturbed: texts, chats, choices, drafts,
grammars, tools. Three servers with a ttl of 2 s, each behind a proxy of its own, are then killed (kill -9), stopped for
2.5 ttl (SIGSTOP) and cut off from the database for as long, while what they sent arrives late; the database crashes and
starts again at once; in the second third of the events all that goes to it or comes from it takes 150 ms. Readers
follow each completion at one server after another. Every event must be there once and as undisturbed, and a trigger
notes each batch that a server wrote without having its lease. With --unfenced the servers write without the fence, and
the table of batches has no primary key: the same checks must then find what a reaped server wrote. Prints a table;
exits with status 1 on anything that is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from tests.e2e.chaos_clients import Reader, asked, compare, undisturbed
from tests.late_proxy import LateProxy
from tests.postgres_server import PostgresServer
from tests.server.serving import Process

TTL_S = 2
AWAY_S = 2.5 * TTL_S
DELAY_S = 0.15
NUM_SERVERS = 3
LIMIT_S = 1800.0
FLAGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "128", "--speculative-ngram", "2")
SHARED = ("--state-lease-ttl", str(TTL_S), "--state-sync", "full", "--max-results", "1000")
PACED = """
import os, sys
import gptserve.server.parts
from tests.engine import paced_engine
from gptserve.server.cli.main import main
gptserve.server.parts.load_logging_engine = paced_engine.load_in_server
if "UNFENCED" in os.environ:
    from gptserve.server.jobs.postgres import statements
    statements.APPEND = os.environ["UNFENCED"]
main(sys.argv[1:])
"""
UNFENCED = """
INSERT INTO gptserve.batches
SELECT t.id, t.n, t.outputs, coalesce(p.num_bytes, 0) + t.num_bytes, coalesce(p.num_tokens, 0) + t.num_tokens
FROM unnest(%(ids)b::text[], %(ns)b::integer[], %(outputs)b::text[], %(bytes)b::bigint[], %(tokens)b::bigint[])
    AS t(id, n, outputs, num_bytes, num_tokens)
LEFT JOIN gptserve.batches p ON p.completion_id = t.id AND p.n = t.n - 1 RETURNING completion_id
"""
UNKEYED = (
    "ALTER TABLE gptserve.batches DROP CONSTRAINT batches_pkey; CREATE INDEX ON gptserve.batches (completion_id, n)"
)
AUDIT = """
CREATE SCHEMA audit;
CREATE TABLE audit.members (id uuid, name text);
CREATE TABLE audit.strangers (completion_id text, n integer, name text, holder text);
CREATE FUNCTION audit.join() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit.members VALUES (NEW.id, current_setting('application_name')); RETURN NEW;
END $$;
CREATE FUNCTION audit.write() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE holder text; BEGIN
    SELECT m.name INTO holder FROM gptserve.leases l JOIN audit.members m ON m.id = l.replica
    WHERE l.completion_id = NEW.completion_id;
    IF holder IS DISTINCT FROM current_setting('application_name') THEN
        INSERT INTO audit.strangers VALUES (NEW.completion_id, NEW.n, current_setting('application_name'), holder);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER audit AFTER INSERT ON gptserve.replicas FOR EACH ROW EXECUTE FUNCTION audit.join();
CREATE TRIGGER audit AFTER INSERT ON gptserve.batches FOR EACH ROW EXECUTE FUNCTION audit.write();
"""
STRANGERS = "SELECT count(*) FROM audit.strangers"
TWICE = "SELECT count(*) - count(DISTINCT (completion_id, n)) FROM gptserve.batches"
BEYOND = "SELECT count(*) FROM gptserve.batches b JOIN gptserve.ends e USING (completion_id) WHERE b.n >= e.num_batches"
Event = Literal["kill", "stop", "cut", "restart"]


@dataclass(slots=True)
class Found:
    """What became of the completions; `wrong` has a sentence for each that is not as it should be."""

    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_read: int = 0
    strangers: int = 0
    twice: int = 0
    beyond: int = 0
    seconds: float = 0.0


class Server:
    """One of the servers, as often as it is started."""

    def __init__(
        self, name: str, postgres: PostgresServer, database: str, flags: Sequence[str], unfenced: bool
    ) -> None:
        self.proxy = LateProxy(postgres.folder / ".s.PGSQL.5432")
        self._name = name
        self._database = database
        self._flags = flags
        self._environment = {"UNFENCED": UNFENCED} if unfenced else {}
        self._process: Process | None = None
        self.url: str | None = None
        """Where it is while it is ready."""

    async def start(self) -> None:
        """Start its process; return when it is ready."""
        url = f"postgresql://postgres@127.0.0.1:{self.proxy.port}/{self._database}?application_name={self._name}"
        while self.url is None:
            self._process = Process(*self._flags, *SHARED, "--state-url", url, main=PACED, **self._environment)
            try:
                client = await asyncio.to_thread(self._process.wait_until_ready)
            except AssertionError:  # it ends where the database is away, and is started again, as by an orchestrator
                await self.kill()
                continue
            self.url = str(client.base_url)
            client.close()

    async def kill(self) -> None:
        """Kill it with all its processes."""
        self.url = None
        if self._process is not None:
            await asyncio.to_thread(self._process.kill)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        assert self._process is not None
        os.killpg(self._process.popen.pid, number)


class Disturbance:
    """Does events one after another, each once some reader has got further and two servers are ready."""

    def __init__(self, servers: list[Server], postgres: PostgresServer, readers: list[Reader], found: Found) -> None:
        self._servers = servers
        self._postgres = postgres
        self._readers = readers
        self._found = found
        self._starting: list[asyncio.Task[None]] = []

    async def run(self, events: list[Event], rng: random.Random) -> None:
        """Do all events."""
        for i, event in enumerate(events):
            ready = await self._wait()
            for server in self._servers:
                server.proxy.delay_s = DELAY_S if len(events) <= 3 * i < 2 * len(events) else 0.0
            await self._do(event, rng.choice(ready))
            self._found.events[event] += 1
            say(f"{event}: {sum(reader.is_over for reader in self._readers)} are over")
        await asyncio.gather(*self._starting)

    async def _do(self, event: Event, server: Server) -> None:
        match event:
            case "kill":
                await server.kill()
                self._starting.append(asyncio.create_task(server.start()))
            case "stop":
                server.signal(signal.SIGSTOP)
                await asyncio.sleep(AWAY_S)
                server.signal(signal.SIGCONT)
            case "cut":
                server.proxy.cut()
                await asyncio.sleep(AWAY_S)
                server.proxy.mend()
            case "restart":
                await asyncio.to_thread(self._postgres.stop, signal.SIGQUIT)
                await asyncio.to_thread(self._postgres.start)

    async def _wait(self) -> list[Server]:
        """Return the servers that are ready, once they are two and there is progress."""
        had = self._num_read()
        while True:
            ready = [server for server in self._servers if server.url is not None]
            if len(ready) > 1 and self._num_read() > had:
                return ready
            assert not all(reader.is_over for reader in self._readers), "all were over before: ask for more"
            await asyncio.sleep(0.01)

    def _num_read(self) -> int:
        return sum(len(reader.events) for reader in self._readers)


def say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", flush=True)


async def run(
    events: list[Event], num_completions: int, seed: int, *, is_unfenced: bool = False, folder: Path
) -> Found:
    """Compute so many completions through these events."""
    rng, found, began = random.Random(seed), Found(), time.monotonic()
    template = folder / "template"
    template.write_text("{{ messages[-1].content }}{# tools <tool_call> #}")
    flags = (*FLAGS, "--chat-template", str(template))
    bodies = [asked(i) for i in range(num_completions)]
    expected = await undisturbed(bodies, flags)
    say(f"{num_completions} are computed undisturbed")
    postgres = PostgresServer()
    postgres.start()
    url = postgres.empty_database()
    database = url.partition("@/")[2].partition("?")[0]
    servers = [Server(f"server{i}", postgres, database, flags, is_unfenced) for i in range(NUM_SERVERS)]
    try:
        for server in servers:
            await server.proxy.open()
        await servers[0].start()
        postgres.execute(AUDIT + (UNKEYED if is_unfenced else ""), url)
        await servers[0].kill()  # its membership was not audited
        await asyncio.gather(*(server.start() for server in servers))
        async with httpx.AsyncClient(timeout=4 * TTL_S, limits=httpx.Limits(max_connections=None)) as client:
            readers = [Reader(client, body, lambda: [s.url for s in servers if s.url], rng) for body in bodies]
            running = [asyncio.create_task(reader.run()) for reader in readers]
            await Disturbance(servers, postgres, readers, found).run(events, rng)
            say("all events are done")
            await finish(readers, running, 10 * TTL_S if is_unfenced else LIMIT_S)  # unfenced some are damaged for good
            for server in servers:
                await compare(client, str(server.url), readers, expected, found.wrong)
        found.num_compared = len(readers)
        found.num_read = sum(len(reader.events) for reader in readers)
        counts = (postgres.execute(statement, url) for statement in (STRANGERS, TWICE, BEYOND))
        found.strangers, found.twice, found.beyond = (int(str(rows[0][0])) for rows in counts)
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                await server.kill()
            await server.proxy.close()
        postgres.close()
    found.seconds = time.monotonic() - began
    return found


async def finish(readers: Sequence[Reader], running: Sequence[asyncio.Task[None]], limit_s: float) -> None:
    """Wait until all readers have all events, or give up those that do not get them."""
    _, unfinished = await asyncio.wait(running, timeout=limit_s)
    for task in unfinished:
        task.cancel()
    for reader in readers:
        if not reader.is_over:
            reader.failure = f"it never ended, after {len(reader.events)} events"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--completions", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unfenced", action="store_true")
    args = parser.parse_args()
    numbers: dict[Event, int] = {"kill": args.kills, "stop": args.stops, "cut": args.cuts, "restart": args.restarts}
    events = [event for event, number in numbers.items() for _ in range(number)]
    random.Random(args.seed).shuffle(events)
    with tempfile.TemporaryDirectory() as name:
        running = run(events, args.completions, args.seed, is_unfenced=args.unfenced, folder=Path(name))
        found = asyncio.run(asyncio.wait_for(running, LIMIT_S))
    table = {
        **{f"{event}s": found.events[event] for event in numbers},
        "completions compared": found.num_compared,
        "events read": found.num_read,
        "not once as undisturbed": len(found.wrong),
        "batches by servers without the lease": found.strangers,
        "batches written twice": found.twice,
        "batches after the end": found.beyond,
        "seconds": round(found.seconds),
    }
    for what, value in table.items():
        print(f"{what:40} {value:>8}")
    for sentence in found.wrong[:20]:
        print("WRONG", sentence)
    is_wrong = bool(found.wrong or found.strangers or found.twice or found.beyond)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
