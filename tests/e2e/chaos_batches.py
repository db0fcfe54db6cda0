"""Batches of servers that are disturbed: begun at one, followed at one after another, and what must be at each at last.

`replica_chaos.py` runs them beside its completions.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from gptserve.server.batches.store import ENDED
from tests.server.serving import Process

URL = "/v1/completions"
REFUSED_EVERY = 10
_PAUSE_S = 0.1  # after a server could not be reached or refused
_SHAPES: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time", "frequency_penalty": 0.5},
    {"prompt": "the fox the fox the fox the fox", "temperature": 0},  # drafts come true
    {"prompt": "A badger", "n": 2, "logprobs": 2},
)
UNFENCED = """
from gptserve.server.batches import postgres
postgres.ADD_RESULT = postgres.ADD_RESULT.replace(
    "SELECT id FROM gptserve.replicas WHERE id = %(me)s FOR KEY SHARE", "SELECT %(me)s::uuid AS id"
).replace("AND l.replica = me.id", "")
"""
"""What a server executes first that writes results without having the lease."""
UNKEYED = """;
ALTER TABLE gptserve.batch_results DROP CONSTRAINT batch_results_pkey; CREATE INDEX ON gptserve.batch_results (batch_id)
"""
AUDIT = """
CREATE TABLE audit.strange_results (batch_id text, n integer, name text, holder text);
CREATE FUNCTION audit.write_result() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE holder text; BEGIN
    SELECT m.name INTO holder FROM gptserve.batch_leases l JOIN audit.members m ON m.id = l.replica
    WHERE l.batch_id = NEW.batch_id;
    IF holder IS DISTINCT FROM current_setting('application_name') THEN
        INSERT INTO audit.strange_results VALUES (NEW.batch_id, NEW.n, current_setting('application_name'), holder);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER audit AFTER INSERT ON gptserve.batch_results FOR EACH ROW EXECUTE FUNCTION audit.write_result();
"""
STRANGERS = "SELECT count(*) FROM audit.strange_results"
LEFT = """
SELECT (SELECT count(*) FROM gptserve.contents WHERE replica IS NOT NULL)
    + (SELECT count(*) FROM gptserve.contents c WHERE NOT EXISTS (SELECT FROM gptserve.files WHERE content = c.id))
    + (SELECT count(*) FROM gptserve.batch_leases) + (SELECT count(*) FROM gptserve.batch_results)
    + (SELECT count(*) FROM gptserve.batch_begun)
"""
"""How much is left of what is only there while a batch runs or a file arrives."""


def lines_of(number: int, num_lines: int) -> list[dict[str, Any]]:
    """Return the lines of a batch; every REFUSED_EVERY-th is refused."""
    return [
        {
            "custom_id": f"{number}-{n}",
            "method": "POST",
            "url": URL,
            "body": _SHAPES[n % len(_SHAPES)]
            | {"max_tokens": 20 + 7 * n % 30, "ignore_eos": True, "seed": 1000 * number + n}
            | ({"temperature": "hot"} if n % REFUSED_EVERY == REFUSED_EVERY - 1 else {}),
        }
        for n in range(num_lines)
    ]


class BatchClient:
    """A client that uploads the lines, begins the batch and asks how it is, until it is told to stop.

    `wrong` has a sentence for what it was told that cannot be so.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        lines: Sequence[dict[str, Any]],
        servers: Callable[[], list[str]],
        rng: random.Random,
    ) -> None:
        self._client, self._servers, self._rng = client, servers, rng
        self._data = "\n".join(map(json.dumps, lines)).encode()
        self._mark = uuid.uuid4().hex
        self._stopped = asyncio.Event()
        self.ended = asyncio.Event()
        self.batch_id: str | None = None
        self.told: dict[str, Any] = {}
        self.wrong: list[str] = []

    @property
    def num_done(self) -> int:
        """How many lines it was told that have a result."""
        counts = self.told.get("request_counts", {"completed": 0, "failed": 0})
        return int(counts["completed"] + counts["failed"])

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    async def run(self) -> None:
        """Begin it wherever that is possible, and read it at random servers until it is told to stop."""
        while self.batch_id is None:
            self.batch_id = await self._begin()
        while not self._stopped.is_set():
            found = await self._ask("GET", f"/v1/batches/{self.batch_id}")
            if found is not None:
                self._note(found)
            await asyncio.sleep(_PAUSE_S)

    def _note(self, found: dict[str, Any]) -> None:
        if self.ended.is_set() and found != self.told:
            self.wrong.append(f"{self.batch_id} had ended and changed from {self.told} to {found}")
        self.told = found
        if found["status"] in ENDED:
            self.ended.set()

    async def _begin(self) -> str | None:
        """Return the id of the batch; one that was begun although the answer was lost is known by its mark."""
        listed = await self._ask("GET", "/v1/batches?limit=100")
        for batch in [] if listed is None else listed["data"]:
            if batch["metadata"] == {"mark": self._mark}:
                return str(batch["id"])
        files = {"file": ("in.jsonl", self._data)}
        file = await self._ask("POST", "/v1/files", files=files, data={"purpose": "batch"})
        if listed is None or file is None:
            return None
        asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        begun = await self._ask("POST", "/v1/batches", json={**asked, "metadata": {"mark": self._mark}})
        return None if begun is None else str(begun["id"])

    async def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        """Return what a random server answers, or None where it must be asked again."""
        if not (urls := self._servers()):
            await asyncio.sleep(_PAUSE_S)
            return None
        try:
            response = await self._client.request(method, self._rng.choice(urls) + path, **arguments)
        except httpx.TransportError:
            response = None
        if response is None or response.status_code in (429, 503):
            await asyncio.sleep(_PAUSE_S)
            return None
        assert response.is_success, response.text
        return response.json()


