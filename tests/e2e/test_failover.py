"""Two servers that share nothing: one is killed, and its answer goes on at the other, which never saw it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.serving import LIMIT_S, MAIN, MORTAL, ROOT, Process

FLAGS = ("--chat-template", "plain", "--max-num-seqs", "4", "--num-blocks", "512")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Process]:
    """A server whose engine stops after some steps, so that it cannot end an answer before it is killed."""
    EngineGate(tmp_path).shut(after_steps=40)
    process = Process(*FLAGS, main=MORTAL, **{VARIABLE: str(tmp_path)})
    yield process
    process.kill()


@pytest.fixture
def other() -> Iterator[Process]:
    process = Process(*FLAGS)
    yield process
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("complete", "Once upon a time"), ("chat",)], ids=["complete", "chat"])
def test_the_text_of_a_server_that_is_killed_goes_on_at_the_other(
    command: tuple[str, ...], held: Process, other: Process
) -> None:
    with held.wait_until_ready() as first, other.wait_until_ready() as second:
        urls = ("--url", str(first.base_url), "--url", str(second.base_url))
        asking = subprocess.Popen(
            [sys.executable, "-c", MAIN, *command, "--max-tokens", "150", *urls],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        )
        assert asking.stdin is not None
        asking.stdin.write(b"Tell me a story.")
        asking.stdin.close()
        assert asking.stdout is not None
        begun = os.read(asking.stdout.fileno(), 1)  # the first token is there, the last cannot be
        os.killpg(held.popen.pid, signal.SIGKILL)
        text = (begun + asking.stdout.read()).decode()
        asking.stdout.close()

        assert asking.wait(LIMIT_S) == 0
        assert text == kept_text(second) + "\n", "nothing is lost, repeated or different"


def kept_text(client: httpx.Client) -> str:
    """Return the text of the one completion that a server has kept, from its first token on."""
    [entry] = client.get("/v1/completions").json()["data"]
    [choice] = client.get(f"/v1/completions/{entry['id']}").json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
