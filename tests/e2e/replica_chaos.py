"""Disturb servers that share a PostgreSQL database, and check that each stored completion is there once and right.

    python -m tests.e2e.replica_chaos [--kills 12] [--stops 6] [--cuts 4] [--restarts 3] [--completions 48]
        [--batches 3] [--lines 40] [--sync full] [--seed 0] [--unfenced]

One server without a database computes all completions and responses undisturbed: texts, chats, choices, drafts,
grammars, tools; and all batches. Three servers with a ttl of 2 s, each behind a proxy of its own, are then killed (kill
-9), stopped for 2.5 ttl (SIGSTOP) and cut off from the database for as long, while what they sent arrives late; the
database crashes and starts again at once; in the second third of the events all that goes to it or comes from it takes
150 ms. Readers follow each completion, and clients each batch, at one server after another. Every event must be there
once and as undisturbed, every line once in the files of its batch, in order and as undisturbed. A batch that has ended
must not change, nothing may be left of what dead servers wrote, and a trigger notes each batch of outputs and each line
that a server wrote without having its lease. With --unfenced the servers write without the fence, and the tables of
batches of outputs and of results have no primary key: the same checks must then find what a reaped server wrote; of
lines with --completions 0, as beside completions hardly any is computed while its server is away. Prints a table; exits
with status 1 on anything that is wrong.
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

from tests.e2e import chaos_batches
from tests.e2e.chaos_batches import BatchClient
from tests.e2e.chaos_clients import Reader, asked, compare, undisturbed
from tests.late_proxy import LateProxy
from tests.postgres_server import PostgresServer
from tests.server.serving import Process

TTL_S = 2
AWAY_S = 2.5 * TTL_S
DELAY_S = 0.15
NUM_SERVERS = 3
LIMIT_S = 1800.0
NUM_LINES = 40  # of a batch
FLAGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "128", "--speculative-ngram", "2")
SHARED = ("--state-lease-ttl", str(TTL_S), "--max-results", "1000")
PACED = """
import os, sys
import gptserve.server.parts
from tests.engine import paced_engine
from gptserve.server.batches import runner
from gptserve.server.cli.main import main
runner.MAX_ATTEMPTS = 1000  # no line is to blame for what is done to its servers
gptserve.server.parts.load_logging_engine = paced_engine.load_in_server
if "UNFENCED" in os.environ:
    from gptserve.server.jobs.postgres import statements
    statements.APPEND = os.environ["UNFENCED"]
    exec(os.environ["UNFENCED_BATCHES"])
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
_COUNTS = (STRANGERS, TWICE, BEYOND, chaos_batches.STRANGERS, chaos_batches.LEFT)
Event = Literal["kill", "stop", "cut", "restart"]


@dataclass(slots=True)
class Found:
    """What became of the completions; `wrong` has a sentence for each that is not as it should be."""

    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_read: int = 0
    num_lines: int = 0
    strangers: int = 0
    strange_lines: int = 0
    left: int = 0
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
        self._environment = {"UNFENCED": UNFENCED, "UNFENCED_BATCHES": chaos_batches.UNFENCED} if unfenced else {}
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
    """Does events one after another, each once somebody has got further and two servers are ready."""

    def __init__(
        self,
        servers: list[Server],
        postgres: PostgresServer,
        readers: list[Reader],
        batches: list[BatchClient],
        found: Found,
    ) -> None:
        self._servers = servers
        self._postgres = postgres
        self._readers = readers
        self._batches = batches
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
            num_lines = sum(batch.num_done for batch in self._batches)
            say(f"{event}: {sum(reader.is_over for reader in self._readers)} are over, and {num_lines} lines")
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
        had = self._progress()
        while True:
            ready = [server for server in self._servers if server.url is not None]
            if len(ready) > 1 and self._progress() > had:
                return ready
            is_over = [reader.is_over for reader in self._readers] + [one.ended.is_set() for one in self._batches]
            assert not all(is_over), "all were over before: ask for more"
            await asyncio.sleep(0.01)

    def _progress(self) -> int:
        num_lines = sum(batch.num_done for batch in self._batches)
        return num_lines + sum(len(reader.events) for reader in self._readers)


def say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", flush=True)


