"""Routers before servers that share nothing: what they pass on, and streams that go on when a server is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.server.cli.replicas import Replicas
from tests.clients.environments import environments
from tests.clients.nginx import nginx_template
from tests.clients.servers import served
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.serving import LIMIT_S, MAIN, MORTAL, Process

pytestmark = pytest.mark.clients
NGINX = nginx_template(
    "location / {{ proxy_pass http://servers; proxy_http_version 1.1; proxy_buffering off; }}",
    upstream="upstream servers {{ {servers} }}",
)
HAPROXY = """
defaults
    mode http
    balance leastconn
    option redispatch
    option httpchk GET /health
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    {servers}
"""
# Of a program: its settings, the lines that name the servers in them, and the flag before the file.
PROGRAMS = {"nginx": (NGINX, "server {1};", "-c"), "haproxy": (HAPROXY, "server s{0} {1} check", "-f")}
# Of the router in an environment of its own: the command. All take the same flags.
COMMANDS = {
    "vllm-router": ("vllm-router",),
    "sglang-router": ("python", "-m", "sglang_router.launch_router"),
    "smg": ("smg", "launch"),
}
EVERYTHING = {"POST", "stream", "fields", "x-request-id", "Idempotency-Key", "Last-Event-ID", "GET by id", "GET events"}
PASSED_ON = {
    "nginx": EVERYTHING,
    "haproxy": EVERYTHING,
    "vllm-router": EVERYTHING,
    "sglang-router": {"POST", "stream", "fields", "x-request-id"},
    "smg": {"POST", "stream", "fields", "x-request-id"},
}
"""What each passes on; docs/deployment.md has it as a table."""
FLAGS = ("--chat-template", "plain", "--allowed-hosts", "*", "--num-blocks", "512", "--served-model-name", "m")
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "p",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
    },
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "Once upon a time", "frequency_penalty": 0.5, "ignore_eos": True}),
    ("completions", {"prompt": "A fox", "n": 3, "logprobs": 2, "ignore_eos": True}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Who?"}], "response_format": SCHEMA}),
]


@contextlib.contextmanager
def routed(name: str, folder: Path, *servers: str) -> Iterator[str]:
    """Run a router before these servers; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    if name in PROGRAMS:
        program, (template, line, flag) = shutil.which(name), PROGRAMS[name]
        if program is None:
            pytest.skip(f"{name} is not installed")
        listed = "\n    ".join(line.format(i, url.removeprefix("http://")) for i, url in enumerate(servers))
        (folder / "settings").write_text(template.format(folder=folder, port=port, servers=listed))
        command = [program, flag, str(folder / "settings")]
    else:
        environment = environments()[name]
        if not environment.is_made:
            pytest.skip(f"build/clients/{name} is missing or old; `make clients` makes it")
        program, *rest = COMMANDS[name]
        at = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--policy", "round_robin")
        command = [str(environment.folder / "bin" / program), *rest, *at, "--worker-urls", *servers]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT_S
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    """Whether the router has found a server."""
    with contextlib.suppress(httpx.TransportError):
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
    return False


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(*FLAGS) as url:
        yield url.removesuffix("/v1")


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_a_router_passes_on(name: str, server: str, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "The cat", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    found = set()
    with routed(name, tmp_path, server) as router, httpx.Client(base_url=router, timeout=LIMIT_S) as http:
        headers = {"idempotency-key": name, "x-request-id": f"of-{name}"}
        whole = http.post("/v1/completions", json=body, headers=headers)
        stream = http.post("/v1/completions", json=body | {"stream": True}).text
        headers = {"idempotency-key": f"{name}2", "last-event-id": "4"}
        later = http.post("/v1/completions", json=body | {"stream": True}, headers=headers)
        completion_id = whole.json()["id"]
        kept = [entry["id"] for entry in httpx.get(f"{server}/v1/completions").json()["data"]]
        begun = httpx.post(f"{server}/v1/completions", json=body | {"background": True}).json()["id"]
        checks = {
            "POST": whole.status_code == 200,
            "stream": stream.endswith("data: [DONE]\n\n") and stream.count("data: ") == 7,
            "fields": len(whole.json()["choices"][0].get("token_ids") or ()) == 6,
            "Idempotency-Key": completion_id in kept,
            "Last-Event-ID": later.status_code == 200 and later.text.count("data: {") == 2,
            "x-request-id": whole.headers.get("x-request-id") == f"of-{name}",
            "GET by id": http.get(f"/v1/completions/{begun}").status_code == 200,
            "GET events": http.get(f"/v1/completions/{begun}/events").status_code == 200,
        }
        found = {check for check, passes in checks.items() if passes}

    assert found == PASSED_ON[name]


@pytest.mark.parametrize("name", ["vllm-router", "nginx", "haproxy"])
def test_streams_go_on_through_the_router_when_their_server_is_killed(name: str, tmp_path: Path) -> None:
    EngineGate(tmp_path).shut(after_steps=60)  # it cannot end an answer
    held = Process(*FLAGS, main=MORTAL, **{VARIABLE: str(tmp_path)})
    other = Process(*FLAGS, main=MAIN)
    bodies = [(path, {**body, "model": "m", "max_tokens": 90, "stream": True, "seed": 7}) for path, body in BODIES] * 2
    try:
        with held.wait_until_ready() as first, other.wait_until_ready() as second:
            urls = [str(http.base_url).rstrip("/") for http in (first, second)]
            with routed(name, tmp_path, *urls) as router, ThreadPoolExecutor(len(bodies)) as pool:
                readers = [_Reader(router, path, body, f"key-{i}") for i, (path, body) in enumerate(bodies)]
                reading = [pool.submit(reader.read) for reader in readers]
                until = time.monotonic() + LIMIT_S
                while not any(reader.events for reader in readers) or not EngineGate(tmp_path).is_reached:
                    assert time.monotonic() < until
                    time.sleep(0.01)
                os.killpg(held.popen.pid, signal.SIGKILL)
                for result in reading:
                    result.result(LIMIT_S)
            # Other keys, as vllm-router writes the body anew, and a key is for one body; the seed makes them the same.
            expected = [_Reader(urls[1], path, body, f"direct-{i}") for i, (path, body) in enumerate(bodies)]
            for reader in expected:
                reader.read()
            assert sum(reader.num_lost for reader in readers) > 0, "some were at the server that was killed"
            for reader, undisturbed in zip(readers, expected, strict=True):
                assert sorted(reader.events) == sorted(undisturbed.events), "nothing is lost, repeated or different"
    finally:
        held.kill()
        other.kill()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_line_goes_on_through_the_router_when_a_server_is_killed(name: str, tmp_path: Path) -> None:
    EngineGate(tmp_path).shut(after_steps=60)  # it cannot end an answer
    held = Process(*FLAGS, main=MORTAL, **{VARIABLE: str(tmp_path)})
    other = Process(*FLAGS, main=MAIN)
    bodies = [{"prompt": "A fox", "max_tokens": 90, "ignore_eos": True, "seed": seed} for seed in range(6)]

    def read(urls: list[str], body: dict[str, Any], pieces: list[str]) -> str:
        for piece in Replicas(urls, None).stream("/v1/completions", {**body, "stream": True}):
            pieces.append(piece.text)  # noqa: PERF401 -- each is seen as it comes
        return "".join(pieces)

    try:
        with held.wait_until_ready() as first, other.wait_until_ready() as second:
            urls = [str(http.base_url).rstrip("/") for http in (first, second)]
            with routed(name, tmp_path, *urls) as router, ThreadPoolExecutor(len(bodies)) as pool:
                pieces: list[list[str]] = [[] for _ in bodies]
                reading = [pool.submit(read, [router, router], *each) for each in zip(bodies, pieces, strict=True)]
                until = time.monotonic() + LIMIT_S
                while not (all(pieces) and EngineGate(tmp_path).is_reached):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                os.killpg(held.popen.pid, signal.SIGKILL)
                texts = [result.result(LIMIT_S) for result in reading]
            assert texts == [read([urls[1]], body, []) for body in bodies]
    finally:
        held.kill()
        other.kill()


class _Reader:
    """Reads a stream to its end, again from its last event whenever it is cut off. `events`: id and choices."""

    def __init__(self, url: str, path: str, body: dict[str, Any], key: str) -> None:
        self._url, self._body, self._key = f"{url}/v1/{path}", body, key
        self.events: list[str] = []
        self.num_lost = 0

    def read(self) -> None:
        event_id, until = None, time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            headers = {"idempotency-key": self._key} | ({} if event_id is None else {"last-event-id": event_id})
            given, answer = None, (0, "")
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.stream("POST", self._url, json=self._body, headers=headers, timeout=LIMIT_S) as response,
            ):
                if response.status_code == 204:
                    return
                for line in response.iter_lines():
                    answer = response.status_code, line or answer[1]
                    if line.startswith("id: "):
                        given = line.removeprefix("id: ")
                    elif line == "data: [DONE]":
                        return
                    elif line.startswith("data: ") and given is not None:
                        self.events.append(given + line.partition('"choices"')[2])
                        event_id, given = given, None
            self.num_lost += 1
        raise AssertionError(f"the stream never ended: {answer}")
