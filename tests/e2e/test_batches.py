"""Batches of a real model through kills, a full disk and a line that ends servers: each line once, and right."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import batch_chaos
from tests.engine.mortal_engine import POISON
from tests.server import serving
from tests.server.serving import Process

pytestmark = pytest.mark.slow

WINDOW = {"completion_window": "24h"}

MORTAL = """
import os, signal, sys
from gptserve.server.batches import runner
from gptserve.server.cli.main import main

async def compute_line(service, batch, raw, *arguments):
    if b"poison" in raw.data:
        os.kill(os.getpid(), signal.SIGKILL)
    return await compute(service, batch, raw, *arguments)

compute, runner.compute_line = runner.compute_line, compute_line
main(sys.argv[1:])
"""
"""A server that a line with "poison" in it kills."""


def test_batches_survive_kills_and_a_full_disk_with_the_same_answers(tmp_path: Path) -> None:
    found = asyncio.run(batch_chaos.run(tmp_path, num_lines=900, num_engines=2, num_servers=2, seed=0))

    assert found.wrong == []
    assert found.events == Counter(engine=2, server=2, disk=2)


def test_a_line_that_is_missing_twice_there_or_changed_is_seen() -> None:
    good: batch_chaos.Results = {f"line {i}": [{"custom_id": f"line {i}", "response": i}] for i in range(4)}
    bad = {"line 0": good["line 0"] * 2, "line 1": [{"custom_id": "line 1", "response": 0}], "line 3": good["line 3"]}

    wrong = batch_chaos.compare(4, {**bad, "line 9": []}, good)

    assert [sentence.partition(":")[0] for sentence in wrong] == ["line 0", "line 1", "line 2", "line 9"]


@pytest.mark.parametrize("where", ["a folder", "PostgreSQL"])
def test_a_line_that_kills_servers_fails_alone_after_four(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    flags = ["--state-dir", str(tmp_path)]
    if where == "PostgreSQL":
        flags = ["--state-url", request.getfixturevalue("postgres_url"), "--state-lease-ttl", "1"]
    num_deaths, has_begun, ended = 0, False, []
    while not ended:
        process = Process(*flags, main=MORTAL)
        try:
            with process.wait_until_ready() as client:
                if not has_begun:
                    has_begun = True
                    begin(client, "Once")
                    begin(client, "poison")
                ended = wait(client)
                names = [batch[f"{kind}_file_id"] for batch in ended for kind in ("output", "error")]
                files = [client.get(f"/v1/files/{name}/content").text.splitlines() for name in names if name]
        except httpx.TransportError:
            num_deaths += 1
            assert (num_deaths < 5, process.popen.wait(100)) == (True, -signal.SIGKILL)
        finally:
            process.kill()
    assert num_deaths == 4
    assert [batch["request_counts"] for batch in ended] == [
        {"total": 8, "completed": 7, "failed": 1},
        {"total": 8, "completed": 8, "failed": 0},
    ]
    output, error, other = ([json.loads(line) for line in lines] for lines in files)
    assert [(one["custom_id"], one["error"]["code"]) for one in error] == [("line 3", "generation_failed")]
    assert [one["custom_id"] for one in output] == [f"line {i}" for i in range(8) if i != 3]
    assert [one["custom_id"] for one in other] == [f"line {i}" for i in range(8)]


def test_a_line_that_kills_engines_fails_alone(tmp_path: Path) -> None:
    process = Process("--state-dir", str(tmp_path), main=serving.MORTAL)
    try:
        with process.wait_until_ready() as client:
            begin(client, list(POISON))
            [batch] = wait(client)
            error = client.get(f"/v1/files/{batch['error_file_id']}/content").json()
    finally:
        process.kill()
    assert batch["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
    assert (error["custom_id"], error["response"]["status_code"]) == ("line 3", 500)
    assert error["response"]["body"]["error"]["code"] == "generation_failed"


def begin(client: httpx.Client, fourth_prompt: str | list[int]) -> None:
    prompts = [fourth_prompt if i == 3 else "Once" for i in range(8)]
    bodies: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": 100, "ignore_eos": True} for prompt in prompts]
    lines = [json.dumps(batch_chaos.line(i, batch_chaos.TEXTS, body)) for i, body in enumerate(bodies)]
    data = "\n".join(lines)
    file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": batch_chaos.TEXTS, **WINDOW})


def wait(client: httpx.Client) -> list[dict[str, Any]]:
    """Return all batches, the newest first, once they have ended."""
    while True:
        batches: list[dict[str, Any]] = client.get("/v1/batches").json()["data"]
        if all(batch["status"] in ("completed", "failed") for batch in batches):
            return batches
