"""Completions that outlive their server: killed, told to stop, out of disk, started anew with the same folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gptserve.server.jobs.sqlite.database import FILE_NAME
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.api.test_background import check_ids, id_of
from tests.server.serving import LIMIT_S, MORTAL, ROOT, Process

FLAGS = ("--chat-template", "plain", "--max-num-seqs", "4", "--max-num-queued-reqs", "12", "--num-blocks", "512")
SMALL_QUEUE = ("--max-num-queued-reqs", "1")  # less than what a kill leaves under way
NUM_TOKENS = 150
# At 4 tokens a step the 1,350 tokens of seven bodies need three engines and the 2,400 of all need four, however fast.
STEPS_OF_A_LIFE, GOALS_OF_A_LIFE = 150, (300, 480)
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
SHAPES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"prompt": "There was a fox", "temperature": 0},
    {"prompt": "A badger", "logprobs": 3, "echo": True},
    {"prompt": "One day", "n": 2, "bad_words": ["the", "and"], "min_tokens": 99, "return_token_ids": True},
    {"prompt": ["In spring", "In winter"], "stop": ["zebra", "\n\nThe end of it"]},
    CHAT | {"logprobs": True, "top_logprobs": 2},
]
BODIES = [
    {**shape, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": seed, "background": True}
    for seed, shape in enumerate(SHAPES * 2)
]
Launch = Callable[..., Process]


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> EngineGate:
    return EngineGate(tmp_path_factory.mktemp("gate"))


@pytest.fixture
def launch(gate: EngineGate) -> Iterator[Launch]:
    launched: list[Process] = []

    def start(*flags: str) -> Process:
        launched.append(Process(*FLAGS, *flags, main=MORTAL, **{VARIABLE: str(gate.folder)}))
        return launched[-1]

    yield start
    for process in launched:
        process.kill()


def begin(client: httpx.Client, body: dict[str, Any]) -> str:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = client.post(path, json=body)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def events_of(client: httpx.Client, completion_id: str) -> list[str]:
    """Return all events of a completion once it has ended."""
    text = client.get(f"/v1/completions/{completion_id}/events").text
    return without_comments(text.removesuffix("\n\n").split("\n\n"))


def without_comments(events: list[str]) -> list[str]:
    """Return events without the comments that keep a connection alive on a slow machine."""
    return [event for event in events if not event.startswith(":")]


def choices_of(events: list[str]) -> list[list[dict[str, Any]]]:
    """Return what each choice got, event by event: what cannot depend on when or beside whom it was computed."""
    chunks = [json.loads(event.partition("data: ")[2]) for event in events[:-1]]
    parts = [chunk["choices"][0] for chunk in chunks]
    return [[part for part in parts if part["index"] == i] for i in range(1 + max(part["index"] for part in parts))]


def last_id(events: list[str]) -> str | None:
    """Return the id of the last event that has one; those that open a chat have none."""
    return next(filter(None, map(id_of, reversed(events))), None)


class Follower(threading.Thread):
    """A client that collects the events of a completion, from the one after the last it has, until it is cut off.

    With no id it begins anew.
    """

    def __init__(self, url: httpx.URL, completion_id: str, events: list[str]) -> None:
        super().__init__(daemon=True)
        self._url = f"{str(url).rstrip('/')}/v1/completions/{completion_id}/events"
        self._events = events
        self.start()

    def run(self) -> None:
        event_id = last_id(self._events)
        headers = {} if event_id is None else {"last-event-id": event_id}
        if event_id is None:
            self._events.clear()
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("GET", self._url, headers=headers, timeout=LIMIT_S) as response,
        ):
            if response.status_code == 204:  # it had all events but this one
                self._events.append("data: [DONE]")
            buffer = ""
            for text in response.iter_text():
                *whole, buffer = (buffer + text).split("\n\n")
                self._events.extend(without_comments(whole))


def is_over(events: list[str]) -> bool:
    return bool(events) and events[-1] == "data: [DONE]"


def wait_until_held(gate: EngineGate, follower: Follower, events: list[str]) -> None:
    """Wait until the engine computes no more and the follower has begun to read."""
    while not (gate.is_reached and events):
        follower.join(0.01)
        assert follower.is_alive()


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, or of a part of it."""
    return str(choice["text"] if "text" in choice else choice.get("message", choice.get("delta")).get("content") or "")


