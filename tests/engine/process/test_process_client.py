"""What only an engine in its own process promises: its death, its parent's, signals, a pipe nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from gptserve.engine.child import SPINS
from gptserve.engine.errors import DeathKind, EngineDiedError, EngineStartError
from gptserve.engine.process.factory import load_engine_first
from gptserve.engine.process.process_client import ProcessClient
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import (
    ENDLESS,
    LIMIT_S,
    collect,
    expected,
    first_output,
    first_tokens,
    make_request,
    run,
    started,
)
from tests.engine.runs import make_config


def make_process(limit_s: float = LIMIT_S, **options: str) -> ProcessClient:
    return ProcessClient(functools.partial(fake.load, **options), shutdown_limit_s=limit_s)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (fake.EXIT, r"^the engine process ended with exit code 7$"),
        (fake.KILL, r"^the engine process was killed by signal 9 \(Killed\), as the system does when memory runs out$"),
    ],
)
def test_death_of_the_process_ends_streams_with_its_cause(what: int, cause: str) -> None:
    async def test() -> None:
        client = make_process()
        await client.start()
        stream = client.submit([make_request("a", ENDLESS)])
        await first_output(stream)
        client.submit([make_request("b", first=what)])
        with pytest.raises(EngineDiedError, match=cause):
            await collect(stream)
        raise await client.wait_until_dead()

    with pytest.raises(EngineDiedError, match=cause):
        run(test())  # without close: a process that died leaves nothing


def test_process_that_died_holds_no_descriptor_while_its_client_is_kept() -> None:
    async def test() -> None:
        resource_tracker.ensure_running()  # which the first start would open, and keep
        num_before = psutil.Process().num_fds()
        client = make_process()
        await client.start()
        client.kill("the test kills it", DeathKind.STALLED)
        await client.wait_until_dead()
        assert psutil.Process().num_fds() == num_before

    run(test())


def test_death_during_the_load_fails_the_start() -> None:
    async def test() -> None:
        with pytest.raises(EngineStartError, match="killed by signal 9"):
            await make_process(loading="is killed").start()

    run(test())


def test_factory_that_cannot_reach_the_process_fails_the_start() -> None:
    async def test() -> None:
        client = ProcessClient(lambda report: fake.load())
        with pytest.raises(EngineStartError, match="could not be started"):
            await client.start()
        await client.close()

    run(test())


def test_ctrl_c_and_sigterm_do_not_reach_the_engine_at_any_moment() -> None:
    async def test() -> None:
        resource_tracker._resource_tracker._stop()  # the first start in an interpreter starts it anew
        client = make_process()
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        send_to_engine(signal.SIGINT, signal.SIGTERM)  # its interpreter has hardly begun
        await starting
        try:
            request = make_request("a", 500)
            stream = client.submit([request])
            begun = await first_tokens(stream)
            send_to_engine(signal.SIGINT, signal.SIGTERM)
            assert [*begun, *(await collect(stream))["a"]] == expected(request)
        finally:
            await client.close()

    run(test())


def send_to_engine(*signals: signal.Signals) -> int:
    (pid,) = [child.pid for child in active_children()]
    for number in signals:
        os.kill(pid, number)
    return pid


@pytest.mark.slow
def test_stopped_process_costs_the_event_loop_nothing_and_resumes() -> None:
    async def test() -> None:
        async with started(make_process()) as client:
            send_to_engine(signal.SIGSTOP)
            streams = [client.submit([make_request(f"{i}", 2, num_prompt=5_000)]) for i in range(1_000)]
            reading = asyncio.gather(*map(collect, streams))
            await asyncio.sleep(0)
            assert client.stats.num_steps == 0
            send_to_engine(signal.SIGCONT)
            assert all(len(tokens) == 1 for tokens in await reading)

    run(test())


@pytest.mark.parametrize("stuck", [fake.HANG, None])
def test_close_kills_an_engine_that_does_not_answer(stuck: int | None) -> None:
    async def test() -> None:
        async with started(make_process(limit_s=0.1)) as client:
            if stuck is None:
                send_to_engine(signal.SIGSTOP)
            streams = [client.submit([make_request(f"{i}", 2, stuck or 1, 5_000)]) for i in range(100)]
        for stream in streams:
            with pytest.raises(EngineDiedError, match="the engine was closed"):
                await collect(stream)

    run(test())


PARENT = """
import asyncio, functools, sys
from multiprocessing import active_children
from gptserve.engine.child import SPINS
from gptserve.engine.process.factory import load_engine_first
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.request import Request, SamplingParams
from tests.engine import fake_step_engine as fake

