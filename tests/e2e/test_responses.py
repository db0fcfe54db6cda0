"""A response whose engine dies and whose server is killed: its reader goes on by `starting_after`, to the same end."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.serving import MORTAL, Process

FLAGS = ("--chat-template", "plain")
ASKED = {"input": "Tell me a story.", "max_output_tokens": 60, "ignore_eos": True, "seed": 3, "temperature": 0.9}
STEPS_OF_A_LIFE = 20
OF_ONE_RESPONSE = {"id", "created_at", "item_id", "cached_tokens"}
Event = dict[str, Any]


def events_of(response: httpx.Response) -> Iterator[Event]:
    """Yield the events of a stream as they come."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def answer_to(client: httpx.Client, **body: Any) -> list[Event]:
    with client.stream("POST", "/v1/responses", json=body) as response:
        return list(events_of(response))


def without_ids(value: Any) -> Any:
    """Return what does not differ between two responses to the same request."""
    if isinstance(value, dict):
        return {name: without_ids(entry) for name, entry in value.items() if name not in OF_ONE_RESPONSE}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stream_goes_on_through_a_dead_engine_and_a_killed_server(tmp_path: Path) -> None:
    gate, flags = EngineGate(tmp_path), (*FLAGS, "--state-dir", str(tmp_path / "state"))
    body = {**ASKED, "background": True, "stream": True}
    gate.shut(after_steps=STEPS_OF_A_LIFE)
    process = Process(*flags, main=MORTAL, **{VARIABLE: str(tmp_path)})
    try:
        with process.wait_until_ready() as client, client.stream("POST", "/v1/responses", json=body) as response:
            stream = events_of(response)
            events = list(itertools.islice(stream, STEPS_OF_A_LIFE // 2))
            process.engine().send_signal(signal.SIGKILL)
            process.wait_for_line("the engine is ready again")
            events += itertools.islice(stream, STEPS_OF_A_LIFE)  # more than one engine makes
            os.killpg(process.popen.pid, signal.SIGKILL)
    finally:
        process.kill()
    assert events[-1]["type"] == "response.output_text.delta", "it is not done"

    gate.open()
    process = Process(*flags, main=MORTAL, **{VARIABLE: str(tmp_path)})
    try:
        with process.wait_until_ready() as client:
            path = f"/v1/responses/{events[0]['response']['id']}"
            rest = {"stream": "true", "starting_after": events[-1]["sequence_number"]}
            with client.stream("GET", path, params=rest) as response:
                events += events_of(response)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["response"] == client.get(path).json()

            undisturbed = without_ids(answer_to(client, **body))
            assert without_ids(events) == undisturbed
            assert without_ids(answer_to(client, **(body | {"seed": 4}))) != undisturbed, "negative control"
        process.popen.terminate()
        assert process.wait()[0] == 0
    finally:
        process.kill()
