"""Two ranks replay decoding steps together, or neither does; with a stand-in for CUDA's graphs (recording_ranks.py).

That CUDA and NCCL repeat what they recorded is not seen here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.gpu.recorded_steps import Capture
from gptserve.engine.engine import Engine
from gptserve.engine.errors import EngineDiedError
from gptserve.engine.request import Request
from tests.engine.parallel.recording_ranks import (
    Differing,
    Dying,
    Failing,
    FailingLater,
    Forgetting,
    Noting,
    num_replays,
    record,
)
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids

pytestmark = pytest.mark.skipif(not CpuAttention.is_available(), reason="installed without a compiler")

OPTIONS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_prefix_caching": False}
INSTEAD = "decoding: kernels started one by one, which is slower, are used instead of CUDA graphs: "


def requests() -> list[Request]:
    """Return greedy and sampled ones, of which ever fewer are left."""
    prompts = ragged_prompts(12, 30)
    return [
        make_request(str(i), p, seed=i, temperature=i % 2, max_tokens=4 + 2 * i, logprobs=2)
        for i, p in enumerate(prompts)
    ]


def answers(engine: Engine) -> dict[str, Any]:
    return {
        i: (token_ids(outputs), [entry for output in outputs for entry in output.logprobs])
        for i, outputs in run(engine, requests()).items()
    }


class Recorded:
    """An engine of two ranks that record, and how often each replayed since then."""

    def __init__(self, engine: Engine, notes: tuple[Path, Path]) -> None:
        self.engine, self._notes = engine, notes
        self._before = self._counts()

    def _counts(self) -> tuple[int, ...]:
        return tuple(map(num_replays, self._notes))

    def replays(self) -> tuple[int, ...]:
        """Return those of the first rank and of the other since the last call."""
        before, self._before = self._before, self._counts()
        return tuple(now - then for now, then in zip(self._before, before, strict=True))


@pytest.fixture(
    scope="module", params=["batches that shrink", pytest.param("preempted, with drafts", marks=pytest.mark.slow)]
)
def recorded(request: pytest.FixtureRequest, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    tight = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "speculative_ngram": 2}
    options = {"max_num_seqs": 7} if request.param == "batches that shrink" else tight
    with pytest.MonkeyPatch.context() as monkeypatch:
        notes = record(monkeypatch, tmp_path_factory.mktemp("notes"))
        engine = make_engine(tiny_gpt2, **OPTIONS, **options)
    return Recorded(engine, notes)


@pytest.mark.slow
def test_ranks_that_replay_give_the_bits_of_ranks_that_do_not(recorded: Recorded, tiny_gpt2: Path) -> None:
    """Steps that are replayed come between steps of prompts, which are not; rows of padding change nothing."""
    engine = recorded.engine
    recorded.replays()
    num_before, found = engine.stats.num_steps, answers(engine)
    first, other = recorded.replays()
    num_steps = engine.stats.num_steps - num_before
    assert first == other
    assert 0.3 * num_steps < first < num_steps
    graphs, engine._runner.graphs = engine._runner.graphs, None
    try:
        assert answers(engine) == found
    finally:
        engine._runner.graphs = graphs
    assert recorded.replays() == (0, 0)
    alone = answers(make_engine(tiny_gpt2, enable_prefix_caching=False))
    assert {i: ids for i, (ids, _) in found.items()} == {i: ids for i, (ids, _) in alone.items()}


CANNOT = "they failed with RuntimeError: operation not permitted when stream is capturing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "others", "reason"),
    [
        (Noting, Failing, f"of rank 1: {CANNOT}"),
        pytest.param(FailingLater, Noting, CANNOT, marks=pytest.mark.slow),
        pytest.param(FailingLater, Failing, CANNOT, marks=pytest.mark.slow),
        pytest.param(Noting, Differing, "of rank 1: they give other numbers for a batch of 7", marks=pytest.mark.slow),
        # The first rank sees it in its logits, too.
        pytest.param(Noting, Forgetting, "they give other numbers for a batch of 7", marks=pytest.mark.slow),
    ],
)
def test_if_one_rank_has_no_graphs_none_has(
    first: Callable[[Path], Capture],
    others: Callable[[Path], Capture],
    reason: str,
    tiny_gpt2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = record(monkeypatch, tmp_path, first, others)
    found = Recorded(make_engine(tiny_gpt2, max_num_seqs=7, **OPTIONS), notes)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message for message in warnings if message.startswith("decoding: ")] == [INSTEAD + reason]
    assert found.engine._runner.graphs is None
    tokens = {i: ids for i, (ids, _) in answers(found.engine).items()}
    assert found.replays() == (0, 0)
    assert tokens == {i: ids for i, (ids, _) in answers(make_engine(tiny_gpt2, enforce_eager=True)).items()}


@pytest.mark.slow
def test_a_rank_that_dies_while_it_records_ends_the_engine(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(monkeypatch, tmp_path, Noting, Dying)
    with pytest.raises(EngineDiedError, match=r"^rank 1 was killed by signal 9 \(Killed\)"):
        make_engine(tiny_gpt2, **OPTIONS)
    caplog.clear()  # its tracebacks hold the engine


@pytest.mark.slow
def test_a_rank_may_have_an_obstacle_of_its_own(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = record(monkeypatch, tmp_path)
    monkeypatch.setattr("gptserve.engine.runner.setup.choose_backend", lambda *_: CpuAttention())
    found = Recorded(make_engine(tiny_gpt2, attention_backend="reference", **OPTIONS), notes)
    reason = "of rank 1: attention is 'reference', which the host steers by the lengths of the sequences"
    assert INSTEAD + reason in caplog.messages
    assert found.engine._runner.graphs is None


@pytest.mark.slow
def test_without_graphs_nothing_is_recorded(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = record(monkeypatch, tmp_path)
    engine = make_engine(tiny_gpt2, enforce_eager=True, **OPTIONS)
    assert engine._runner.graphs is None
    assert [num_replays(path) for path in notes] == [0, 0]
    assert not [message for message in caplog.messages if message.startswith("decoding: ")]
    assert len(answers(engine)) == len(requests())
