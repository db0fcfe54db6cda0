"""LFM2's config.json: names of early files, widths that are adjusted, and values that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config

FIELDS = {
    "model_type": "lfm2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "full_attn_idxs": [1],
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    return load_config(folder)


def widths(config: ModelConfig) -> set[int]:
    return {layer.ffn_size for layer in config.layers}


def test_names_of_early_files_come_before_later_ones(tmp_path: Path) -> None:
    config = load(tmp_path, block_ff_dim=3000, tie_embedding=False, tie_word_embeddings=True)
    assert widths(config) == {2048}
    assert not config.tied_head
    assert load(tmp_path).tied_head
    assert widths(load(tmp_path, intermediate_size=3000)) == {2048}


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 256),
        ({"block_multiple_of": 7}, 70),
        ({"block_multiple_of": 7, "block_ffn_dim_multiplier": 1.5}, 98),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_a_width_is_two_thirds_rounded_up_unless_it_is_as_said(
    fields: dict[str, Any], width: int, tmp_path: Path
) -> None:
    assert widths(load(tmp_path, **fields)) == {width}


def test_layers_attend_by_layer_types_or_else_by_their_numbers_or_else_all(tmp_path: Path) -> None:
    def attending(**fields: Any) -> list[int]:
        return [i for i, layer in enumerate(load(tmp_path, **fields).layers) if layer.recurrence is None]

    assert attending() == [1]
    assert attending(layer_types=["full_attention", "conv", "conv"]) == [0]
    assert attending(full_attn_idxs=None) == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"conv_bias": True}, UnsupportedModelError, "conv_bias must be false, got True: no other is computed"),
        ({"conv_dim": 32}, UnsupportedModelError, "conv_dim must be 64, got 32: no other is computed"),
        ({"num_heads": 2}, UnsupportedModelError, "num_heads must be 4, got 2: no other is computed"),
        ({"use_pos_enc": False}, UnsupportedModelError, "use_pos_enc must be true, got False: no other is computed"),
        (
            {"full_attn_idxs": []},
            InvalidConfigError,
            "layer_types must be a list with a full_attention, but is missing",
        ),
        (
            {"layer_types": ["conv"] * 3},
            InvalidConfigError,
            "layer_types must be a list with a full_attention, got ['conv', 'conv', 'conv']",
        ),
        (
            {"layer_types": ["conv", "mamba", "conv"]},
            InvalidConfigError,
            "layer_types must be a list of 3, each one of conv, full_attention, got ['conv', 'mamba', 'conv']",
        ),
        (
            {"block_ffn_dim_multiplier": 1e300},
            InvalidConfigError,
            "block_ffn_dim_multiplier must be a factor that gives no width above 1048576, got 1e+300",
        ),
        (
            {"block_ffn_dim_multiplier": 0.001},
            InvalidConfigError,
            "block_ffn_dim_multiplier must be a factor that gives a width of 1 or more, got 0.001",
        ),
        ({"conv_L_cache": 65}, InvalidConfigError, "conv_L_cache must be an integer in [1, 64], got 65"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error) as found:
        load(tmp_path, **fields)
    assert str(found.value) == f"config.json: {message}"
