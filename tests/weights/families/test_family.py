"""The contract's own parts: a Source knows its shape, a RawConfig names field, rule and value."""

from __future__ import annotations

import math

import pytest

from gptserve.weights.errors import InvalidConfigError
from gptserve.weights.families.family import ACTIVATIONS, RawConfig, Source


def test_source_shape_is_that_of_its_parts_joined() -> None:
    assert Source((("a", (4, 3)),)).shape == (4, 3)
    assert Source((("a", (4, 3)),), transpose=True).shape == (3, 4)
    assert Source((("a", (4, 3)), ("b", (2, 3)))).shape == (6, 3)
    assert Source((("a", (4,)), ("b", (2,)))).shape == (6,)


@pytest.mark.parametrize("value", [0, -1, 2**31, 2.0, "3", True, [1]])
def test_size_is_a_positive_integer(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"^config\.json: n must be an integer in \[1, 2147483647\], got "):
        RawConfig({"n": value}).size("n")


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, 10**400, "1", False])
def test_positive_is_a_finite_number_above_zero(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"^config\.json: eps must be a finite number above 0, got "):
        RawConfig({"eps": value}).positive("eps", default=1.0)


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_boolean_is_true_or_false(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"^config\.json: tied must be true or false, got "):
        RawConfig({"tied": value}).boolean("tied", default=True)


def test_choice_names_what_there_is() -> None:
    assert RawConfig({}).choice("act", ACTIVATIONS, default="gelu_new") == "gelu_tanh"
    for value in ("magic", 3, ["relu"]):
        with pytest.raises(InvalidConfigError, match=r"^config\.json: act must be one of gelu, gelu_new, .*, got "):
            RawConfig({"act": value}).choice("act", ACTIVATIONS, default="gelu")


def test_null_is_absent() -> None:
    raw = RawConfig({"x": None})
    assert raw.size("x", default=3) == 3
    assert raw.positive("x", default=0.5) == 0.5
    assert raw.boolean("x", default=False) is False
    assert raw.token_ids("x", 5) == ()
    with pytest.raises(InvalidConfigError, match=r"x must be an integer in .*, got None"):
        raw.size("x")
    with pytest.raises(InvalidConfigError, match=r"y must be an integer in .*, but is missing"):
        raw.size("y")
