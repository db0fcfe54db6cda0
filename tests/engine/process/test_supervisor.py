"""The engine dies in every way and its streams do not notice; what cannot be helped ends, once, with its cause."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import DeathKind, EngineDiedError, EngineStartError, ScarcityError
from gptserve.engine.pooling import PoolingRequest
from gptserve.engine.process.client import EngineClient, TokenStream
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.supervisor import Supervisor
from gptserve.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from gptserve.weights.pooling import Pooling
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine import fake_step_engine as fake
from tests.engine import held_engine
from tests.engine import mortal_engine as mortal
from tests.engine.client_harness import (
    ENDLESS,
    LIMIT_S,
    Gate,
    collect,
    expected,
    first_output,
    first_tokens,
    hurried,
    last_output,
    make_request,
    run,
    run_hurried,
    started,
    until,
)
from tests.engine.held_engine import EngineGate
from tests.engine.runs import make_engine, token_ids
from tests.engine.runs import make_request as make_real_request
from tests.engine.runs import run as run_alone

MakeSupervisor = Callable[..., Supervisor]
OTHER_NUMBERS = "the engine restarted with other numbers: weights, libraries, gptserve or the hardware changed"
LONG = 300  # tokens: more than an engine makes before it dies


@pytest.fixture
def hold(tmp_path: Path) -> EngineGate:
    """A gate for all steps, where `gate` is for the requests and loads that wait at it."""
    return EngineGate(tmp_path)


@pytest.fixture
def tally(tmp_path: Path) -> str:
    return str(tmp_path / "tally")


@pytest.fixture
def make_supervisor(tally: str, gate: Gate, hold: EngineGate) -> MakeSupervisor:
    def make(
        max_restarts: int = 5, stall_limit_s: float = LIMIT_S, load_limit_s: float = LIMIT_S, **options: Any
    ) -> Supervisor:
        factory = functools.partial(fake.load, gate.path, tally=tally, **options)
        client = functools.partial(ProcessClient, functools.partial(held_engine.load, hold.folder, factory))
        return Supervisor(client, max_restarts=max_restarts, stall_limit_s=stall_limit_s, load_limit_s=load_limit_s)

    return make


def kill_engine(number: signal.Signals = signal.SIGKILL) -> None:
    next(p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())).send_signal(number)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGSEGV, signal.SIGABRT))],
)
def test_streams_go_on_where_they_were_when_the_engine_is_killed(
    make_supervisor: MakeSupervisor, hold: EngineGate, number: signal.Signals
) -> None:
    async def test() -> None:
        hold.shut()
        async with started(make_supervisor()) as client:
            requests = [make_request("a" * n, LONG + n) for n in range(1, 33)]
            streams = [client.submit([request]) for request in requests]
            first = await asyncio.gather(*map(anext, streams))
            kill_engine(number)
            hold.open()
            rest = await asyncio.gather(*map(collect, streams))
            for request, begun, ended in zip(requests, first, rest, strict=True):
                begin = [token for output in begun for token in output.token_ids]
                assert begin + ended[request.request_id] == expected(request)
            assert dict(client.restarts) == {DeathKind.KILLED: 1}
            assert client.stats.num_running == 0

    run(test())


def test_a_request_that_comes_with_tokens_keeps_them_when_the_engine_dies(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        async with started(make_supervisor()) as client:
            request = make_request("a", LONG)
            before = tuple(expected(request)[:7])  # by an earlier server
            stream = client.submit([replace(request, generated_token_ids=before)])
            begun = await first_tokens(stream)
            kill_engine()
            assert [*before, *begun, *(await collect(stream))["a"]] == expected(request)

    run(test())


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("what", "when", "place", "kind"),
    [
        (fake.KILL, 0, 0, DeathKind.KILLED),
        pytest.param(fake.KILL, 20, 7, DeathKind.KILLED, marks=pytest.mark.slow),
        pytest.param(fake.EXIT, 0, 3, DeathKind.EXITED, marks=pytest.mark.slow),
        pytest.param(fake.RAISE, 20, 0, DeathKind.RAISED, marks=pytest.mark.slow),
        (fake.HANG, 20, 3, DeathKind.STALLED),
    ],
)
def test_a_poison_fails_alone_wherever_it_stands_and_whatever_it_does(
    make_supervisor: MakeSupervisor, tally: str, what: int, when: int, place: int, kind: DeathKind
) -> None:
    async def test() -> None:
        async with started(make_supervisor()) as client, hurried(lambda: hangs(client, tally)):
            requests = [make_request("a" * n, LONG) for n in range(1, 8)]
            requests.insert(place, make_request("poison", LONG, first=what, when=when))
            streams = [client.submit([request]) for request in requests]
            poisoned = streams.pop(place)
            requests.pop(place)
            outputs, *rest = await asyncio.gather(all_outputs(poisoned), *map(collect, streams))
            assert rest == [{request.request_id: expected(request)} for request in requests]
            assert token_ids(outputs) == expected(make_request("poison", when)) if when else len(outputs) == 1
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert "the engine died each time it computed this request; the last time: the engine" in str(
                outputs[-1].error
            )
            assert dict(client.restarts) == {kind: 4}
            assert client.is_alive

    run_hurried(test())


def hangs(client: EngineClient, tally: str) -> bool:
    """Say whether the engine stands in a step that never ends, and has not been replaced for it."""
    return fake.num_hangs(tally) > client.restarts[DeathKind.STALLED]


@pytest.mark.slow
def test_a_poison_that_dies_only_of_decoding_fails_alone_too(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        async with started(make_supervisor()) as client:
            poison = make_request("poison", LONG, first=fake.KILL_DECODING)
            outputs, rest = await asyncio.gather(
                all_outputs(client.submit([poison])), collect(client.submit([make_request("good", LONG)]))
            )
            assert rest == {"good": expected(make_request("good", LONG))}
            assert token_ids(outputs) == expected(poison)[:4], "each engine makes one out of what it is given"
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert dict(client.restarts) == {DeathKind.KILLED: 4}

    run(test())


async def all_outputs(stream: TokenStream) -> list[TokenOutput]:
    return [output async for outputs in stream for output in outputs]


@pytest.mark.slow
def test_many_poisons_fail_one_by_one_and_nobody_else(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        async with started(make_supervisor(max_restarts=3)) as client:
            kinds = [fake.KILL, 1, fake.EXIT, fake.KILL, 1, fake.EXIT, fake.RAISE, 1]
            requests = [make_request("a" * n, 50, first=what) for n, what in enumerate(kinds, 1)]
            outputs = await asyncio.gather(*(all_outputs(client.submit([request])) for request in requests))
            for request, what, found in zip(requests, kinds, outputs, strict=True):
                assert token_ids(found) == (expected(request) if what == 1 else [])
                assert found[-1].finish_reason is (FinishReason.LENGTH if what == 1 else FinishReason.ERROR)

    run(test())


@pytest.mark.slow
def test_an_engine_that_dies_with_everything_is_given_up(
    make_supervisor: MakeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr("gptserve.engine.process.supervisor._FIRST_DELAY_S", 0.0)
        async with started(make_supervisor()) as client:
            streams = [client.submit([make_request(f"{n}", first=fake.KILL)]) for n in range(64)]
            in_a_row = "5 requests in a row, each computed alone"
            cause = rf"the engine process was killed by signal 9 .*; engines died with {in_a_row}"
            for stream in streams[:5]:
                [output] = await all_outputs(stream)
                assert output.finish_reason is FinishReason.ERROR
            for stream in streams[5:]:
                with pytest.raises(EngineDiedError, match=f"^{cause}$"):
                    await collect(stream)
            assert re.fullmatch(cause, str(await client.wait_until_dead()))
            assert not client.is_alive
            assert (tmp_path / "tally").stat().st_size == 12, "4 engines for the first, 2 for each other one"

    run(test())


@pytest.mark.slow
def test_a_token_between_convictions_shows_that_the_engine_works(
    make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr("gptserve.engine.process.supervisor._FIRST_DELAY_S", 0.0)
        monkeypatch.setattr("gptserve.engine.process.supervisor.MAX_CONVICTIONS_IN_A_ROW", 2)
        async with started(make_supervisor()) as client:
            for n in range(2):
                poison = client.submit([make_request(f"poison {n}", first=fake.KILL)])
                assert (await last_output(poison)).finish_reason is FinishReason.ERROR
                good = make_request(f"good {n}")
                assert await collect(client.submit([good])) == {good.request_id: expected(good)}
            assert client.is_alive

    run(test())


def test_nobody_is_blamed_for_the_deaths_of_another_on_trial(
    make_supervisor: MakeSupervisor, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr("gptserve.engine.process.supervisor._FIRST_DELAY_S", 0.0)
        async with started(make_supervisor()) as client:

            async def die() -> None:
                number = client.restarts[DeathKind.KILLED] + 1
                kill_engine()
                await until(lambda: client.restarts[DeathKind.KILLED] == number and client.is_ready)

            first = client.submit([make_request("first", 1, first=fake.WAIT)])
            await die()
            await die()
            second = client.submit([make_request("second", 1, first=fake.WAIT)])
            await die()
            await die()
            assert (await last_output(first)).finish_reason is FinishReason.ERROR
            await die()
            await die()  # the first two that it is blamed for: it is to be tried
            gate.open()
            assert await collect(second) == {"second": expected(make_request("second", 1))}

    run(test())


@pytest.mark.slow
def test_three_deaths_without_a_token_may_be_chance(make_supervisor: MakeSupervisor, gate: Gate) -> None:
    async def test() -> None:
        async with started(make_supervisor()) as client:
            request = make_request("waits", 1, first=fake.WAIT)
            stream = client.submit([request])
            for number in (1, 2, 3):
                kill_engine()
                await until(lambda: client.restarts[DeathKind.KILLED] == number and client.is_ready)  # noqa: B023 - awaited here
            gate.open()
            assert await collect(stream) == {"waits": expected(request)}

    run(test())


@pytest.mark.slow
def test_the_one_of_highest_priority_is_tried_first(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        async with started(make_supervisor()) as client:
            poison = replace(make_request("poison", first=fake.KILL), priority=-1)
            good, bad = client.submit([make_request("good", LONG)]), client.submit([poison])
            assert (await last_output(bad)).finish_reason is FinishReason.ERROR
            assert await collect(good) == {"good": expected(make_request("good", LONG))}

    run(test())


def test_what_is_submitted_or_aborted_while_no_engine_runs_is_heeded(
    make_supervisor: MakeSupervisor, gate: Gate
) -> None:
    async def test() -> None:
        async with started(make_supervisor(loading="waits after the first")) as client:
            stream, aborted = client.submit([make_request("a", ENDLESS)]), client.submit([make_request("bb", ENDLESS)])
            await first_output(stream)
            kill_engine()
            await until(lambda: not client.is_ready)
            assert client.is_alive
            late = client.submit([make_request("ccc")])
            assert client.stats.num_waiting == 3
            aborted.abort()
            gate.open()
            assert await collect(late) == {"ccc": expected(make_request("ccc"))}
            assert await collect(aborted) == {}
            assert client.stats.num_running == 1
            stream.abort()

    run(test())


def test_loads_that_fail_are_tried_again(make_supervisor: MakeSupervisor, hold: EngineGate) -> None:
    async def test() -> None:
        hold.shut()
        async with started(make_supervisor(failing_loads=(2, 3))) as client:
            request = make_request("a", LONG)
            stream = client.submit([request])
            begun = await first_tokens(stream)
            kill_engine()
            hold.open()
            assert [*begun, *(await collect(stream))["a"]] == expected(request)
            assert dict(client.restarts) == {DeathKind.KILLED: 1, DeathKind.LOAD: 2}

    run(test())


def test_a_lack_of_descriptors_uses_up_no_restart_and_is_logged_once(
    make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        monkeypatch.setattr("gptserve.engine.process.supervisor._FIRST_DELAY_S", 0.001)
        client = make_supervisor(max_restarts=1)
        make_client, num_made = client._make_client, 0

        def count_clients() -> ProcessClient:
            nonlocal num_made
            num_made += 1
            return make_client()

        client._make_client = count_clients
        async with started(client):
            request = make_request("a", LONG)
            stream = client.submit([request])
            begun = await first_tokens(stream)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            kill_engine()
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those there are go on working
            try:
                await until(lambda: num_made > 5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert client.is_alive
            assert [*begun, *(await collect(stream))["a"]] == expected(request)
            assert dict(client.restarts) == {DeathKind.KILLED: 1}
        assert caplog.text.count("Too many open files; retrying until it works") == 1

    run(test())


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (BlockingIOError(errno.EAGAIN, "no process"), ScarcityError),
        (PermissionError(errno.EPERM, "not allowed"), EngineStartError),
        (RuntimeError("a fault of ours"), EngineStartError),
    ],
)
def test_what_the_system_lacks_for_now_is_told_apart(
    make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch, fault: Exception, expected: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise fault

    async def test() -> None:
        client = make_supervisor()
        monkeypatch.setattr("multiprocessing.popen_spawn_posix.Popen._launch", fail)
        with pytest.raises(EngineStartError) as raised:
            await client.start()
        assert (type(raised.value), str(raised.value)) == (expected, f"the engine could not be started: {fault}")
        await client.close()

    run(test())


def test_a_system_without_threads_may_have_some_later(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        client = make_supervisor()
        threading.stack_size(2**62)  # more than there is for a stack: Thread.start fails as it does without threads
        try:
            with pytest.raises(ScarcityError, match=r"^the engine could not be started: can't start new thread$"):
                await client.start()
        finally:
            threading.stack_size(0)
        await client.close()

    run(test())


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (
            {"max_restarts": 2, "failing_loads": range(2, 9)},
            "load 3 was told to fail; 2 restarts in a row failed",
        ),
        (
            {"max_restarts": 1, "load_limit_s": 3.0, "loading": "waits after the first"},
            "the engine did not load within 3 s; 1 restarts in a row failed",
        ),
        ({"max_restarts": 0}, r"the engine process was killed by signal 9 \(Killed\), as the system does when .*out"),
        pytest.param(
            {"max_restarts": 1, "cramped_loads": (2,)},
            "the engine restarted with a context of [0-9]+ tokens instead of [0-9]+; 1 restarts in a row .*",
            marks=pytest.mark.slow,
        ),
        ({"changed_loads": (2,)}, OTHER_NUMBERS),
    ],
)
def test_what_no_restart_helps_ends_every_stream_with_the_cause(
    make_supervisor: MakeSupervisor, tally: str, options: dict[str, Any], cause: str
) -> None:
    def waits_to_load() -> bool:
        return "loading" in options and os.path.getsize(tally) > 1

    async def test() -> None:
        async with started(make_supervisor(**options)) as client, hurried(waits_to_load):
            streams = [client.submit([make_request("a" * n, ENDLESS)]) for n in range(1, 4)]
            await asyncio.gather(*map(first_output, streams))
            kill_engine()
            for stream in streams:
                with pytest.raises(EngineDiedError, match=f"^{cause}$"):
                    await collect(stream)
            assert re.fullmatch(cause, str(await client.wait_until_dead()))
            assert (client.is_alive, client.is_ready) == (False, False)
            with pytest.raises(EngineDiedError, match=f"^{cause}$"):
                client.submit([make_request("late")])

    run_hurried(test())


def test_a_first_load_that_hangs_fails_the_start(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        client = make_supervisor(load_limit_s=0.1, loading="waits")
        with pytest.raises(EngineStartError, match=r"^the engine did not load within 0\.1 s$"):
            await client.start()
        assert not client.is_alive

    run(test())  # without close: a failed start leaves nothing


def test_an_engine_that_dies_idle_is_replaced_and_totals_go_on(make_supervisor: MakeSupervisor) -> None:
    async def test() -> None:
        async with started(make_supervisor()) as client:
            await collect(client.submit([make_request("a", 100)]))
            process_ids = {client.info.process_id}
            for number in range(1, 3):
                kill_engine()
                await until(lambda: client.restarts[DeathKind.KILLED] == number and client.is_ready)  # noqa: B023 - awaited here
                process_ids.add(client.info.process_id)
            await collect(client.submit([make_request("b", 100)]))
            assert client.stats.num_steps == 200
            assert len(process_ids) == 3
            assert [child.pid for child in active_children()] == [client.info.process_id]

    run(test())


def test_after_a_restart_the_info_is_that_of_the_new_engine_but_for_the_context(
    make_supervisor: MakeSupervisor,
) -> None:
    async def test() -> None:
        async with started(make_supervisor(roomy_loads=(2,))) as client:
            before = client.info
            kill_engine()
            await until(lambda: client.restarts[DeathKind.KILLED] == 1 and client.is_ready)
            assert client.info.num_blocks == 2 * before.num_blocks
            assert client.info.max_model_len == before.max_model_len

    run(test())


def test_engines_that_hang_again_and_again_are_given_up_however_long_each_was_waited_for(
    make_supervisor: MakeSupervisor, tally: str
) -> None:
    async def test() -> None:
        supervisor = make_supervisor(max_restarts=1, stall_limit_s=1.5 * LIMIT_S)
        async with started(supervisor) as client, hurried(lambda: hangs(client, tally)):
            stream = client.submit([make_request("a", first=fake.HANG)])
            with pytest.raises(EngineDiedError, match="1 restarts in a row failed"):
                await collect(stream)
            assert dict(client.restarts) == {DeathKind.STALLED: 1}

    run_hurried(test())


@pytest.mark.parametrize("moment", ["loads", "waits before it loads"])
def test_close_ends_a_restart_under_way(make_supervisor: MakeSupervisor, moment: str) -> None:
    async def test() -> None:
        client = make_supervisor(
            **({"loading": "waits after the first"} if moment == "loads" else {"failing_loads": range(2, 9)})
        )
        async with started(client):
            stream = client.submit([make_request("a", ENDLESS)])
            await first_output(stream)
            kill_engine()
            await until(lambda: sum(client.restarts.values()) == (1 if moment == "loads" else 2))
        with pytest.raises(EngineDiedError, match="the engine was closed"):
            await collect(stream)

    run(test())


# The real engine

Result = tuple[list[int], list[TokenLogprobs]]
Deaths = dict[int, tuple[mortal.Death, int]]


@functools.cache
def real_requests() -> tuple[Request, ...]:
    """The beginnings of 32 stories, greedy and sampled mixed."""
    tokenizer = Tokenizer.open(Path(__file__).parents[3] / "weights" / "storyteller")
    prompts = [tokenizer.encode(story.text)[: 5 * i + 1] for i, story in enumerate(stories("held_out", 32))]
    return tuple(
        make_real_request(str(i), prompt, seed=i, max_tokens=40, logprobs=1, temperature=(0.0, 0.8, 1.2)[i % 3])
        for i, prompt in enumerate(prompts)
    )


def result(outputs: list[TokenOutput]) -> Result:
    return token_ids(outputs), [entry for output in outputs for entry in output.logprobs]


@pytest.fixture(scope="module")
def undisturbed(storyteller: Path) -> dict[str, Result]:
    outputs = run_alone(make_engine(storyteller), real_requests())
    return {request_id: result(found) for request_id, found in outputs.items()}


def supervise_real(
    folder: Path,
    tmp_path: Path,
    deaths: Deaths,
    limits: dict[str, Any] | None = None,
    **options: Any,
) -> Supervisor:
    config = EngineConfig(folder, device="cpu", dtype="float32", kv_cache_bytes=2**24, num_threads=1, **limits or {})
    factory = functools.partial(mortal.load, config, str(tmp_path / "tally"), deaths, **options)
    client = functools.partial(ProcessClient, factory)
    return Supervisor(client, max_restarts=5, stall_limit_s=LIMIT_S, load_limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("deaths", "kinds"),
    [
        pytest.param({1: ("kill", 20)}, {DeathKind.KILLED: 1}, marks=pytest.mark.slow),
        pytest.param({1: ("segfault", 20)}, {DeathKind.KILLED: 1}, marks=pytest.mark.slow),
        pytest.param({1: ("kill", 3), 2: ("kill", 30)}, {DeathKind.KILLED: 2}, marks=pytest.mark.slow),
        pytest.param({1: ("kill", 30), 2: ("segfault", 2)}, {DeathKind.KILLED: 2}, marks=pytest.mark.slow),
        pytest.param(
            {1: ("kill", 20), 2: ("kill", 0)}, {DeathKind.KILLED: 1, DeathKind.LOAD: 1}, marks=pytest.mark.slow
        ),
        pytest.param({1: ("no memory", 20)}, {DeathKind.RAISED: 1}, marks=pytest.mark.slow),
        pytest.param({1: ("hang", 20)}, {DeathKind.STALLED: 1}, marks=pytest.mark.slow),
    ],
    ids=["killed", "crashed", "twice", "again at once", "in the load", "out of memory", "hung"],
)
def test_32_live_streams_get_what_they_would_have_got(
    storyteller: Path,
    tmp_path: Path,
    undisturbed: dict[str, Result],
    deaths: Deaths,
    kinds: dict[DeathKind, int],
) -> None:
    async def test() -> None:
        supervisor = supervise_real(storyteller, tmp_path, deaths)
        async with started(supervisor) as client, hurried(lambda: hangs(client, str(tmp_path / "tally"))):
            streams = [client.submit([request]) for request in real_requests()]
            outputs = await asyncio.gather(*map(all_outputs, streams))
            assert {str(i): result(found) for i, found in enumerate(outputs)} == undisturbed
            assert dict(client.restarts) == kinds
            assert client.stats.num_prompt_tokens == sum(len(request.prompt_token_ids) for request in real_requests())

    run_hurried(test())


@pytest.mark.slow
def test_vectors_begin_again_when_the_engine_dies_and_have_the_same_bits(storyteller: Path, tmp_path: Path) -> None:
    prompt = tuple(i % 90 for i in range(200))
    requests = [PoolingRequest(str(i), prompt[i:], pooling) for i, pooling in enumerate(get_args(Pooling))]
    limits = {"task": "embed", "max_num_batched_tokens": 16, "max_num_seqs": 16}

    async def test() -> None:
        alone = run_alone(make_engine(storyteller, **limits), requests)
        deaths: Deaths = {1: ("kill", 9), 2: ("kill", 30)}  # a prompt takes 13 steps
        async with started(supervise_real(storyteller, tmp_path, deaths, limits=limits)) as client:
            outputs = await asyncio.gather(*(all_outputs(client.submit([request])) for request in requests))
            for request, found in zip(requests, outputs, strict=True):
                assert [output.vector for output in found] == [output.vector for output in alone[request.request_id]]
                assert found[-1].finish_reason is FinishReason.STOP
            assert dict(client.restarts) == {DeathKind.KILLED: 2}

    run(test())


@pytest.mark.slow
def test_an_engine_that_dies_within_a_prompt_costs_none_of_its_logprobs_and_repeats_none(
    storyteller: Path, tmp_path: Path
) -> None:
    prompt = [i % 90 for i in range(200)]
    requests = [make_real_request(str(i), prompt[i:], max_tokens=4, logprobs=1, prompt_logprobs=2) for i in range(3)]
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 16}

    def scored(outputs: list[TokenOutput]) -> tuple[Result, list[TokenLogprobs | None]]:
        return result(outputs), [entry for output in outputs for entry in output.prompt_logprobs or ()]

    async def test() -> None:
        alone = run_alone(make_engine(storyteller, **limits), requests)
        deaths: Deaths = {1: ("kill", 9), 2: ("kill", 15)}  # a prompt takes 13 steps
        async with started(supervise_real(storyteller, tmp_path, deaths, limits=limits)) as client:
            outputs = await asyncio.gather(*(all_outputs(client.submit([request])) for request in requests))
            for request, found in zip(requests, outputs, strict=True):
                assert scored(found) == scored(alone[request.request_id])
            assert dict(client.restarts) == {DeathKind.KILLED: 2}

    run(test())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["kill", "no memory"])
def test_31_live_streams_finish_beside_a_poison(
    storyteller: Path, tmp_path: Path, undisturbed: dict[str, Result], way: mortal.Death
) -> None:
    async def test() -> None:
        poison = make_real_request("poison", mortal.POISON)
        requests = [*real_requests()[:10], poison, *real_requests()[10:]]
        async with started(supervise_real(storyteller, tmp_path, {}, of_poison=way)) as client:
            outputs = await asyncio.gather(*(all_outputs(client.submit([request])) for request in requests))
            ended = {request.request_id: found for request, found in zip(requests, outputs, strict=True)}
            assert ended.pop("poison")[-1].finish_reason is FinishReason.ERROR
            assert {request_id: result(found) for request_id, found in ended.items()} == undisturbed
            assert sum(client.restarts.values()) == (4 if way == "kill" else 0), "a step that fails costs no restart"

    run(test())


@pytest.mark.slow
def test_what_only_waited_while_engines_died_is_no_suspect_and_goes_on_waiting(
    storyteller: Path, tmp_path: Path, undisturbed: dict[str, Result]
) -> None:
    async def test() -> None:
        deaths: Deaths = {1: ("kill", 15), 2: ("kill", 15)}  # 40 tokens each take the third engine, too
        async with started(supervise_real(storyteller, tmp_path, deaths, limits={"max_num_seqs": 2})) as client:
            requests = real_requests()[:3]
            outputs = await all_outputs(client.submit(requests))
            assert {r.request_id: result([o for o in outputs if o.request_id == r.request_id]) for r in requests} == {
                r.request_id: undisturbed[r.request_id] for r in requests
            }
            begun = [output.request_id for output in outputs].index("2")
            assert any(output.finish_reason for output in outputs[:begun]), "it took a running slot that was taken"
            assert dict(client.restarts) == {DeathKind.KILLED: 2}

    run(test())
