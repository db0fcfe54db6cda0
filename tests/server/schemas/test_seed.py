from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import DRAWN_SEED_LIMIT, SEED_LIMIT
from gptserve.server.schemas.seed import GREATEST_SEED, LEAST_SEED, choose_seed, engine_seed
from tests.server.conftest import Api

SEEDS = st.integers(LEAST_SEED, GREATEST_SEED)


@given(SEEDS, SEEDS)
def test_two_seeds_are_two_for_the_engine(one: int, other: int) -> None:
    assert (engine_seed(one) == engine_seed(other)) == (one == other)
    assert 0 <= engine_seed(one) < SEED_LIMIT


@given(st.integers(0, GREATEST_SEED))
def test_a_seed_that_is_not_negative_stays_as_it_is(seed: int) -> None:
    assert engine_seed(seed) == choose_seed(seed) == seed


@pytest.mark.parametrize("asked", [None, -1])
def test_a_seed_is_drawn(asked: int | None) -> None:
    drawn = {choose_seed(asked) for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < DRAWN_SEED_LIMIT for seed in drawn)


@pytest.mark.parametrize("seed", [LEAST_SEED - 1, GREATEST_SEED + 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^seed must be in \[-2\*\*63, 2\*\*63\), got -?\d+$"):
        engine_seed(seed)


@pytest.mark.parametrize("seed", [-2, LEAST_SEED])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a_negative_seed_is_told_as_it_was_given(api: Api, route: str, seed: int) -> None:
    body = {"prompt": "x"} if route == "complete" else {}
    for kind in ({}, {"background": True}):
        assert getattr(api, route)(**body, **kind, seed=seed).json()["seed"] == seed
    assert {request.seed for request in api.engine.submitted} == {seed + 2**64}