def wait_until_read(client: httpx.Client, completion_id: str, events: list[str], follower: Follower) -> None:
    """Wait until a follower has all that the server, whose engine is held, has of a completion, or more."""
    while follower.is_alive() and not is_over(had := list(events)):
        made = list(map(text_of, client.get(f"/v1/completions/{completion_id}").json()["choices"]))
        read = ["".join(map(text_of, parts)) for parts in choices_of([*had, ""])] if had else []
        if all(len(text) >= len(so_far) for text, so_far in itertools.zip_longest(read, made, fillvalue="")):
            return
        follower.join(0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("bodies", "least_kills"), [(BODIES[:7], 2), (BODIES, 3)], ids=["few", "many"])
def test_killed_again_and_again_every_completion_is_the_undisturbed_one(
    launch: Launch, gate: EngineGate, tmp_path: Path, bodies: list[dict[str, Any]], least_kills: int
) -> None:
    process = launch()
    with process.wait_until_ready() as client:
        undisturbed = []
        for body in bodies:
            completion_id = begin(client, body)
            undisturbed.append(choices_of(events_of(client, completion_id)))
    process.kill()
    assert undisturbed[0] != undisturbed[len(SHAPES)], "negative control: another seed is another text"

    generator, num_kills, ids = random.Random(7), 0, []
    collected: list[list[str]] = [[] for _ in bodies]
    while not all(map(is_over, collected)):
        gate.shut(after_steps=STEPS_OF_A_LIFE)
        process = launch("--state-dir", str(tmp_path), *(SMALL_QUEUE if ids else ()))
        with process.wait_until_ready() as client:
            ids = ids or [begin(client, body) for body in bodies]
            open_ = [(i, events) for i, events in zip(ids, collected, strict=True) if not is_over(events)]
            followers = [Follower(client.base_url, i, events) for i, events in open_]
            goal = sum(map(len, collected)) + generator.randint(*GOALS_OF_A_LIFE)
            while sum(map(len, collected)) < goal and not gate.is_reached and any(f.is_alive() for f in followers):
                followers[0].join(0.01)
            if not all(map(is_over, collected)):
                os.killpg(process.popen.pid, signal.SIGKILL)
                num_kills += 1
            for follower in followers:
                follower.join(LIMIT_S)
        process.kill()
    assert num_kills >= least_kills

    gate.open()
    process = launch("--state-dir", str(tmp_path))
    with process.wait_until_ready() as client:
        for completion_id, events, expected in zip(ids, collected, undisturbed, strict=True):
            assert events == events_of(client, completion_id), "nothing twice, nothing missing, and nothing else"
            check_ids(events[:-1])
            assert choices_of(events) == expected
            whole = client.get(f"/v1/completions/{completion_id}").json()
            assert whole["status"] == "completed"
            for choice, parts in zip(whole["choices"], expected, strict=True):
                assert text_of(choice) == "".join(map(text_of, parts))
    process.popen.terminate()
    assert process.wait()[0] == 0


