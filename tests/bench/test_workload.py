"""The requests of a load: exact lengths, prompts that no cache knows, arrivals of a Poisson process."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workload import Workload


def prompts(workload: Workload, number: int) -> list[Any]:
    return [body["prompt"] for body in workload.bodies(number)]


def test_a_request_has_ids_of_the_given_number_and_asks_for_all_tokens() -> None:
    [body] = Workload(prompt_tokens=40, max_tokens=7, temperature=0.5).bodies(1)
    prompt: Any = body.pop("prompt")

    assert len(prompt) == 40
    assert all(isinstance(token, int) for token in prompt)
    assert body == {"max_tokens": 7, "temperature": 0.5, "ignore_eos": True}


def test_a_prompt_may_be_words() -> None:
    [prompt] = prompts(Workload(prompt_tokens=40, prompts="words"), 1)

    assert len(prompt.split(" ")) == 40
    assert all(map(str.isalpha, prompt.split(" ")))


@pytest.mark.parametrize("kind", ["ids", "words"])
def test_prompts_differ_from_each_other_and_from_those_of_the_same_load_again(kind: Any) -> None:
    workload = Workload(prompt_tokens=32, prompts=kind)

    assert len({str(prompt[:16]) for prompt in prompts(workload, 20) + prompts(workload, 20)}) == 40


def test_prompts_share_a_prefix_within_a_load_and_no_more() -> None:
    workload = Workload(prompt_tokens=32, shared_prefix=16)
    first, again = prompts(workload, 5), prompts(workload, 5)

    assert {len(prompt) for prompt in first} == {32}
    assert len({str(prompt[:16]) for prompt in first}) == 1
    assert len({str(prompt[16:]) for prompt in first}) == 5
    assert first[0][:16] != again[0][:16]


@given(spread=st.floats(0, 0.99), seed=st.integers())
def test_lengths_are_spread_evenly_and_depend_on_the_seed(spread: float, seed: int) -> None:
    workload = Workload(prompt_tokens=100, max_tokens=50, spread=spread, seed=seed)

    def lengths(workload: Workload) -> list[tuple[int, Any]]:
        return [(len(str(body["prompt"]).split()), body["max_tokens"]) for body in workload.bodies(8)]

    found = lengths(workload)
    assert all(100 * (1 - spread) - 1 <= prompt <= 100 * (1 + spread) + 1 for prompt, _ in found)
    assert all(50 * (1 - spread) - 1 <= answer <= 50 * (1 + spread) + 1 for _, answer in found)
    assert lengths(workload) == found


def test_spread_lengths_reach_both_ends() -> None:
    lengths = [len(prompt) for prompt in prompts(Workload(prompt_tokens=100, spread=0.5), 400)]

    assert min(lengths) < 60 < 140 < max(lengths)
    assert abs(sum(lengths) / 400 - 100) < 5


@given(rate=st.floats(0.01, 1000), seed=st.integers())
def test_arrivals_begin_at_once_rise_and_depend_on_the_seed(rate: float, seed: int) -> None:
    arrivals = list(islice(Workload(seed=seed).arrivals(rate), 50))

    assert arrivals[0] == 0
    assert all(earlier <= later for earlier, later in pairwise(arrivals))
    assert arrivals == list(islice(Workload(seed=seed).arrivals(rate), 50))
    assert arrivals != list(islice(Workload(seed=seed + 1).arrivals(rate), 50))


def test_the_times_between_arrivals_are_exponential() -> None:
    arrivals = islice(Workload(seed=1).arrivals(4.0), 20_001)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]

    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    for mean_gaps in (0.5, 1, 2):  # the share of longer gaps
        assert sum(gap > 0.25 * mean_gaps for gap in gaps) / len(gaps) == pytest.approx(math.exp(-mean_gaps), rel=0.05)
