from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptserve.weights.errors import InvalidConfigError
from gptserve.weights.generation import load_sampling_defaults


def write(folder: Path, fields: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_what_a_sampler_knows_is_read(tmp_path: Path) -> None:
    numbers = {
        "temperature": 0.6,
        "top_p": 1,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_new_tokens": 9,
    }
    folder = write(tmp_path, {"do_sample": True, "eos_token_id": [1, 2], "typical_p": 0.9, **numbers})
    assert load_sampling_defaults(folder) == numbers


def test_a_file_may_be_missing_or_say_nothing(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == {}
    assert load_sampling_defaults(write(tmp_path, {"temperature": None})) == {}


def test_minus_one_is_no_top_k(tmp_path: Path) -> None:
    assert load_sampling_defaults(write(tmp_path, {"top_k": -1})) == {"top_k": 0}


def test_a_whole_number_may_have_a_point(tmp_path: Path) -> None:
    found = load_sampling_defaults(write(tmp_path, {"top_k": 20.0, "max_new_tokens": 2048.0}))
    assert found == {"top_k": 20, "max_new_tokens": 2048}
    assert {type(value) for value in found.values()} == {int}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": True}, "top_p must be a number, got True"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_k": float("inf")}, "top_k must be a whole number, got inf"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": [9]}, r"max_new_tokens must be a whole number, got \[9\]"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, fields: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^generation_config\.json: {rule}$"):
        load_sampling_defaults(write(tmp_path, fields))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"generation_config\.json must hold a JSON object"):
        load_sampling_defaults(write(tmp_path, []))