def put_back(snapshot: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(snapshot, folder)


def cut_power(folder: Path, rng: random.Random) -> None:
    """Lose what SQLite has not synced, as its WAL is between two checkpoints: everything after some byte."""
    wal = folder / f"{FILE_NAME}-wal"
    os.truncate(wal, rng.randrange(wal.stat().st_size + 1))


OF_FIFTY = {"max_tokens": 40, "min_tokens": 20, "ignore_eos": True, "background": True}
FIFTY: list[dict[str, Any]] = [
    {"n": 1 + seed % 3, **shape, **OF_FIFTY, "seed": seed}
    for seed, shape in zip(range(50), itertools.cycle(SHAPES), strict=False)
]
DISTURBANCES = ["kill"] * 10 + ["older snapshot"] * 5 + ["power cut"] * 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_older_snapshots_and_power_cuts_under_fifty_completions(
    launch: Launch, gate: EngineGate, tmp_path: Path
) -> None:
    """With drafts, and up to three choices: every reader that goes on with its last id has the undisturbed text."""
    large_queue, at_once = ("--max-num-queued-reqs", "300"), ("--max-num-seqs", "32", "--speculative-ngram", "2")
    process = launch(*large_queue)
    with process.wait_until_ready() as client:
        ids = [begin(client, body) for body in FIFTY]
        undisturbed = [choices_of(events_of(client, completion_id)) for completion_id in ids]
    process.kill()

    rng, folder = random.Random(11), tmp_path / "state"
    flags = ("--state-dir", str(folder), *large_queue, *at_once)
    gate.shut()
    process = launch(*flags)
    with process.wait_until_ready() as client:
        ids = [begin(client, body) for body in FIFTY]
        process.popen.terminate()
        assert process.wait()[0] == 0  # a power cut may cost what has just begun, so this is synced
    snapshots = [shutil.copytree(folder, tmp_path / "snapshot-0")]
    collected: list[list[str]] = [[] for _ in FIFTY]
    num_resumed = num_repeated = 0
    for number, disturbance in enumerate(rng.sample(DISTURBANCES, len(DISTURBANCES)), 1):
        gate.shut(after_steps=12)
        process = launch(*flags)
        with process.wait_until_ready() as client:
            open_ = [(i, events) for i, events in zip(ids, collected, strict=True) if not is_over(events)]
            num_resumed += sum(last_id(events) is not None for _, events in open_)
            followers = [Follower(client.base_url, i, events) for i, events in open_]
            while not gate.is_reached and any(follower.is_alive() for follower in followers):
                followers[0].join(0.01)
            for (completion_id, events), follower in zip(open_, followers, strict=True):
                wait_until_read(client, completion_id, events, follower)
            os.killpg(process.popen.pid, signal.SIGKILL)
            for follower in followers:
                follower.join(LIMIT_S)
        process.kill()
        if disturbance == "older snapshot":
            put_back(rng.choice(snapshots), folder)
        elif disturbance == "power cut":
            cut_power(folder, rng)
        snapshots.append(shutil.copytree(folder, tmp_path / f"snapshot-{number}"))

    gate.open()
    process = launch(*flags)
    with process.wait_until_ready() as client:
        for completion_id, events, expected in zip(ids, collected, undisturbed, strict=True):
            if not is_over(events):
                follower = Follower(client.base_url, completion_id, events)
                follower.join(LIMIT_S)
            check_ids(events[:-1])
            assert choices_of(events) == expected, "of each choice nothing twice, nothing missing, nothing else"
            later = events_of(client, completion_id)
            assert (choices_of(later), last_id(later)) == (expected, last_id(events))
            num_repeated += later != events
    assert num_resumed > 0, "negative control: readers were cut off"
    assert num_repeated > 0, "negative control: the order of the choices has changed"


@pytest.mark.slow
def test_a_killed_engine_costs_a_background_completion_nothing(
    launch: Launch, gate: EngineGate, tmp_path: Path
) -> None:
    gate.shut(after_steps=20)
    process = launch("--state-dir", str(tmp_path))
    body = BODIES[0] | {"max_tokens": 500}
    events: list[str] = []
    with process.wait_until_ready() as client:
        completion_id = begin(client, body)
        follower = Follower(client.base_url, completion_id, events)
        wait_until_held(gate, follower, events)
        process.engine().kill()
        gate.open()
        follower.join(LIMIT_S)
        assert is_over(events)
        assert events == events_of(client, completion_id)
        assert choices_of(events) == choices_of(events_of(client, begin(client, body)))
        restarts = [line for line in client.get("/metrics").text.splitlines() if "engine_restarts_total{" in line]
        assert sum(float(line.split()[-1]) for line in restarts) == 1, "negative control: the engine did die"


@pytest.mark.slow
def test_told_to_stop_it_leaves_background_work_to_the_next_start(
    launch: Launch, gate: EngineGate, tmp_path: Path
) -> None:
    gate.shut(after_steps=20)
    process = launch("--state-dir", str(tmp_path))
    events: list[str] = []
    with process.wait_until_ready() as client:
        completion_id = begin(client, BODIES[0] | {"max_tokens": 1000})
        follower = Follower(client.base_url, completion_id, events)
        wait_until_held(gate, follower, events)
        process.popen.terminate()
        follower.join(LIMIT_S)
    status, log = process.wait()
    gate.open()
    assert status == 0
    assert "cut off" not in log
    end = json.loads(events.pop().removeprefix("data: "))["error"]
    assert (end["code"], "goes on once it has been started again" in end["message"]) == ("draining", True)
    assert len(events) < 1000

    process = launch("--state-dir", str(tmp_path))
    with process.wait_until_ready() as client:
        Follower(client.base_url, completion_id, events).join(LIMIT_S)
        assert events == events_of(client, completion_id)
    assert "resuming 1 background completion" in "".join(process.lines)


@pytest.mark.slow
def test_without_a_folder_background_work_is_waited_for(launch: Launch, gate: EngineGate) -> None:
    gate.shut(after_steps=20)
    process = launch("--shutdown-timeout", "600")
    events: list[str] = []
    with process.wait_until_ready() as client:
        completion_id = begin(client, BODIES[0])
        follower = Follower(client.base_url, completion_id, events)
        wait_until_held(gate, follower, events)
        process.popen.terminate()
        process.wait_for_line("waiting up to 600 s for 1 request")
        gate.open()
        follower.join(LIMIT_S)
    assert is_over(events)
    assert len(choices_of(events)[0]) == len(events) - 1 > 100
    assert process.wait()[0] == 0


@pytest.mark.slow
def test_a_changed_model_takes_nothing_up(launch: Launch, gate: EngineGate, tmp_path: Path) -> None:
    process = launch("--state-dir", str(tmp_path))
    with process.wait_until_ready() as client:
        whole = begin(client, BODIES[0] | {"max_tokens": 3})
        events = events_of(client, whole)
        ended = client.get(f"/v1/completions/{whole}").json()
        gate.shut()
        cut = begin(client, BODIES[0] | {"max_tokens": 1000})
        process.kill()
    gate.open()
    process = launch("--state-dir", str(tmp_path), "--dtype", "float32")
    with process.wait_until_ready() as client:
        found = client.get(f"/v1/completions/{cut}").json()
        assert (found["status"], found["error"]["code"]) == ("failed", "model_changed")
        assert client.get(f"/v1/completions/{whole}").json() == ended, "it has the same tokenizer"
        assert events_of(client, whole) == events


@pytest.mark.slow
def test_a_full_disk_fails_background_work_and_serves_the_rest(launch: Launch, tmp_path: Path) -> None:
    process = launch("--state-dir", str(tmp_path))
    with process.wait_until_ready() as client:
        whole = begin(client, BODIES[0] | {"max_tokens": 3})
        events = events_of(client, whole)
        server = psutil.Process(process.popen.pid)
        _, hard = server.rlimit(psutil.RLIMIT_FSIZE)
        server.rlimit(psutil.RLIMIT_FSIZE, (2**16, hard))
        statuses = []
        while 500 not in statuses:
            body = BODIES[2] | {"background": False, "prompt": "x" * 1000, "max_tokens": 8}
            answer = client.post("/v1/completions", json=body, headers={"idempotency-key": str(len(statuses))})
            statuses.append(answer.status_code)
        direct = client.post("/v1/completions", json=BODIES[0] | {"background": False, "max_tokens": 3})
        assert (answer.json()["error"]["code"], direct.status_code) == ("journal_failed", 200)
        assert events_of(client, whole) == events

        server.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
        assert client.get(f"/v1/completions/{begin(client, BODIES[0] | {'max_tokens': 3})}").status_code == 200
    process.popen.terminate()
    assert process.wait()[0] == 0


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: (folder / FILE_NAME).write_bytes(b"not a database " * 1000), "file is not a database"),
        (lambda folder: (folder / FILE_NAME).mkdir(), "Is a directory"),
    ],
)
def test_a_folder_that_is_no_use_ends_the_start(
    launch: Launch, tmp_path: Path, make: Callable[[Path], object], expected: str
) -> None:
    make(tmp_path)
    status, log = launch("--state-dir", str(tmp_path)).wait()
    assert status == 1
    last = log.splitlines()[-1]
    assert last == f"gptserve: state-dir: the journal {tmp_path / FILE_NAME} cannot be used: {expected}"


