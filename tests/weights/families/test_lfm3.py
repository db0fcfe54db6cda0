"""LFM3's config.json: its kinds of layers, and values that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config

FIELDS = {
    "model_type": "lfm3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    return load_config(folder)


def test_layers_are_of_three_kinds_in_turn(tmp_path: Path) -> None:
    layers = load(tmp_path).layers
    assert [layer.recurrence is None for layer in layers] == [False, False, True, False, True, False]
    assert (layers[2].window, layers[4].window) == (None, 256)
    assert layers[2].rotary is not None
    assert sum(frequency > 0 for frequency in layers[2].rotary.inv_freqs) == 32
    assert layers[4].rotary is not None
    assert sum(frequency > 0 for frequency in layers[4].rotary.inv_freqs) == 64


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"conv_bias": True}, UnsupportedModelError, "conv_bias must be false, got True: no other is computed"),
        ({"conv_L_cache": 0}, InvalidConfigError, "conv_L_cache must be an integer in [1, 64], got 0"),
        (
            {"num_hidden_layers": 2},
            InvalidConfigError,
            "layer_types must be a list with layers of attention, but is missing",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error) as found:
        load(tmp_path, **fields)
    assert str(found.value) == f"config.json: {message}"
