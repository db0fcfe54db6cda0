"""The embedded model at its real lengths: tokens and logprobs, bit for bit, are those of a request run alone.

Every axis along which a server's load may differ is one row of AXES; `pytest -rP` shows how many requests were compared
and that none differed. What must differ does: another seed, another order of sums.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import Request, TokenLogprobs
from tests.engine.runs import make_engine, make_request, run, token_ids
from weights.storyteller.generator import stories
from weights.tokenizer import Tokenizer

Result = tuple[list[int], list[TokenLogprobs]]
STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
NUM_REQUESTS = 64
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.3},
]
AXES: dict[str, dict[str, Any]] = {
    "a batch of 64": {"max_num_seqs": 64},
    "batches of 3": {"max_num_seqs": 3},
    "a budget of 64 tokens": {"max_num_batched_tokens": 64},
    "a budget of 9 tokens": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "two threads": {"num_threads": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 72, "max_num_seqs": 16, "enable_prefix_caching": False},
    "a prefix cache too small": {"num_blocks": 72, "max_num_seqs": 2},
    "drafts, one at a time": {"speculative_ngram": 2, "max_num_seqs": 1},
    "drafts, batches of 5": {"speculative_ngram": 4, "max_num_seqs": 5, "max_num_batched_tokens": 20},
    "drafts while preempted": {"speculative_ngram": 2, "num_blocks": 130, "block_size": 8, "max_num_seqs": 8},
}


@functools.cache
def requests() -> tuple[Request, ...]:
    """Ragged prompts of 1 to some 600 tokens, the starts of one to three stories, greedy and sampled mixed."""
    tokenizer, rng, chosen = Tokenizer.open(STORYTELLER), random.Random(1), []
    for i in range(NUM_REQUESTS):
        ids = [token for story in stories("held_out", 3, first=3 * (i // 2)) for token in tokenizer.encode(story.text)]
        prompt = ids[: rng.choice([rng.randint(1, 40), rng.randint(41, 250), rng.randint(251, 600)])]
        chosen.append(make_request(str(i), prompt, seed=i, max_tokens=20, logprobs=3, **KINDS[i % len(KINDS)]))
    return tuple(chosen)


def results(engine: Engine, chosen: tuple[Request, ...]) -> dict[str, Result]:
    return {
        i: (token_ids(outputs), [entry for output in outputs for entry in output.logprobs])
        for i, outputs in run(engine, chosen).items()
    }


@functools.cache
def alone(backend: str, dtype: str) -> dict[str, Result]:
    engine = make_engine(STORYTELLER, attention_backend=backend, dtype=dtype, enable_prefix_caching=False)
    return {request.request_id: results(engine, (request,))[request.request_id] for request in requests()}


def compare(axis: str, found: dict[str, Result], expected: dict[str, Result]) -> None:
    different = sum(found[i] != expected[i] for i in expected)
    print(f"| {axis} | {len(expected)} | {different} |")  # noqa: T201 - the table
    assert different == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", AXES)
def test_alone_equals_under_any_load(axis: str, dtype: str) -> None:
    engine = make_engine(STORYTELLER, **{"kv_cache_bytes": 2**27, "dtype": dtype, **AXES[axis]})
    compare(f"{axis}, {dtype}", results(engine, requests()), alone("auto", dtype))
    if "preempted" in axis:
        assert engine.stats.num_preemptions > 5
    if "drafts" in axis:
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_alone_equals_in_a_batch_with_the_reference_backend() -> None:
    engine = make_engine(STORYTELLER, attention_backend="reference", max_num_batched_tokens=64)
    compare("reference backend, a budget of 64 tokens", results(engine, requests()), alone("reference", "float32"))


def test_alone_equals_with_a_warm_prefix_cache() -> None:
    engine = make_engine(STORYTELLER, kv_cache_bytes=2**27)
    results(engine, requests())
    warm = run(engine, requests())
    assert sum(outputs[0].num_cached_tokens for outputs in warm.values()) > 5000
    found = {i: (token_ids(o), [entry for output in o for entry in output.logprobs]) for i, o in warm.items()}
    compare("a warm prefix cache", found, alone("auto", "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_equals_with_drafts_that_nearly_always_hold(dtype: str) -> None:
    """A bias towards few tokens makes loops, which are guessed as such."""
    looping = tuple(
        replace(r, params=replace(r.params, max_tokens=60, logit_bias=dict.fromkeys(range(300, 303), 30.0)))
        for r in requests()[:16]
    )
    plain, drafting = (
        make_engine(STORYTELLER, kv_cache_bytes=2**27, dtype=dtype, max_num_seqs=2, speculative_ngram=longest)
        for longest in (0, 3)
    )
    compare(f"drafts of loops, {dtype}", results(drafting, looping), results(plain, looping))
    assert drafting.stats.num_accepted_tokens > 0.5 * drafting.stats.num_draft_tokens
    assert drafting.stats.num_steps < 0.5 * plain.stats.num_steps


def test_what_changes_numbers_is_seen() -> None:
    """The negative controls: another seed gives other samples, another order of sums other logprobs."""
    first = alone("auto", "float32")
    reseeded = tuple(
        make_request(r.request_id, r.prompt_token_ids, seed=r.seed + 1000, max_tokens=20, logprobs=3, temperature=1.0)
        for r in requests()
    )
    other_seed = results(make_engine(STORYTELLER, kv_cache_bytes=2**27), reseeded)
    assert sum(other_seed[i] == first[i] for i in first) < NUM_REQUESTS // 4  # some stories leave no choice
    if make_engine(STORYTELLER).info.attention_backend != "reference":
        assert sum(alone("reference", "float32")[i] == first[i] for i in first) < NUM_REQUESTS // 2
