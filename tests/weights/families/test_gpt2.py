"""GPT-2's config.json becomes the decoder `transformers` computes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families.family import RawConfig
from gptserve.weights.families.gpt2 import GPT2

SMALL = {"model_type": "gpt2", "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 3, "n_head": 2}


def read(**fields: Any) -> ModelConfig:
    return GPT2.read_config(RawConfig(SMALL | fields))


def scales(config: ModelConfig) -> tuple[float, ...]:
    return tuple(layer.attention_scale for layer in config.layers)


def test_published_defaults_are_the_124m_model() -> None:
    config = GPT2.read_config(RawConfig(GPT2Config().to_dict()))
    assert (config.vocab_size, config.max_position, config.hidden_size, config.num_layers) == (50257, 1024, 768, 12)
    assert config.distinct_layers == (LayerConfig(12, 12, 64, attention_scale=0.125, ffn_size=3072),)
    assert (config.activation, config.norm_eps, config.tied_head) == ("gelu_tanh", 1e-5, True)
    assert all(layer is config.layers[0] for layer in config.layers)


def test_attention_scales_follow_both_switches() -> None:
    assert scales(read(scale_attn_weights=False)) == (1.0, 1.0, 1.0)
    assert scales(read(scale_attn_by_inverse_layer_idx=True)) == (0.5, 0.25, 0.5 / 3)
    both = read(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)
    assert scales(both) == (1.0, 0.5, 1 / 3)


def test_ffn_width_and_activation_are_read() -> None:
    assert read().layers[0].ffn_size == read(n_inner=None).layers[0].ffn_size == 32
    assert read(n_inner=12).layers[0].ffn_size == 12
    names = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish")
    found = [read(activation_function=name).activation for name in names]
    assert found == ["gelu_tanh", "gelu_tanh", "gelu", "relu", "silu", "silu"]


def test_untied_head_is_a_tensor_of_its_own() -> None:
    assert "head.weight" not in GPT2.sources(read())
    assert GPT2.sources(read(tie_word_embeddings=False))["head.weight"].parts == (("lm_head.weight", (50, 8)),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 9}, r"n_embd must be a multiple of n_head \(2\), got 9"),
        ({"n_layer": 10**9}, r"n_layer must be an integer in \[1, 4096\], got 1000000000"),
        ({"n_head": 0}, r"n_head must be an integer in \[1, 2147483647\], got 0"),
        ({"activation_function": "mish"}, "activation_function must be one of gelu, .*, got 'mish'"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a finite number above 0, got 0"),
    ],
)
def test_config_that_lies_is_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^config\.json: {message}"):
        read(**fields)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="add_cross_attention must be false"):
        read(add_cross_attention=True)
