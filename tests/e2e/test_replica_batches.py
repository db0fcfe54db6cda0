"""Files and batches of servers that share a database: each line once and right, whatever becomes of who computes it."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import httpx
import pytest

from tests.e2e.test_replicas import Replica, replicas
from tests.server.serving import LIMIT_S

__all__ = ["replicas"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_LINES = 60
BODIES: list[dict[str, Any]] = [
    {"prompt": f"The {n}. fox", "max_tokens": 3 + n % 9, "ignore_eos": True, "seed": n, "n": 1 + (n % 5 == 0)}
    | ({"logprobs": 2} if n % 7 == 0 else {})
    | ({"temperature": "hot"} if n % 20 == 19 else {})
    for n in range(NUM_LINES)
]
URL = "/v1/completions"


def upload(client: httpx.Client, name: str = "in.jsonl") -> str:
    lines = [
        json.dumps({"custom_id": f"{n}", "method": "POST", "url": URL, "body": body}) for n, body in enumerate(BODIES)
    ]
    answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, "\n".join(lines).encode())})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def begin(client: httpx.Client, file_id: str) -> str:
    asked = {"endpoint": URL, "input_file_id": file_id, "completion_window": "24h"}
    answer = client.post("/v1/batches", json=asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def read(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    answer = client.get(f"/v1/batches/{batch_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wait(client: httpx.Client, batch_id: str, *statuses: str, num_done: int = 0) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while True:
        batch = read(client, batch_id)
        if batch["status"] in statuses and batch["request_counts"]["completed"] >= num_done:
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)


def content(client: httpx.Client, file_id: str) -> bytes:
    answer = client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    return answer.content


def answers(client: httpx.Client, batch: dict[str, Any]) -> list[tuple[str, int, Any]]:
    """Return of all lines what depends neither on the id of the batch nor on what was cached, in their order."""
    found = []
    for name in ("output_file_id", "error_file_id"):
        for line in map(json.loads, content(client, batch[name]).splitlines()):
            body = line["response"]["body"]
            told = body.get("error") or {
                name: body[name] for name in ("choices", "seed", "model", "system_fingerprint")
            }
            found.append((line["custom_id"], line["response"]["status_code"], told))
    return found


def check(replicas: list[httpx.Client], batch_id: str, expected: list[tuple[str, int, Any]]) -> None:
    """Check that a batch is whole, and the same at each server."""
    batch = read(replicas[0], batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES - 3, "failed": 3}
    for client in replicas:
        assert read(client, batch_id) == batch
        assert answers(client, batch) == expected, "each line once, in the order of the file"
    outputs = [file["filename"] for file in replicas[0].get("/v1/files?purpose=batch_output").json()["data"]]
    assert sorted(name for name in outputs if name.startswith(batch_id)) == [
        f"{batch_id}_error.jsonl",
        f"{batch_id}_output.jsonl",
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_another_server_goes_on_with_the_lines_of_one_that_dies_or_is_stopped(
    replicas: list[Replica], how: signal.Signals
) -> None:
    first, second = replicas
    file_id = upload(second.client)
    assert content(first.client, file_id) == content(second.client, file_id)
    first.gate.shut(after_steps=100)
    batch_id = begin(first.client, file_id)
    in_use = second.client.delete(f"/v1/files/{file_id}")
    assert (in_use.status_code, in_use.json()["error"]["code"]) == (409, "file_in_use")
    while not first.gate.is_reached:
        time.sleep(0.01)
    batch = wait(second.client, batch_id, "in_progress", num_done=1)
    assert batch["request_counts"]["completed"] < NUM_LINES - 3
    first.signal(how)
    wait(second.client, batch_id, "completed")
    clients = [second.client]
    if how is signal.SIGSTOP:
        first.signal(signal.SIGCONT)
        wait(first.client, batch_id, "completed")  # although its engine is still held
        first.gate.open()
        while first.client.post("/v1/files", data={"purpose": "batch"}, files={"file": b""}).status_code == 503:
            time.sleep(0.1)  # it knows by the next answer that it was away
        wait(first.client, begin(first.client, upload(first.client)), "completed")
        clients.append(first.client)
    undisturbed = wait(second.client, begin(second.client, file_id), "completed")
    expected = answers(second.client, undisturbed)
    assert len(expected) == NUM_LINES
    check(clients, batch_id, expected)
    listed = [batch["id"] for batch in second.client.get("/v1/batches").json()["data"]]
    assert listed[-1] == batch_id
    assert len(listed) == len({*listed})


def test_a_batch_is_cancelled_at_a_server_that_does_not_compute_it(replicas: list[Replica]) -> None:
    first, second = replicas
    first.gate.shut(after_steps=100)
    batch_id = begin(first.client, upload(first.client))
    while not first.gate.is_reached:
        time.sleep(0.01)
    num_done = wait(second.client, batch_id, "in_progress", num_done=1)["request_counts"]["completed"]
    told = second.client.post(f"/v1/batches/{batch_id}/cancel").json()
    assert told["status"] in ("cancelling", "cancelled")
    batch = wait(second.client, batch_id, "cancelled")
    assert read(first.client, batch_id) == batch
    assert num_done <= batch["request_counts"]["completed"] < NUM_LINES - 3
    assert len(content(second.client, batch["output_file_id"]).splitlines()) == batch["request_counts"]["completed"]


@pytest.mark.parametrize("replicas", [("--api-key", "one", "--api-key", "other")], indirect=True)
def test_of_the_files_and_batches_of_one_key_another_sees_and_stops_nothing_at_any_server(
    replicas: list[Replica],
) -> None:
    first, second = replicas
    mine, others = ({"authorization": f"Bearer {name}"} for name in ("one", "other"))
    for replica in replicas:
        replica.client.headers.update(mine)
    file_id = upload(first.client)
    first.gate.shut(after_steps=100)
    batch_id = begin(first.client, file_id)
    for replica in replicas:
        client = httpx.Client(base_url=replica.client.base_url, headers=others, timeout=LIMIT_S)
        asked = {"endpoint": URL, "input_file_id": file_id, "completion_window": "24h"}
        refusals = [
            *(client.get(f"/v1/files/{file_id}{part}") for part in ("", "/content")),
            client.delete(f"/v1/files/{file_id}"),
            client.post("/v1/batches", json=asked),
            client.get(f"/v1/batches/{batch_id}"),
            client.post(f"/v1/batches/{batch_id}/cancel"),
        ]
        codes = [refusal.json()["error"]["code"] for refusal in refusals]
        assert codes == ["file_not_found"] * 4 + ["batch_not_found"] * 2
        assert [client.get(f"/v1/{what}").json()["data"] for what in ("files", "batches")] == [[], []]
        client.close()
    first.gate.open()
    batch = wait(second.client, batch_id, "completed")
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES - 3, "failed": 3}
    outputs = batch["output_file_id"], batch["error_file_id"]
    for replica in replicas:
        for output in outputs:
            assert replica.client.get(f"/v1/files/{output}/content").status_code == 200
            refused = replica.client.get(f"/v1/files/{output}/content", headers=others)
            assert refused.json()["error"]["code"] == "file_not_found"
