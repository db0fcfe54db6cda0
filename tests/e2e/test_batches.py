"""A batch of a real model goes on after kill -9, with the answers of one that nobody disturbed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import Process

URL = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 12},
    {"prompt": "The cat", "max_tokens": 8, "n": 2},
    {"prompt": "x", "max_tokens": 24, "structured_outputs": {"json": SCHEMA}},
    {"prompt": "x", "stream": True},
]
NUM_LINES = 120


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Process, httpx.Client]]:
    process = Process("--state-dir", str(folder), "--max-num-seqs", "4")
    try:
        with process.wait_until_ready() as client:
            yield process, client
    finally:
        process.kill()


def begin(client: httpx.Client) -> str:
    lines = (
        {"custom_id": f"line {i}", "method": "POST", "url": URL, "body": {"seed": i, **BODIES[i % len(BODIES)]}}
        for i in range(NUM_LINES)
    )
    data = "".join(f"{json.dumps(line)}\n" for line in lines)
    file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    batch_id: str = client.post("/v1/batches", json=body).json()["id"]
    return batch_id


def wait_for(client: httpx.Client, batch_id: str, num_done: int) -> dict[str, Any]:
    """Return a batch once so many lines are done, and all of it once it has completed."""
    while True:
        batch: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
        if batch["status"] == "completed" or batch["request_counts"]["completed"] >= num_done:
            return batch


def results(client: httpx.Client, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results in the order of the files, without what is of a batch or of when they were computed."""
    read = []
    for name in ("output_file_id", "error_file_id"):
        text = client.get(f"/v1/files/{batch[name]}/content").text
        read += [json.loads(line) for line in text.splitlines()]
    for result in read:
        del result["id"], result["response"]["request_id"]
        for its in ("id", "created"):
            result["response"]["body"].pop(its, None)
        result["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return read


@pytest.mark.slow
def test_a_batch_survives_three_kills_with_the_same_answers(tmp_path: Path) -> None:
    with serving(tmp_path / "whole") as (_, client):
        batch = wait_for(client, begin(client), NUM_LINES)
        whole = results(client, batch)
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": 90, "failed": 30}
    assert len({result["custom_id"] for result in whole}) == NUM_LINES
    batch_id = ""
    for least in (10, 30, 60):
        with serving(tmp_path / "killed") as (process, client):
            batch_id = batch_id or begin(client)
            assert wait_for(client, batch_id, least)["status"] == "in_progress"
            process.popen.send_signal(signal.SIGKILL)
    with serving(tmp_path / "killed") as (process, client):
        process.engine().kill()
        batch = wait_for(client, batch_id, NUM_LINES)
        assert results(client, batch) == whole
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": 90, "failed": 30}
