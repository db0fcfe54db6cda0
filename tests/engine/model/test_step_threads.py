"""The number of threads of a step, by its work and the CPUs that a test says are free."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GptOssConfig

from gptserve.engine.model.step_threads import WORK_PER_THREAD, StepWork, num_step_threads
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.weights.config import Experts
from gptserve.weights.families import load_config

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"
DECODE = 10 * WORK_PER_THREAD


def test_work_decides_how_many_threads_pay() -> None:
    for work, expected in ((1, 1), (2 * WORK_PER_THREAD - 1, 1), (2 * WORK_PER_THREAD, 2), (5 * WORK_PER_THREAD, 5)):
        assert num_step_threads(work, 6, lambda: math.inf) == expected
    assert num_step_threads(100 * DECODE, 6, lambda: math.inf) == 6


@pytest.mark.parametrize(
    ("free_cpus", "expected"), [(4.0, 4), (3.6, 4), (3.4, 3), (2.0, 2), (1.49, 1), (0.3, 1), (0.0, 1), (math.inf, 4)]
)
def test_no_more_threads_than_cpus_are_free_but_for_half_of_one(free_cpus: float, expected: int) -> None:
    assert num_step_threads(DECODE, 4, lambda: free_cpus) == expected


def test_each_step_follows_what_others_leave() -> None:
    free = iter([2.0, 1.0, 1.0, 2.0])
    assert [num_step_threads(DECODE, 2, lambda: next(free)) for _ in range(4)] == [2, 1, 1, 2]


def test_where_one_thread_is_enough_nobody_asks() -> None:
    def fail() -> float:
        raise AssertionError("asked")

    assert num_step_threads(DECODE, 1, fail) == 1
    assert num_step_threads(1, 8, fail) == 1


def batch_of(num_sequences: int, num_tokens: int, num_computed: int, **params: object) -> ScheduledBatch:
    options = {"temperature": 0.0, **params}
    items = []
    for i in range(num_sequences):
        token_ids = [0] * (num_computed + num_tokens)
        request = Request(str(i), tuple(token_ids), SamplingParams(**options), seed=0)  # type: ignore[arg-type]
        sequence = SequenceState(request, i, token_ids, num_computed=num_computed)
        items.append(ScheduledSequence(sequence, num_tokens))
    return ScheduledBatch(tuple(items))


def test_the_embedded_model_decodes_on_one_thread_whatever_the_batch() -> None:
    work = StepWork(load_config(STORYTELLER))
    for num_sequences in (1, 8, 32):
        assert num_step_threads(work.of(batch_of(num_sequences, 1, 100)), 64, lambda: math.inf) == 1


def test_work_grows_with_all_that_a_step_computes() -> None:
    of = StepWork(load_config(STORYTELLER)).of
    one = of(batch_of(1, 1, 100))
    assert one < of(batch_of(2, 1, 100))
    assert one < of(batch_of(1, 1, 1000))
    assert one < of(batch_of(1, 2, 100))
    assert one < of(batch_of(1, 1, 100, temperature=1.0))
    assert of(batch_of(1, 50, 0)) < of(batch_of(1, 50, 0, prompt_logprobs=1))


def work_of_experts(folder: Path, num_active: int, num_sequences: int) -> int:
    (folder / "config.json").write_text(json.dumps(GptOssConfig().to_dict(), default=str))
    model = replace(load_config(folder), experts=Experts(8, num_active))
    return StepWork(model).of(batch_of(num_sequences, 1, 1))


def test_idle_experts_are_no_work(tmp_path: Path) -> None:
    sizes = [work_of_experts(tmp_path, num_active, 1) for num_active in (2, 4, 8)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_more_sequences_read_more_experts(tmp_path: Path) -> None:
    """Where there are several to choose from; each is read once."""
    few, many = ([work_of_experts(tmp_path, num_active, n) for n in (1, 4, 5)] for num_active in (2, 8))
    assert few[1] - few[0] > 2 * (many[1] - many[0])
    assert few[2] - few[1] < (few[1] - few[0]) / 3
