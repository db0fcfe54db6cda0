"""Models of several streams: a request gets, bit for bit, what it gets alone, by programs and where torch computes."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.backends.cpu import native
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, TokenLogprobs
from tests.engine.runs import make_engine, make_request, run, token_ids
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

Result = tuple[list[int], list[TokenLogprobs]]
NUM = 10
NO_PROGRAM = "torch runs the operations of a step, not a program: "
OBSTACLES: dict[str, tuple[dict[str, Any], str | None]] = {
    "a program": ({}, None),
    "a narrow side": ({"laurel_rank": 24}, "a linear's input is not a multiple of 32 wide"),
    "one stream": ({"altup_num_inputs": 1, "laurel_rank": 24}, "a linear's input is not a multiple of 32 wide"),
    "many streams": ({"altup_num_inputs": 17}, "it has more than 16 streams"),
}
LOADS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "parts of prompts": {"max_num_batched_tokens": 9, "max_num_seqs": 7, "block_size": 4},
    "preempted": {"num_blocks": 40, "block_size": 4, "max_model_len": 120},
    "two threads": {"num_threads": 2, "max_num_seqs": 3},
    "drafts": {"speculative_ngram": 2, "max_num_seqs": 4},
    "bf16": {"dtype": "bfloat16", "max_num_batched_tokens": 20, "max_num_seqs": 8},
}


@pytest.fixture(scope="module", params=OBSTACLES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str | None]:
    """Return a model, and what keeps it from a program."""
    made = tmp_path_factory.mktemp("model")
    fields, obstacle = OBSTACLES[request.param]
    model_type, its = SHAPES["Gemma 3n, past its window"]
    write_model(made, model_type, {**its, **fields})
    return made, obstacle


def requests() -> list[Request]:
    """Return requests whose prompts begin alike and part at any place."""
    draw = random.Random(1)
    text = [draw.randrange(96) for _ in range(70)]
    prompts = [
        [*text[: draw.choice([3, 17, 33, 48, 64])], *(draw.randrange(96) for _ in range(draw.choice([1, 5, 20])))]
        for _ in range(NUM)
    ]
    return [
        make_request(f"{i}", prompt, seed=i, max_tokens=10, logprobs=2, temperature=float(i % 2))
        for i, prompt in enumerate(prompts)
    ]


def results(engine: Engine, chosen: list[Request]) -> list[Result]:
    return [
        (token_ids(outputs), [entry for output in outputs for entry in output.logprobs])
        for outputs in run(engine, chosen).values()
    ]


@pytest.mark.some(3)
@pytest.mark.parametrize("load", LOADS)
def test_an_answer_has_the_bits_that_it_has_alone(
    load: str, folder: tuple[Path, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    model, obstacle = folder
    options = LOADS[load]
    with caplog.at_level(logging.DEBUG):
        engine = make_engine(model, **options)
        lone = make_engine(model, enable_prefix_caching=False, dtype=options.get("dtype", "float32"))
    if native.is_available():
        told = {message.partition(NO_PROGRAM)[2] for message in caplog.messages if NO_PROGRAM in message}
        assert told == ({obstacle} if obstacle else set())
    alone = [its for request in requests() for its in results(lone, [request])]
    assert results(engine, requests()) == alone
    assert results(engine, requests()[::-1]) == alone[::-1]  # with prefixes of those before
    assert len({tuple(tokens) for tokens, _ in alone}) > 5
