"""A process that starts before its engine is known: it imports torch, is taken once, and keeps no interpreter alive."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing import active_children

import pytest

from gptserve.engine.process.engine_process import end_ahead, start_ahead
from gptserve.engine.process.loop import Report, StepEngine
from gptserve.engine.process.process_client import ProcessClient
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import LIMIT_S, collect, expected, make_request, run

WITH_TORCH, WITHOUT_TORCH = 2001, 2000


def load(report: Report) -> StepEngine:
    """Load an engine whose vocabulary says whether torch was imported, once what imports it has ended."""
    for thread in threading.enumerate():
        if thread.name == "gptserve-torch":
            thread.join()
    return fake.load(report=report, vocab_size=WITH_TORCH if "torch" in sys.modules else WITHOUT_TORCH)


def test_process_started_ahead_imports_torch_and_becomes_the_next_engine_alone() -> None:
    async def test() -> None:
        start_ahead()
        (ahead,) = active_children()
        first, second = ProcessClient(load), ProcessClient(load)
        await first.start()
        assert [child.pid for child in active_children()] == [ahead.pid]
        request = make_request("a", 3)
        assert await collect(first.submit([request])) == {"a": expected(request)}
        await second.start()
        assert (first.info.vocab_size, second.info.vocab_size) == (WITH_TORCH, WITHOUT_TORCH)
        await first.close()
        await second.close()
        assert active_children() == []

    run(test())


@pytest.mark.parametrize("before", ["", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); "])
def test_process_ahead_that_nobody_takes_or_that_cannot_start_ends_with_the_interpreter(before: str) -> None:
    code = f"from gptserve.engine.process.engine_process import start_ahead; {before}start_ahead()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FORKED = """
import asyncio, os
from multiprocessing import active_children
from gptserve.engine.process.engine_process import EngineProcess, start_ahead
start_ahead(forks=True)
(ahead,) = active_children()
from gptserve.engine.process.process_client import ProcessClient
from tests.engine.client_harness import collect, expected, make_request
from tests.engine.process.test_engine_process import WITH_TORCH, load
async def test():
    client = ProcessClient(load)
    await client.start()
    assert [child.pid for child in active_children()] == [ahead.pid]
    assert client.info.vocab_size == WITH_TORCH
    request = make_request("a", 3)
    assert await collect(client.submit([request])) == {"a": expected(request)}
    await client.close()
asyncio.run(test())
assert active_children() == []
left = EngineProcess(forks=True)
left.connection.close()
left.process.join()  # it has no copy of this end, so it ends
assert left.process.exitcode == 0
left.release()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libraries do not stand a fork")
def test_process_ahead_that_was_forked_becomes_the_engine_and_ends_with_the_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_process_ahead_is_started_once_and_can_be_ended() -> None:
    async def test() -> None:
        start_ahead()
        (ahead,) = active_children()
        start_ahead()
        assert [child.pid for child in active_children()] == [ahead.pid]
        end_ahead()
        assert active_children() == []
        end_ahead()
        client = ProcessClient(load)
        await client.start()
        assert client.info.vocab_size == WITHOUT_TORCH
        await client.close()

    run(test())