async def main(first):
    client = ProcessClient(functools.partial(fake.load, ""))
    await client.start()
    print(active_children()[0].pid, flush=True)
    client.submit([Request("a", (first,), SamplingParams(max_tokens=90_000), seed=0)])
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(int(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a step that hangs outlives the parent")
@pytest.mark.parametrize(
    ("parent", "first"),
    [
        ("is killed", fake.HANG),
        ("exits without close", 1),
        pytest.param("is killed", 1, marks=pytest.mark.slow),
        pytest.param("exits without close", fake.HANG, marks=pytest.mark.slow),
    ],
)
def test_engine_ends_with_its_parent_however_that_ends(parent: str, first: int) -> None:
    command = [sys.executable, "-c", PARENT, str(first)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            engine = os.pidfd_open(int(process.stdout.readline()))
            if first == fake.HANG:
                assert process.stdout.readline() == "hangs\n"
            assert not ended(engine, 0)
            if parent == "is killed":
                process.kill()
            else:
                process.stdin.close()
                assert process.wait(LIMIT_S) == 0
            assert ended(engine, LIMIT_S)
            os.close(engine)
        finally:
            process.kill()


PARENT_OF_A_LOAD = """
import asyncio, functools, os, signal, sys
from multiprocessing import active_children
from gptserve.engine.child import SPINS
from gptserve.engine.process.factory import load_engine_first
from gptserve.engine.process.process_client import ProcessClient
from tests.engine import fake_step_engine as fake

async def main(moment, gate):
    waits = functools.partial(fake.load, gate, "waits")
    client = ProcessClient(fake.UnpickledSlowly(gate) if moment == "imports" else waits)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    pid = active_children()[0].pid
    if moment == "has hardly begun":
        os.kill(pid, signal.SIGSTOP)
    print(pid, flush=True)
    await starting

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a load outlives the parent")
@pytest.mark.parametrize("moment", ["has hardly begun", "imports"])
def test_engine_that_loads_ends_with_its_parent(tmp_path: Path, moment: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # nobody opens it: what waits there waits for ever
    command = [sys.executable, "-c", PARENT_OF_A_LOAD, moment, str(gate)]
    with subprocess.Popen(command, stdout=PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        engine = os.pidfd_open(int(process.stdout.readline()))
        try:
            if moment == "imports":
                assert process.stdout.readline() == "imports\n"
            assert not ended(engine, 0)
            process.kill()
            process.wait(LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(engine, signal.SIGCONT)
            assert ended(engine, LIMIT_S)
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(engine, signal.SIGKILL)
            os.close(engine)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}


def ended(pidfd: int, limit_s: float) -> bool:
    return bool(select.select([pidfd], [], [], limit_s)[0])


@pytest.mark.slow
def test_parent_of_a_real_engine_imports_no_torch(tiny_gpt2: Path) -> None:
    script = f"""
import asyncio, functools, pathlib, sys
from gptserve.engine.config import EngineConfig
from gptserve.engine.process.factory import load_engine
from gptserve.engine.child import SPINS
from gptserve.engine.process.factory import load_engine_first
from gptserve.engine.process.process_client import ProcessClient

async def main():
    config = EngineConfig(pathlib.Path({str(tiny_gpt2)!r}), num_blocks=64)
    client = ProcessClient(functools.partial(load_engine, config))
    await client.start()
    print(client.info.vocab_size, "torch" in sys.modules)
    await client.close()

asyncio.run(main())
"""
    result = subprocess.run([sys.executable, "-c", script], env=environment(), stdout=PIPE, text=True)
    assert result.stdout == "96 False\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no libgomp")
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, f"GOMP_SPINCOUNT = '{SPINS}'"),
        pytest.param({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'", marks=pytest.mark.slow),
        ({"OMP_WAIT_POLICY": "passive"}, "OMP_WAIT_POLICY = 'PASSIVE'"),
    ],
)
def test_torchs_threads_spin_shortly_in_the_engines_process(
    tiny_gpt2: Path,
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """libgomp itself says what it has read; an environment that asks for something is heeded."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "OMP_DISPLAY_ENV": "verbose"}.items():
        monkeypatch.setenv(name, value)

    async def test() -> None:
        client = ProcessClient(functools.partial(load_engine_first, make_config(tiny_gpt2)))
        await client.start()
        await client.close()

    run(test())
    shown = capfd.readouterr().err
    assert told in shown
    assert (f"GOMP_SPINCOUNT = '{SPINS}'" in shown) == (not variables)
