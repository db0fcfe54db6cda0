"""Steps of two ranks overlap: the same bits as one after the other, and nothing is lost when a rank dies.

The first rank computes late, as in test_overlap.py; both replay, as in test_recorded_ranks.py.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.gpu.recorded_steps import RecordedStep
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.errors import EngineDiedError
from gptserve.engine.parallel import ranks as parallel_ranks
from gptserve.engine.parallel.ranks import Ranks
from gptserve.engine.process.loop import Report
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.supervisor import Supervisor
from gptserve.engine.request import Request, TokenOutput
from gptserve.engine.runner import runner as model_runner
from gptserve.engine.runner.runner import ModelRunner
from gptserve.engine.staging import Array
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.client_harness import run as asyncio_run
from tests.engine.parallel.recording_ranks import num_replays, record
from tests.engine.parallel.test_ranks import _grandchild, process_of_rank
from tests.engine.runner.test_overlap import LateRunner, answers, varied_requests
from tests.engine.runs import EvenPace, make_config, make_engine, make_request, run, token_ids

pytestmark = pytest.mark.skipif(not CpuAttention.is_available(), reason="installed without a compiler")

OPTIONS: dict[str, Any] = {"tensor_parallel_size": 2, "num_blocks": 16, "block_size": 8, "max_num_seqs": 7}


class Pair:
    """A runner of two ranks that record, and engines of it."""

    def __init__(self, folder: Path, notes: Path, runner: ModelRunner) -> None:
        self.config, self.notes, self.runner = make_config(folder, **OPTIONS), notes, runner

    def plain(self) -> Engine:
        return Engine(self.config, runner=self.runner, pace=EvenPace(), overlap=False)

    def late(self, delay: int) -> tuple[Engine, LateRunner]:
        late = LateRunner(self.runner, lambda: delay)
        return Engine(self.config, runner=late, pace=EvenPace(), overlap=True), late  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two ranks; the last test of them kills one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _, notes = record(monkeypatch, tmp_path_factory.mktemp("notes"))
        return Pair(tiny_gpt2, notes, ModelRunner(make_config(tiny_gpt2, **OPTIONS), start_ranks=Ranks))


def requests() -> list[Request]:
    return [r for r in varied_requests() if int(r.request_id) % 9 < 8]


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_overlapping_steps_of_ranks_have_the_bits_of_steps_one_after_the_other(pair: Pair, delay: int) -> None:
    """With stops, which leave a step ahead for nothing, preemptions, and an abort that frees blocks under a step."""
    expected = answers(run(pair.plain(), requests()))
    stops = {i: tokens[len(tokens) // 2] for i, (tokens, *_) in expected.items() if int(i) % 3 == 0}
    asked = [
        replace(r, params=replace(r.params, stop_token_ids=(stops[r.request_id],))) if r.request_id in stops else r
        for r in requests()
    ]
    engine, late = pair.late(delay)
    engine.add(make_request("gone", range(20), max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    num_before = num_replays(pair.notes)
    found = answers(run(engine, asked))
    assert found == answers(run(pair.plain(), asked))
    assert late.stream.num_ahead > late.stream.num_launched // 4
    assert engine.stats.num_preemptions > 0
    assert num_replays(pair.notes) > num_before
    assert {i: tokens for i, (tokens, *_) in found.items()} != {i: tokens for i, (tokens, *_) in expected.items()}


@pytest.mark.slow
def test_tokens_that_are_not_taken_from_the_step_before_would_be_seen(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgotten(token_ids_T: Tensor, chosen_R: Tensor) -> Tensor:
        return token_ids_T.clamp(min=0)

    def fill_without(step: RecordedStep, arrays: tuple[Array, ...], chosen_R: Tensor | None = None) -> None:
        fill(step, arrays)

    expected, fill = answers(run(pair.plain(), requests())), RecordedStep.fill
    monkeypatch.setattr(model_runner, "known_token_ids", forgotten)
    monkeypatch.setattr(RecordedStep, "fill", fill_without)
    assert answers(run(pair.late(1)[0], requests())) != expected


@pytest.mark.slow
def test_a_rank_that_dies_while_a_step_is_ahead_ends_the_engine_with_its_cause(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = pair.late(2)
    for request in requests():
        engine.add(request)
    while engine._steps._ahead is None:
        engine.step()
    rank = process_of_rank(pair.runner)
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=r"^rank 1 was killed by signal 9 \(Killed\)"):
        finish(engine)
    assert not rank.is_alive()
    caplog.clear()  # its tracebacks hold the engine


@pytest.mark.slow
@pytest.mark.parametrize("is_last", [False, True])
def test_a_launch_ahead_that_fails_in_the_middle_leaves_the_others_the_step_before(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_last: bool
) -> None:
    """On a GPU that step is still computed then, by all ranks. is_last: it ends the only request."""
    before = set(threading.enumerate())
    (first,) = token_ids(
        run(make_engine(tiny_gpt2), [make_request("a", range(10), max_tokens=1, temperature=0.0)])["a"]
    )
    engine = Engine(make_config(tiny_gpt2, tensor_parallel_size=2), pace=EvenPace(), overlap=True)
    embed, num_embedded = engine._runner._decoder._embed, 0

    def fails(*args: Any) -> Tensor:
        nonlocal num_embedded
        num_embedded += 1
        if num_embedded == 2:
            raise MemoryError("told to fail")
        return embed(*args)

    kill, killed = parallel_ranks._kill, list[Any]()

    def noting(ranks: Any) -> None:
        killed.append(ranks)
        kill(ranks)

    monkeypatch.setattr(parallel_ranks, "_kill", noting)
    monkeypatch.setattr(engine._runner._decoder, "_embed", fails)
    stops = (first,) if is_last else ()
    engine.add(make_request("a", range(10), max_tokens=6, temperature=0.0, stop_token_ids=stops))
    (watch,) = (t for t in threading.enumerate() if t not in before and t.name == "gptserve-rank-1")
    assert [len(output.token_ids) for output in engine.step()] == [1]
    assert num_embedded == 2
    assert not killed
    assert engine.has_requests == (not is_last)
    with pytest.raises(EngineDiedError, match=r"^the first rank raised MemoryError in the middle of a step$"):
        finish(engine)
    assert killed
    watch.join(LIMIT_S)  # who waits for the process itself may take its status from this thread
    assert not watch.is_alive()
    caplog.clear()  # its tracebacks hold the engine


def load_late_engine(config: EngineConfig, *, report: Report) -> Engine:
    """Return an engine whose steps overlap on a stand-in for a GPU."""
    runner = LateRunner(ModelRunner(config, start_ranks=Ranks), lambda: 2)
    return Engine(config, runner=runner, pace=EvenPace(), overlap=True)  # type: ignore[arg-type]


@pytest.mark.slow
def test_streams_of_overlapping_steps_go_on_when_a_rank_is_killed(tiny_gpt2: Path) -> None:
    asked = [make_request(str(i), range(i, i + 9), seed=i, max_tokens=40, temperature=i % 2) for i in range(6)]
    expected = {i: token_ids(outputs) for i, outputs in run(make_engine(tiny_gpt2), asked).items()}
    factory = functools.partial(load_late_engine, make_config(tiny_gpt2, tensor_parallel_size=2))
    make_client = functools.partial(ProcessClient, factory)

    async def test() -> None:
        supervisor = Supervisor(make_client, max_restarts=2, stall_limit_s=LIMIT_S, load_limit_s=LIMIT_S)
        async with started(supervisor) as client:
            streams = {request.request_id: client.submit([request]) for request in asked}
            first = {request_id: await anext(stream) for request_id, stream in streams.items()}
            _grandchild().kill()
            for request_id, stream in streams.items():
                rest: list[TokenOutput] = [output async for outputs in stream for output in outputs]
                assert token_ids([*first[request_id], *rest]) == expected[request_id]
            assert sum(client.restarts.values()) == 1

    asyncio_run(test())
