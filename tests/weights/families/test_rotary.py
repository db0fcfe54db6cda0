"""Rotary frequencies equal those of transformers, and what cannot be computed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import Rotary
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config
from gptserve.weights.families.family import RawConfig
from gptserve.weights.families.rotary import read_rotary
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 256, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.4, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2**20},  # all waves turn within it
]


def read(**fields: Any) -> Rotary:
    return read_rotary(RawConfig(fields), 64, 2048)[0]


def usable_context(fields: dict[str, Any], max_position: int) -> int:
    return read_rotary(RawConfig(fields), 64, max_position)[1]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(scaling["rope_type"]))
@pytest.mark.parametrize("is_new", [True, False], ids=["rope_parameters", "rope_scaling"])
def test_scaled_frequencies_equal_those_of_transformers(scaling: dict[str, Any], is_new: bool) -> None:
    parameters = {**scaling, "rope_theta": 50_000.0}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    expected, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))

    fields = {"rope_parameters": parameters} if is_new else {"rope_scaling": scaling, "rope_theta": 50_000.0}
    rotary = read(**fields)

    torch.testing.assert_close(torch.tensor(rotary.inv_freqs), expected, rtol=1e-5, atol=0)
    assert rotary.scale == pytest.approx(scale)


def test_longrope_has_its_short_factors_and_ends_where_they_do() -> None:
    factors = [1.0 + i / 10 for i in range(32)]
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": [9.0] * 32}
    fields = {"rope_scaling": scaling, "original_max_position_embeddings": 128, "max_position_embeddings": 2048}
    parameters = {**scaling, "rope_theta": 10_000.0, "original_max_position_embeddings": 128}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=100)

    rotary = read(**fields)

    torch.testing.assert_close(torch.tensor(rotary.inv_freqs), expected, rtol=1e-5, atol=0)
    assert rotary.scale == pytest.approx(scale)
    assert usable_context(fields, 2048) == 128
    assert usable_context({}, 2048) == 2048


@pytest.mark.parametrize(
    ("max_position", "scaling", "longest"),
    [
        # gpt-oss: max_position_embeddings is the stretched context already.
        (131_072, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131_072),
        # Qwen2.5 and Qwen3 with the section that their cards ask to add: it is not.
        (32_768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        (40_960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        # Yarn-Mistral-7b-128k
        (
            32_768,
            {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "finetuned": True},
            131_072,
        ),
        (32_768, {"rope_type": "yarn", "factor": 4.0}, 131_072),
        (32_768, {"rope_type": "yarn", "original_max_position_embeddings": 8192}, 32_768),
        (16_384, {"rope_type": "linear", "factor": 4.0}, 16_384),
        (131_072, {"rope_type": "llama3", **LLAMA3}, 131_072),
    ],
)
def test_a_yarn_model_has_factor_times_its_original_context(
    max_position: int, scaling: dict[str, Any], longest: int
) -> None:
    assert usable_context({"rope_scaling": scaling}, max_position) == longest
    assert usable_context({"rope_parameters": scaling}, max_position) == longest


def test_a_yarn_factor_beyond_any_context_is_refused() -> None:
    with pytest.raises(
        InvalidConfigError, match=r"factor must be such that factor \* 2048 tokens are in .*, got 1e\+300"
    ):
        read(rope_scaling={"type": "yarn", "factor": 1e300})


def test_rope_scaling_beside_rope_parameters_must_say_the_same() -> None:
    section = {"rope_type": "linear", "factor": 4.0}
    assert read(rope_parameters={**section, "rope_theta": 10_000.0}, rope_scaling=section) == read(rope_scaling=section)
    with pytest.raises(UnsupportedModelError, match="rope_scaling must say the same as rope_parameters"):
        read(rope_parameters={**section, "factor": 2.0}, rope_scaling=section)


def test_dynamic_scaling_changes_nothing_within_the_context() -> None:
    assert read(rope_scaling={"type": "dynamic", "factor": 4.0}) == read()


def test_a_part_of_each_head_turns() -> None:
    assert read(partial_rotary_factor=0.25).inv_freqs == read_rotary(RawConfig({}), 16, 2048)[0].inv_freqs


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"rope_scaling": {"type": "magic"}},
            UnsupportedModelError,
            "rope_type must be one of default, .*, got 'magic'",
        ),
        ({"rope_scaling": 3}, InvalidConfigError, "rope_scaling must be an object, got 3"),
        ({"rope_scaling": {"type": 3}}, InvalidConfigError, "config.json: rope_scaling: type must be a string, got 3"),
        ({"rope_theta": 0}, InvalidConfigError, "rope_theta must be a finite number above 0, got 0"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn"}}, InvalidConfigError, "rope_theta must be above 1"),
        ({"original_max_position_embeddings": 1}, InvalidConfigError, "must be at least 2"),
        ({"partial_rotary_factor": 1.5}, InvalidConfigError, "partial_rotary_factor must be a share of 64 dimensions"),
        ({"partial_rotary_factor": 1e307}, InvalidConfigError, "partial_rotary_factor must be a share of 64"),
        ({"partial_rotary_factor": 0.01}, InvalidConfigError, "partial_rotary_factor must be a share of 64 dimensions"),
        (
            {"rope_scaling": {"type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            InvalidConfigError,
            "low_freq_factor must be below high_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            InvalidConfigError,
            "short_factor must be a list of 32 finite numbers above 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(**fields)


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "layers.1.self_attn.rotary_emb.inv_freq"])
def test_frequencies_beside_the_weights_are_left_out_as_config_json_says_them(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES["Llama"])
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(4)}, path, {"format": "pt"})
    assert Checkpoint(tmp_path, load_config(tmp_path)).num_bytes > 0
