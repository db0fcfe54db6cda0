"""Servers that share a PostgreSQL database: killed, stopped for too long, told to end, and without their database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_background import (
    CHAT,
    FLAGS,
    SHAPES,
    Follower,
    begin,
    choices_of,
    events_of,
    is_over,
    last_id,
    without_comments,
)
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.postgres_server import PostgresServer
from tests.server.api.test_background import check_ids
from tests.server.serving import LIMIT_S, MORTAL, Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TTL_S = 2
AWAY = {
    "message": "the database of stored completions cannot be reached; requests that are not stored go on",
    "type": "server_error",
    "param": None,
    "code": "journal_unavailable",
}
STRUCTURED = {
    **CHAT,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 30}},
    },
}
BODIES: list[dict[str, Any]] = [
    *({**shape, "max_tokens": 150, "ignore_eos": True, "seed": 7, "background": True} for shape in SHAPES),
    {**STRUCTURED, "max_tokens": 150, "seed": 7, "background": True},
    {"prompt": "A fox", "n": 3, "max_tokens": 150, "ignore_eos": True, "seed": 8, "background": True},
]


class Replica:
    """A server of the database with an engine that a test can hold."""

    def __init__(self, url: str, gate: EngineGate, *flags: str) -> None:
        self.gate = gate
        shared = ("--state-url", url, "--state-lease-ttl", str(TTL_S))
        self.process = Process(*FLAGS, *shared, *flags, main=MORTAL, **{VARIABLE: str(gate.folder)})
        self.client = self.process.wait_until_ready()

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.popen.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.client.close()


@pytest.fixture
def replicas(
    request: pytest.FixtureRequest, postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Replica]]:
    """Two servers on one database, with the flags of the test."""
    flags: tuple[str, ...] = getattr(request, "param", ())
    started: list[Replica] = []
    try:
        started.append(Replica(postgres_url, EngineGate(tmp_path_factory.mktemp("gate")), *flags))
        started.append(Replica(postgres_url, EngineGate(tmp_path_factory.mktemp("gate")), *flags))
        yield started
    finally:
        for replica in started:
            replica.kill()


def begin_held(replica: Replica, bodies: list[dict[str, Any]]) -> list[str]:
    """Begin completions whose engine stops after some tokens of each; return their ids."""
    replica.gate.shut(after_steps=60)
    return [begin(replica.client, body) for body in bodies]


def wait_until_some_are_read(replica: Replica, followers: list[Follower], collected: list[list[str]]) -> None:
    while not (replica.gate.is_reached and sum(map(bool, collected)) > 1):
        followers[0].join(0.01)


def undisturbed(client: httpx.Client, bodies: list[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
    """Return what each choice of each body gets when nothing happens to its server."""
    return [choices_of(events_of(client, begin(client, body))) for body in bodies]


def check_all(client: httpx.Client, ids: list[str], collected: list[list[str]], bodies: list[dict[str, Any]]) -> None:
    """Check that every reader got each event once, and of the undisturbed completion."""
    for completion_id, events, expected in zip(ids, collected, undisturbed(client, bodies), strict=True):
        assert is_over(events)
        assert events == events_of(client, completion_id), "nothing twice, nothing missing, and nothing else"
        check_ids(events[:-1])
        assert choices_of(events) == expected


def test_the_readers_at_another_server_of_one_that_is_killed_have_the_undisturbed_streams(
    replicas: list[Replica],
) -> None:
    first, second = replicas
    ids = begin_held(first, BODIES)
    collected: list[list[str]] = [[] for _ in ids]
    followers = [Follower(second.client.base_url, *pair) for pair in zip(ids, collected, strict=True)]
    wait_until_some_are_read(first, followers, collected)
    first.kill()
    for follower in followers:
        follower.join(LIMIT_S)
    check_all(second.client, ids, collected, BODIES)


def test_what_a_server_left_in_a_folder_servers_of_a_database_go_on_with_and_a_folder_keeps(
    postgres_url: str, tmp_path: Path
) -> None:
    gate = EngineGate(tmp_path / "gate")
    gate.folder.mkdir()

    def launch(folder: str) -> Process:
        return Process(*FLAGS, "--state-dir", str(tmp_path / folder), main=MORTAL, **{VARIABLE: str(gate.folder)})

    def move(direction: str, folder: str) -> str:
        command = (Path(sys.executable).with_name("gptserve"), "state", direction, tmp_path / folder)
        environment = {**os.environ, "GPTSERVE_STATE_URL": postgres_url}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    first = launch("from")
    with first.wait_until_ready() as client:
        gate.shut(after_steps=60)
        ids = [begin(client, body) for body in BODIES]
        reader = Follower(client.base_url, ids[0], [])
        while not gate.is_reached:
            reader.join(0.01)
        first.kill()
    assert move("import", "from") == f"imported {len(ids)} completions, {len(ids)} of them to go on\n"
    gate.open()
    second = Replica(postgres_url, gate)
    collected = [events_of(second.client, completion_id) for completion_id in ids]
    check_all(second.client, ids, collected, BODIES)
    second.kill()
    PostgresServer.execute_at(postgres_url, "UPDATE gptserve.replicas SET ttl_s = 0")  # as if the ttl were over
    assert move("export", "to") == f"exported {2 * len(ids)} completions, 0 of them to go on\n"
    last = launch("to")
    with last.wait_until_ready() as client:
        assert [events_of(client, completion_id) for completion_id in ids] == collected
    last.kill()


def test_a_server_that_was_stopped_for_too_long_writes_nothing_more_and_goes_on_reading(
    replicas: list[Replica],
) -> None:
    first, second = replicas
    ids = begin_held(first, BODIES)
    at_first: list[list[str]] = [[] for _ in ids]
    at_second: list[list[str]] = [[] for _ in ids]
    readers = [Follower(first.client.base_url, *pair) for pair in zip(ids, at_first, strict=True)]
    others = [Follower(second.client.base_url, *pair) for pair in zip(ids, at_second, strict=True)]
    wait_until_some_are_read(first, readers, at_first)
    first.gate.open()
    first.signal(signal.SIGSTOP)
    for follower in others:
        follower.join(LIMIT_S)
    first.signal(signal.SIGCONT)
    first.process.wait_for_line("the database took this server for dead")
    for follower in readers:
        follower.join(LIMIT_S)
    check_all(second.client, ids, at_second, BODIES)
    check_all(first.client, ids, at_first, BODIES)
    again = begin(first.client, BODIES[0])
    assert choices_of(events_of(second.client, again)) == choices_of(at_first[0]), "it is a member again"


def test_what_one_server_is_told_to_end_with_the_other_goes_on_with_at_once(replicas: list[Replica]) -> None:
    first, second = replicas
    ids = begin_held(first, BODIES)
    collected: list[list[str]] = [[] for _ in ids]
    followers = [Follower(first.client.base_url, *pair) for pair in zip(ids, collected, strict=True)]
    wait_until_some_are_read(first, followers, collected)
    first.process.popen.terminate()
    for follower in followers:
        follower.join(LIMIT_S)
    assert first.process.wait()[0] == 0
    for events in collected:
        while events and '"code": "draining"' in events[-1].replace('":"', '": "'):
            events.pop()
    again = [Follower(second.client.base_url, *pair) for pair in zip(ids, collected, strict=True)]
    for follower in again:
        follower.join(LIMIT_S)
    check_all(second.client, ids, collected, BODIES)


def test_any_server_lists_cancels_deletes_and_goes_on_from_what_another_runs(replicas: list[Replica]) -> None:
    first, second = replicas
    first.gate.shut(after_steps=60)
    body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "background": True}
    cancelled, deleted = begin(first.client, body), begin(first.client, body)
    listed = second.client.get("/v1/completions").json()["data"]
    assert {entry["id"] for entry in listed} == {cancelled, deleted}
    answer = second.client.post(f"/v1/completions/{cancelled}/cancel").json()
    assert (answer["status"], answer["error"]["code"]) == ("cancelled", "cancelled")
    assert first.client.get(f"/v1/completions/{cancelled}").json() == answer
    first.gate.open()
    made = first.client.post("/v1/responses", json={"input": "A fox", "max_output_tokens": 9}).json()
    asked = {"input": "And then?", "previous_response_id": made["id"], "max_output_tokens": 9, "seed": 5}
    one, other = (replica.client.post("/v1/responses", json=asked).json() for replica in replicas)
    assert [item["content"] for item in one["output"]] == [item["content"] for item in other["output"]]
    assert second.client.delete(f"/v1/responses/{made['id']}").status_code == 200
    assert first.client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_a_key_begins_one_completion_whichever_server_gets_it_and_leads_on_after_a_kill(
    replicas: list[Replica],
) -> None:
    first, second = replicas
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "n": 2, "stream": True}
    headers = {"idempotency-key": "k"}
    first.gate.shut(after_steps=60)
    events: list[str] = []
    with first.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        buffer = ""
        for text in stream.iter_text():
            *whole, buffer = (buffer + text).split("\n\n")
            events += without_comments(whole)
            if len(events) > 20:
                break
        first.signal(signal.SIGKILL)
    event_id = last_id(events)
    assert event_id is not None
    rest = second.client.post("/v1/completions", json=body, headers={**headers, "last-event-id": event_id}).text
    events += without_comments(rest.removesuffix("\n\n").split("\n\n"))
    listed = second.client.get("/v1/completions").json()["data"]
    assert [(entry["status"], entry["completion_tokens"]) for entry in listed] == [("completed", 600)]
    assert events == events_of(second.client, listed[0]["id"])
    other = second.client.post("/v1/completions", json={**body, "max_tokens": 9}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


@pytest.mark.parametrize("replicas", [("--api-key", "one", "--api-key", "other")], indirect=True)
def test_of_what_one_key_began_at_a_server_another_sees_and_cancels_nothing_at_any(replicas: list[Replica]) -> None:
    mine, others = ({"authorization": f"Bearer {name}"} for name in ("one", "other"))
    first, second = replicas
    body = {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "seed": 7, "background": True}
    keyed = {"idempotency-key": "k"}
    told = {"input": "A fox", "max_output_tokens": 9, "seed": 7}
    response = first.client.post("/v1/responses", json=told, headers=mine).json()["id"]
    first.gate.shut(after_steps=60)
    began = first.client.post("/v1/completions", json=body, headers=mine | keyed).json()["id"]
    for replica in replicas:
        client = replica.client
        for path in (f"completions/{began}", f"completions/{began}/events", f"responses/{response}"):
            assert client.get(f"/v1/{path}", headers=others).json()["error"]["code"] == "completion_not_found"
        for path in (f"completions/{began}/cancel", f"responses/{response}/cancel"):
            assert client.post(f"/v1/{path}", headers=others).json()["error"]["code"] == "completion_not_found"
        refused = client.delete(f"/v1/responses/{response}", headers=others)
        assert refused.json()["error"]["code"] == "completion_not_found"
        assert client.get("/v1/completions", headers=others).json()["data"] == []
        going_on = client.post("/v1/responses", json=told | {"previous_response_id": response}, headers=others)
        assert going_on.json()["error"]["code"] == "completion_not_found"
    again = second.client.post("/v1/completions", json=body | {"seed": 8}, headers=others | keyed)
    assert again.status_code == 202, "the key of another owner is another key"
    first.gate.open()
    for replica in replicas:
        assert replica.client.get(f"/v1/completions/{began}/events", headers=mine).text.endswith("data: [DONE]\n\n")
        answer = replica.client.get(f"/v1/completions/{began}", headers=mine).json()
        assert (answer["status"], answer["usage"]["completion_tokens"]) == ("completed", 150)
        assert {entry["id"] for entry in replica.client.get("/v1/completions", headers=mine).json()["data"]} >= {began}


@pytest.mark.parametrize("replicas", [("--state-sync", "full")], indirect=True)
def test_without_its_database_a_server_answers_what_is_not_stored_and_goes_on_with_the_rest_later(
    replicas: list[Replica], postgres: PostgresServer
) -> None:
    first, second = replicas
    ids = begin_held(first, BODIES)
    collected: list[list[str]] = [[] for _ in ids]
    followers = [Follower(first.client.base_url, *pair) for pair in zip(ids, collected, strict=True)]
    wait_until_some_are_read(first, followers, collected)
    postgres.stop(signal.SIGQUIT)
    try:
        first.gate.open()
        for replica in replicas:
            plain = {"prompt": "Once", "max_tokens": 9, "seed": 1}
            assert replica.client.post("/v1/completions", json=plain).status_code == 200
            for path, body in (("completions", {**plain, "background": True}), ("responses", {"input": "A fox"})):
                refused = replica.client.post(f"/v1/{path}", json=body)
                assert (refused.status_code, refused.json()) == (503, {"error": AWAY})
                assert refused.headers["retry-after"] == "5"
            for path in ("completions/cmpl-unknown", "responses/resp_unknown", "responses/resp_unknown/input_items"):
                found = replica.client.get(f"/v1/{path}")
                assert (found.status_code, found.json()) == (503, {"error": AWAY})
            assert replica.client.get("/ready").status_code == 200
    finally:
        postgres.start()
    for follower in followers:
        follower.join(LIMIT_S)
    for replica in replicas:
        again = begin(replica.client, BODIES[0])
        assert choices_of(events_of(second.client, again)) == undisturbed(first.client, BODIES[:1])[0]
    check_all(second.client, ids, collected, BODIES)


def test_a_server_that_starts_without_its_database_serves_the_rest_until_that_is_there(
    postgres_url: str, postgres: PostgresServer
) -> None:
    plain, stored = {"prompt": "Once", "max_tokens": 9, "seed": 1}, BODIES[0]
    postgres.stop()
    process = Process(*FLAGS, "--state-url", postgres_url)
    try:
        with process.wait_until_ready() as client:
            assert client.post("/v1/completions", json=plain).status_code == 200
            for path in ("batches", "files", "completions", "completions/cmpl-unknown"):
                assert client.get(f"/v1/{path}").json() == {"error": AWAY}
            refused = client.post("/v1/completions", json=stored, headers={"idempotency-key": "k"})
            assert (refused.status_code, refused.json()) == (503, {"error": AWAY})
            assert refused.headers["retry-after"] == "5"
            postgres.start()
            process.wait_for_line("completions, files and batches are stored from now on")
            assert is_over(events_of(client, begin(client, stored)))
            assert len(client.get("/v1/completions").json()["data"]) == 1
            for path in ("batches", "files"):
                assert client.get(f"/v1/{path}").json()["data"] == []
            postgres.stop()
            process.popen.terminate()
            assert process.wait()[0] == 0
    finally:
        process.kill()


def test_a_server_that_its_database_turns_away_does_not_start(postgres_url: str) -> None:
    status, told = Process(*FLAGS, "--state-url", postgres_url.replace("/test", "/no-test")).wait()
    assert status == 1
    assert "gptserve: state-url: the journal in PostgreSQL cannot be used: connection failed: " in told
    assert 'database "no-test' in told


def test_commits_that_the_database_loses_in_a_crash_are_computed_again_or_said_to_be_lost(
    replicas: list[Replica], postgres: PostgresServer
) -> None:
    first, second = replicas
    ids = begin_held(first, BODIES)
    collected: list[list[str]] = [[] for _ in ids]
    followers = [Follower(second.client.base_url, *pair) for pair in zip(ids, collected, strict=True)]
    wait_until_some_are_read(first, followers, collected)
    postgres.stop(signal.SIGQUIT)
    postgres.start()
    first.gate.open()
    expected = undisturbed(second.client, BODIES)
    for completion_id, follower, events, choices in zip(ids, followers, collected, expected, strict=True):
        follower.join(LIMIT_S)
        answer = second.client.get(f"/v1/completions/{completion_id}")
        while not is_over(events) and answer.status_code == 200:
            events[:] = [event for event in events if not event.startswith('data: {"error":')]
            Follower(second.client.base_url, completion_id, events).join(LIMIT_S)
        if answer.status_code == 200:
            assert choices_of(events) == choices
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "completion_not_found")