@pytest.mark.slow
def test_two_servers_in_one_folder_are_one_too_many(launch: Launch, tmp_path: Path) -> None:
    first = launch("--state-dir", str(tmp_path))
    with first.wait_until_ready() as client:
        status, log = launch("--state-dir", str(tmp_path)).wait()
        assert client.get("/health").status_code == 200
    assert status == 1
    assert log.splitlines()[-1].endswith("cannot be used: another server is using it")


@pytest.mark.slow
def test_the_examples_of_the_documentation_work(launch: Launch, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    page = (ROOT / "docs" / "stored-completions.md").read_text(encoding="utf-8")
    text = page.partition("\n## The Responses API\n")[0]
    begin_it, follow_it, with_key = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    [shown] = re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)
    process = launch("--state-dir", str(tmp_path))
    with process.wait_until_ready() as client:
        url = str(client.base_url).rstrip("/")

        def output_of(script: str) -> str:
            script = script.replace("http://127.0.0.1:8000", url).replace("curl ", "curl -sS --fail ")
            done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode == 0, done.stderr
            return done.stdout

        begun = json.loads(output_of(begin_it))
        assert begun.keys() == json.loads(shown).keys()
        completion_id = begun["id"]
        events = "\n\n".join(events_of(client, completion_id)) + "\n\n"
        result = client.get(f"/v1/completions/{completion_id}").text
        ids = [event_id for event_id in map(id_of, events.split("\n\n")) if event_id is not None]
        after = events[events.index(next(f"id: {i}\n" for i in ids if int(i) > 5)) :]
        assert output_of(re.sub("id=.*", f"id={completion_id}", follow_it)) == result + events + after + after + result
        assert output_of(with_key) == output_of(with_key)
