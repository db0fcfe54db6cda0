"""Engines whose KV cache is in int8: every family, ranks, prompts that are scored, and what it costs in quality."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gptserve.engine.engine import Engine
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.memory import kv_bytes_per_token
from gptserve.weights.families import load_config
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.engine.test_int8 import NUM_STORIES, STORYTELLER, scores
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

Results = list[tuple[list[int], list[TokenLogprobs], list[TokenLogprobs | None]]]


def results(engine: Engine) -> Results:
    """Return the tokens, their logprobs and the prompts' logprobs of ragged requests."""
    requests = [
        make_request(str(i), ids, seed=i, temperature=i % 2, max_tokens=8, logprobs=2, prompt_logprobs=1)
        for i, ids in enumerate(ragged_prompts(6, 40))
    ]
    return [
        (
            token_ids(its),
            [entry for output in its for entry in output.logprobs],
            [entry for output in its for entry in output.prompt_logprobs or ()],
        )
        for its in run(engine, requests).values()
    ]


@pytest.mark.parametrize("num_stories", NUM_STORIES)
def test_the_perplexity_is_at_most_half_a_percent_worse(num_stories: int) -> None:
    wide, _ = scores(make_engine(STORYTELLER, dtype="bfloat16"), num_stories)
    codes, _ = scores(make_engine(STORYTELLER, dtype="bfloat16", kv_cache_dtype="int8"), num_stories)
    assert math.exp(codes - wide) < 1.005
    assert codes != wide


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "gpt-oss" in name else pytest.mark.slow) for name in SHAPES]
)
def test_any_family_computes_with_it_and_alone_as_in_a_batch(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    batched, alone, reference, exact = (
        results(make_engine(tmp_path, **options))
        for options in (
            {"kv_cache_dtype": "int8", "max_num_seqs": 5},
            {"kv_cache_dtype": "int8", "max_num_seqs": 1, "max_num_batched_tokens": 3},
            {"kv_cache_dtype": "int8", "attention_backend": "reference"},
            {},
        )
    )
    assert batched == alone
    assert batched != exact
    for (_, found, _), (_, same, _), (_, expected, _) in zip(batched, reference, exact, strict=True):
        assert found[0].top[0][1] == pytest.approx(same[0].top[0][1], abs=0.05)
        assert found[0].top[0][1] == pytest.approx(expected[0].top[0][1], abs=0.3)


@pytest.mark.slow
def test_each_rank_stores_the_codes_of_its_own_heads(tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES["Llama"])
    options = {"kv_cache_dtype": "int8", "kv_cache_bytes": 2**22, "device": "cpu"}
    split = make_engine(tmp_path, tensor_parallel_size=2, **options)
    found, expected = results(split), results(make_engine(tmp_path, **options))
    whole = kv_bytes_per_token(load_config(tmp_path), 1)
    assert split.info.kv_cache_bytes == split.info.num_blocks * split.info.block_size * whole
    assert split.info.num_blocks == 2 * 2**22 // (split.info.block_size * whole)
    for (_, its, _), (_, alone, _) in zip(found, expected, strict=True):
        assert its[0].top[0][1] == pytest.approx(alone[0].top[0][1], abs=0.05)
    assert results(split) == found