async def contents(client: httpx.AsyncClient, url: str, batch: dict[str, Any]) -> list[bytes]:
    """Return the bytes of the output file and of the error file, as a server has them."""
    found = []
    for name in ("output_file_id", "error_file_id"):
        response = await client.get(f"{url}/v1/files/{batch[name]}/content", timeout=None)
        found.append(response.content if batch[name] is not None else b"")
    return found


def results_of(content: bytes) -> list[tuple[str, int, str]]:
    """Return of each line of a file its custom_id, its status, and its choices or its error as they are written."""
    found = []
    for line in map(json.loads, content.splitlines()):
        response = line["response"] or {"status_code": 0, "body": {"error": line["error"]}}
        told = response["body"].get("choices") or response["body"]["error"]
        found.append((line["custom_id"], response["status_code"], json.dumps(told)))
    return found


Expected = list[list[tuple[str, int, str]]]


async def undisturbed(batches: Sequence[Sequence[dict[str, Any]]], flags: Sequence[str]) -> list[Expected]:
    """Return the results of a server that is left alone: of each batch those of both files."""
    process = Process(*flags)
    try:
        ready = await asyncio.to_thread(process.wait_until_ready)
        url = str(ready.base_url)
        ready.close()
        async with httpx.AsyncClient(timeout=None) as client:
            found = []
            for lines in batches:
                batch = BatchClient(client, lines, lambda: [url], random.Random(0))
                asking = asyncio.create_task(batch.run())
                await batch.ended.wait()
                batch.stop()
                await asking
                found.append([results_of(content) for content in await contents(client, url, batch.told)])
            return found
    finally:
        process.kill()


async def compare(client: httpx.AsyncClient, urls: Sequence[str], batch: BatchClient, expected: Expected) -> list[str]:
    """Return a sentence for all of a batch that is not at each server once, in order and as undisturbed."""
    if not batch.ended.is_set():
        return [f"{batch.batch_id} never ended: {batch.told}"]
    wrong = [*batch.wrong]
    numbers = {"completed": len(expected[0]), "failed": len(expected[1])}
    if batch.told["status"] != "completed" or batch.told["request_counts"] != numbers | {
        "total": sum(numbers.values())
    }:
        wrong.append(f"{batch.batch_id} is {batch.told}")
    for url in urls:
        told = (await client.get(f"{url}/v1/batches/{batch.batch_id}")).json()
        if told != batch.told:
            wrong.append(f"{batch.batch_id}: {url} says {told} instead of {batch.told}")
        for content, results in zip(await contents(client, url, batch.told), expected, strict=True):
            if (found := results_of(content)) != results:
                strange = [pair for pair in zip(found, results, strict=False) if pair[0] != pair[1]][:1]
                wrong.append(f"{batch.batch_id}: {url} has {len(found)} of {len(results)} lines, other: {strange}")
    return wrong
