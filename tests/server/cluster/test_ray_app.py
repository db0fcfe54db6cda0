"""Streams through Ray Serve go on when an engine, a node or a server is killed. A real cluster, on this machine."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.server.cluster.ray_nodes import LIMIT_S, RayNodes

ON_ENGINES = {"num_cpus": 0, "resources": {"engines": 0.5}}
SERVERS = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0, "resources": {"servers": 0.5}}}
NUM_BEGUN = 25  # tokens of each stream before the kill
PROMPTS = ["Once upon a time", "The old sailor", "In a small village", "A fox and a crow"]
KINDS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7, "temperature": 1.0},
    {"n": 3, "logprobs": 2, "presence_penalty": 0.4},
    {"structured_outputs": {"regex": "([a-z]{1,9} ){60,90}"}},
    {"repetition_penalty": 1.2, "top_p": 0.9, "logprobs": 0},
]
BODIES = [
    {"prompt": prompt, "max_tokens": 200, "seed": 7 * i + j, "stream": True, "return_token_ids": True, **kind}
    for i, prompt in enumerate(PROMPTS)
    for j, kind in enumerate(KINDS)
]


@dataclass
class Choice:
    """What a stream said of a choice, whose last tokens may come in one event or in two."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


Choices = dict[int, Choice]


class Reader:
    """Reads streams, and waits when all have begun until it is told to go on."""

    def __init__(self, url: str, num_streams: int, then: Callable[[], object] = lambda: None) -> None:
        self._url = url
        self._begun = threading.Barrier(num_streams, then)

    def read(self, body: dict[str, Any], key: str | None = None) -> Choices:
        """Return what a stream says of each choice. With a key it asks again if it is cut."""
        choices: Choices = defaultdict(Choice)
        headers = {} if key is None else {"Idempotency-Key": key}
        waits, ended = True, False
        with httpx.Client(base_url=self._url, timeout=LIMIT_S) as client:
            while not ended:
                try:
                    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                        assert response.status_code == 200, response.read()
                        for line in response.iter_lines():
                            if line.startswith("id: "):
                                headers["Last-Event-ID"] = line.removeprefix("id: ")
                            ended = _take(line, choices) or ended
                            if waits and len(choices[0].token_ids) >= NUM_BEGUN:
                                waits = False
                                self._begun.wait(LIMIT_S)
                    assert ended or key is not None, "the stream was cut"
                except httpx.TransportError:
                    if key is None:
                        raise
        return dict(choices)


def _take(line: str, choices: Choices) -> bool:
    """Add what a line says; return whether it is the last."""
    if line == "data: [DONE]":
        return True
    if line.startswith("data: "):
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            found = choices[choice["index"]]
            found.text += choice["text"]
            found.token_ids += choice["token_ids"]
            found.logprobs += (choice["logprobs"] or {}).get("token_logprobs", ())
            found.finish_reason = choice["finish_reason"]
    return False


def read_all(reader: Reader, keys: Sequence[str | None] = (None,) * len(BODIES)) -> list[Choices]:
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(reader.read, BODIES, keys))


def check(found: list[Choices], undisturbed: list[Choices]) -> None:
    for body, got, wanted in zip(BODIES, found, undisturbed, strict=True):
        assert got == wanted, body


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    engines = {"autoscaling_config": None, "num_replicas": 2, "ray_actor_options": ON_ENGINES}
    arguments: dict[str, object] = {"num-threads": 1, "num-blocks": 1024, "max-num-seqs": 64}
    with RayNodes(3, arguments, {"Engine": engines, "Ingress": SERVERS}) as nodes:
        yield nodes


@pytest.mark.slow
def test_streams_go_on_whatever_is_killed(nodes: RayNodes) -> None:
    undisturbed = read_all(Reader(nodes.url, len(BODIES)))
    assert all(len(choices) == body.get("n", 1) for choices, body in zip(undisturbed, BODIES, strict=True))

    def kill(deployment: str) -> None:
        nodes.replicas(deployment)[0].kill()

    check(read_all(Reader(nodes.url, len(BODIES), lambda: kill("Engine"))), undisturbed)
    nodes.heal("Engine", 2)
    keys = [f"key-{i}" for i in range(len(BODIES))]
    check(read_all(Reader(nodes.url, len(BODIES), lambda: kill("Ingress")), keys), undisturbed)
    nodes.heal("Ingress", 2)
    check(read_all(Reader(nodes.url, len(BODIES), lambda: nodes.tell("lose a node"))), undisturbed)
