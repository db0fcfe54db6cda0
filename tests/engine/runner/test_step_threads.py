"""The number of threads of a step, by its work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from transformers import GptOssConfig

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.runner.step_threads import WORK_PER_THREAD, StepWork, num_step_threads
from gptserve.engine.scheduling.sequence import ScheduledSequence, SequenceState
from gptserve.weights.config import Experts
from gptserve.weights.families import load_config
from tests.engine.batches import step_of

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"
DECODE = 10 * WORK_PER_THREAD


def test_work_decides_how_many_threads_pay() -> None:
    for work, expected in ((1, 1), (2 * WORK_PER_THREAD - 1, 1), (2 * WORK_PER_THREAD, 2), (5 * WORK_PER_THREAD, 5)):
        assert num_step_threads(work, 6) == expected
    assert num_step_threads(100 * DECODE, 6) == 6


def step_with(num_sequences: int, num_tokens: int, num_computed: int, **params: object) -> StepInput:
    options = {"temperature": 0.0, **params}
    items = []
    for i in range(num_sequences):
        token_ids = [0] * (num_computed + num_tokens)
        request = Request(str(i), tuple(token_ids), SamplingParams(**options), seed=0)  # type: ignore[arg-type]
        sequence = SequenceState(request, i, token_ids, num_computed=num_computed, block_ids=[i])
        items.append(ScheduledSequence(sequence, num_tokens))
    return step_of(*items, block_size=num_computed + num_tokens)


def test_the_embedded_model_decodes_on_one_thread_whatever_the_batch() -> None:
    work = StepWork(load_config(STORYTELLER))
    for num_sequences in (1, 8, 32):
        assert num_step_threads(work.of(step_with(num_sequences, 1, 100)), 64) == 1


def test_work_grows_with_all_that_a_step_computes() -> None:
    of = StepWork(load_config(STORYTELLER)).of
    one = of(step_with(1, 1, 100))
    assert one < of(step_with(2, 1, 100))
    assert one < of(step_with(1, 1, 1000))
    assert one < of(step_with(1, 2, 100))
    assert one < of(step_with(1, 1, 100, temperature=1.0))
    assert of(step_with(1, 50, 0)) < of(step_with(1, 50, 0, prompt_logprobs=1))


def work_of_experts(folder: Path, num_active: int, num_sequences: int) -> int:
    (folder / "config.json").write_text(json.dumps(GptOssConfig().to_dict(), default=str))
    model = load_config(folder).change_layers(lambda layer: replace(layer, experts=Experts(8, num_active)))
    return StepWork(model).of(step_with(num_sequences, 1, 1))


def test_idle_experts_are_no_work(tmp_path: Path) -> None:
    sizes = [work_of_experts(tmp_path, num_active, 1) for num_active in (2, 4, 8)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_more_sequences_read_more_experts(tmp_path: Path) -> None:
    """Where there are several to choose from; each is read once."""
    few, many = ([work_of_experts(tmp_path, num_active, n) for n in (1, 4, 5)] for num_active in (2, 8))
    assert few[1] - few[0] > 2 * (many[1] - many[0])
    assert few[2] - few[1] < (few[1] - few[0]) / 3
