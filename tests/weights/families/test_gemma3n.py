"""What Gemma 3n's config.json says of each layer, what of it is refused, and that each part of its layers counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.runner.memory import kv_bytes_per_token
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidCheckpointError, InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import paged_logits
from tests.weights.families.known import KNOWN

SHAPE = "Gemma 3n, past its window"
PROMPT = [[3, 1, 4, 79, 5, 80, 2, 95, 5, 3, 5, 8, 9, 7, 9, 3]]
SMALL: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SMALL | fields))
    return load_config(folder)


@pytest.mark.parametrize(
    ("name", "width", "owners"),
    [("gemma-3n-E2B-it", 8192, [18, 18, 18, 18, 19] * 2), ("gemma-3n-E4B-it", 16_384, [18, 18, 18, 18, 19] * 3)],
)
def test_layers_of_published_models(name: str, width: int, owners: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name][0]))
    config = load_config(tmp_path)
    own, shared = config.layers[:20], config.layers[20:]
    assert {layer.kv_layer for layer in own} == {None}
    assert [layer.kv_layer for layer in shared] == owners
    assert [layer.window for layer in own[:6]] == [512, 512, 512, 512, None, 512]
    assert {layer.ffn_size for layer in config.layers} == {width}
    assert [layer.gate_cut for layer in config.layers] == pytest.approx([1.6448536] * 10 + [None] * (len(owners) + 10))
    assert kv_bytes_per_token(config, 2) == 2 * 2 * 20 * 2 * 256
    near, far = own[0].rotary, own[4].rotary
    assert near is not None
    assert far is not None
    assert (near.inv_freqs[1], far.inv_freqs[1]) == (10_000.0 ** (-2 / 256), 1e6 ** (-2 / 256))
    assert (config.streams, config.side_rank, config.layer_input_size, config.num_layer_inputs) == (4, 64, 256, 262_144)


def test_a_model_of_few_layers_that_does_not_say_cuts_no_gates(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert [layer.gate_cut for layer in config.layers] == [None] * 4
    deep = load(tmp_path, num_hidden_layers=11, layer_types=None, num_kv_shared_layers=0)
    assert [layer.gate_cut is not None for layer in deep.layers] == [True] * 10 + [False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"altup_active_idx": 1},
            "config.json: altup_active_idx must be 0, got 1: layers compute the first stream",
        ),
        (
            {"altup_correct_scale": False},
            "config.json: altup_correct_scale must be true, got False: the first stream is scaled for the input of a "
            "layer",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}},
            "config.json: rope_parameters: full_attention: partial_rotary_factor must be 1.0, got 0.25: transformers "
            "turns whole heads for this rope_type",
        ),
        (
            {"use_double_wide_mlp": True},
            "config.json sets `use_double_wide_mlp` to True, which gptserve does not know and which may change what is "
            "computed; remove it from the file if you know that it changes nothing",
        ),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        load(tmp_path, **fields)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"intermediate_size": [96, 96, 96]},
            "intermediate_size must be an integer in [1, 1048576], or a list of 4, got [96, 96, 96]",
        ),
        (
            {"intermediate_size": [96, 96, 0, 96]},
            "intermediate_size must be an integer in [1, 1048576], or a list of 4, got [96, 96, 0, 96]",
        ),
        (
            {"intermediate_size": "96"},
            "intermediate_size must be an integer in [1, 1048576], or a list of 4, got '96'",
        ),
        (
            {"activation_sparsity_pattern": [0.5] * 3},
            "activation_sparsity_pattern must be a list of 4 numbers in [0, 1), got [0.5, 0.5, 0.5]",
        ),
        (
            {"activation_sparsity_pattern": [0.5, 1.0, 0, 0]},
            "activation_sparsity_pattern must be a list of 4 numbers in [0, 1), got [0.5, 1.0, 0, 0]",
        ),
        (
            {"activation_sparsity_pattern": [0.5, -0.1, False, 0]},
            "activation_sparsity_pattern must be a list of 4 numbers in [0, 1), got [0.5, -0.1, False, 0]",
        ),
        (
            {"activation_sparsity_pattern": 0.5},
            "activation_sparsity_pattern must be a list of 4 numbers in [0, 1), got 0.5",
        ),
        ({"altup_num_inputs": 65}, "altup_num_inputs must be an integer in [1, 64], got 65"),
        ({"laurel_rank": 0}, "laurel_rank must be an integer in [1, 1048576], got 0"),
        (
            {"hidden_size_per_layer_input": 0},
            "hidden_size_per_layer_input must be an integer in [1, 1048576], got 0",
        ),
        (
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers must be such that layers of each kind are before those that share, got 3",
        ),
    ],
)
def test_what_fits_no_layer_is_refused_with_its_rule(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load(tmp_path, **fields)
    assert str(refused.value) == f"config.json: {message}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, *SHAPES[SHAPE])
    return folder


def copied(written: Path, folder: Path, fields: dict[str, Any], change: Callable[[dict[str, Tensor]], object]) -> Path:
    config = json.loads((written / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(written / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def halved(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name] / 2})


IN_LAYER = (
    *("altup.correct_output_scale", "altup.correction_coefs", "altup.prediction_coefs", "altup.modality_router"),
    *("altup.router_norm", "laurel.post_laurel_norm", "per_layer_input_gate", "post_per_layer_input_norm"),
)
GIVEN_LENGTHS = (
    *("altup_projections.1", "altup_unembed_projections.2", "layers.3.laurel.linear_left"),
    *("layers.3.laurel.linear_right", "layers.3.per_layer_projection"),
)
"""What these give has another length at once."""


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        *((dict[str, Any](), f"layers.1.{name}") for name in IN_LAYER),
        *(({"activation_sparsity_pattern": pattern}, None) for pattern in ([0.0] * 6, [0.75, 0.5, 0.0, 0.0, 0.9, 0.0])),
        ({"final_logit_softcapping": 4.0}, None),
    ],
    ids=str,
)
def test_each_part_of_a_layer_changes_the_logits(
    fields: dict[str, Any], change: str | None, written: Path, tmp_path: Path
) -> None:
    """A negative control of the parity with transformers, which another test has."""
    end = "" if change is None or change.endswith("_scale") else ".weight"
    changed = copied(written, tmp_path, fields, halved(f"model.{change}{end}") if change else lambda tensors: None)
    before, after = (paged_logits(folder, PROMPT, ReferenceAttention())[0] for folder in (written, changed))
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("name", GIVEN_LENGTHS)
def test_what_gets_another_length_counts_by_its_direction(name: str, written: Path, tmp_path: Path) -> None:
    key = f"model.{name}.weight"
    (tmp_path / "half").mkdir()
    (tmp_path / "turned").mkdir()
    half = copied(written, tmp_path / "half", {}, halved(key))
    turned = copied(written, tmp_path / "turned", {}, lambda tensors: tensors.update({key: tensors[key].roll(1, 0)}))
    logits = [paged_logits(folder, PROMPT, ReferenceAttention())[0] for folder in (written, half, turned)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=0)
    assert (logits[2] - logits[0]).abs().max() > 1e-2


def test_tokens_beyond_the_table_have_the_inputs_of_its_first_token(written: Path, tmp_path: Path) -> None:
    def other_first(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens_per_layer.weight"][0] += 1

    changed = copied(written, tmp_path, {}, other_first)
    for prompt, is_same in ([3, 79, 9], True), ([3, 80, 9], False), ([3, 95, 9], False), ([3, 0, 9], False):
        before, after = (paged_logits(folder, [prompt], ReferenceAttention())[0] for folder in (written, changed))
        assert torch.equal(before, after) is is_same


def test_what_sees_and_hears_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES["Gemma 3n that sees and hears"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert any(name.startswith("model.audio_tower.") for name in tensors)
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(2)
    tensors["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.ones(2)  # published files have them
    save_file(tensors, path)
    found = dict(Checkpoint(tmp_path, load_config(tmp_path)).stream(dtype=torch.float32, device="cpu"))
    assert found["blocks.0.streams.3.stream_in.weight"].shape == (64, 64)
    assert found["blocks.5.streams.1.stream_out.weight"].shape == (64, 64)
    assert not any("tower" in name for name in found)
    tensors["model.language_model.altup_projections.3.weight"] = torch.ones(64, 64)
    save_file(tensors, path)
    with pytest.raises(InvalidCheckpointError, match=r"1 unexpected \(.*altup_projections\.3\.weight"):
        Checkpoint(tmp_path, load_config(tmp_path))