async def run(
    events: list[Event],
    num_completions: int,
    num_batches: int,
    seed: int,
    *,
    num_lines: int = NUM_LINES,
    sync: str = "full",
    is_unfenced: bool = False,
    folder: Path,
) -> Found:
    """Compute so many completions, and batches of so many lines, through these events."""
    rng, found, began = random.Random(seed), Found(), time.monotonic()
    template = folder / "template"
    template.write_text("{{ messages[-1].content }}{# tools <tool_call> #}")
    flags = (*FLAGS, "--chat-template", str(template))
    bodies = [asked(i) for i in range(num_completions)]
    expected = await undisturbed(bodies, flags)
    lines = [chaos_batches.lines_of(number, num_lines) for number in range(num_batches)]
    of_batches = await chaos_batches.undisturbed(lines, flags)
    say(f"{num_completions} and {num_batches} batches are computed undisturbed")
    postgres = PostgresServer()
    postgres.start()
    url = postgres.empty_database()
    database = url.partition("@/")[2].partition("?")[0]
    servers = [
        Server(f"server{i}", postgres, database, (*flags, "--state-sync", sync), is_unfenced)
        for i in range(NUM_SERVERS)
    ]
    try:
        for server in servers:
            await server.proxy.open()
        await servers[0].start()
        postgres.execute(AUDIT + chaos_batches.AUDIT + (UNKEYED + chaos_batches.UNKEYED if is_unfenced else ""), url)
        await servers[0].kill()  # its membership was not audited
        await asyncio.gather(*(server.start() for server in servers))
        async with httpx.AsyncClient(timeout=4 * TTL_S, limits=httpx.Limits(max_connections=None)) as client:

            def urls() -> list[str]:
                return [server.url for server in servers if server.url]

            readers = [Reader(client, body, urls, rng) for body in bodies]
            batches = [BatchClient(client, of_one, urls, rng) for of_one in lines]
            running = [asyncio.create_task(reader.run()) for reader in readers]
            asking = [asyncio.create_task(batch.run()) for batch in batches]
            await Disturbance(servers, postgres, readers, batches, found).run(events, rng)
            say("all events are done")
            limit_s = 10 * TTL_S if is_unfenced else LIMIT_S  # unfenced some are damaged for good
            await finish(readers, running, limit_s)
            for server in servers:
                await compare(client, str(server.url), readers, expected, found.wrong)
            for batch, results in zip(batches, of_batches, strict=True):
                with suppress(TimeoutError):
                    await asyncio.wait_for(batch.ended.wait(), limit_s)
                found.wrong += await chaos_batches.compare(client, urls(), batch, results)
                found.num_lines += sum(map(len, results))
            await asyncio.sleep(2 * TTL_S)  # until all that are dead are reaped, and what has ended is asked for again
            for batch in batches:
                batch.stop()
            await asyncio.gather(*asking)
            found.wrong += [sentence for batch in batches for sentence in batch.wrong if sentence not in found.wrong]
        found.num_compared = len(readers)
        found.num_read = sum(len(reader.events) for reader in readers)
        counts = (postgres.execute(statement, url) for statement in _COUNTS)
        found.strangers, found.twice, found.beyond, found.strange_lines, found.left = (
            int(str(rows[0][0])) for rows in counts
        )
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
    _, unfinished = await asyncio.wait(running, timeout=limit_s) if running else ((), ())
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
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--lines", type=int, default=NUM_LINES)
    parser.add_argument("--sync", choices=("normal", "full"), default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unfenced", action="store_true")
    args = parser.parse_args()
    numbers: dict[Event, int] = {"kill": args.kills, "stop": args.stops, "cut": args.cuts, "restart": args.restarts}
    events = [event for event, number in numbers.items() for _ in range(number)]
    random.Random(args.seed).shuffle(events)
    with tempfile.TemporaryDirectory() as name:
        options = {"num_lines": args.lines, "sync": args.sync, "is_unfenced": args.unfenced, "folder": Path(name)}
        running = run(events, args.completions, args.batches, args.seed, **options)
        found = asyncio.run(asyncio.wait_for(running, LIMIT_S))
    table = {
        **{f"{event}s": found.events[event] for event in numbers},
        "completions compared": found.num_compared,
        "events read": found.num_read,
        "lines of batches compared": found.num_lines,
        "not once as undisturbed": len(found.wrong),
        "batches by servers without the lease": found.strangers,
        "batches written twice": found.twice,
        "batches after the end": found.beyond,
        "lines by servers without the lease": found.strange_lines,
        "rows left of batches and uploads": found.left,
        "seconds": round(found.seconds),
    }
    for what, value in table.items():
        print(f"{what:40} {value:>8}")
    for sentence in found.wrong[:20]:
        print("WRONG", sentence)
    counts = (found.strangers, found.twice, found.beyond, found.strange_lines, found.left)
    is_wrong = bool(found.wrong) or any(counts)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
