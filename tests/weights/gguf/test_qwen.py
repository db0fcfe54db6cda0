"""GGUF files of Qwen3.5, whose value heads are in another order, and of Qwen3-Next: what they compute."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import GatedDelta, LayerConfig
from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.families import load_config
from gptserve.weights.gguf.architectures import describe_config, named_tensors
from gptserve.weights.gguf.reader import Header, read_header
from gptserve.weights.quantized.coded import CodeFormat, JoinedFormat
from gptserve.weights.source import resolve_model
from gptserve.weights.stored_tensor import StoredTensor
from tests.engine.runs import ragged_prompts
from tests.parity.models import load_in_transformers, write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import paged_logits
from tests.weights.families.known import KNOWN
from tests.weights.gguf.k_quants import TypeOf, q4_k_m
from tests.weights.gguf.test_codes import Q4_K, Q6_K, WIDE, check
from tests.weights.gguf.written import write_gguf

F32, Q4_0, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
TILED = "linear_value_heads_are_tiled"
QWEN3_5, OF_EXPERTS = SHAPES["Qwen3.5"], SHAPES["Qwen3.5 with experts"]
OF_SIX = (QWEN3_5[0], {**QWEN3_5[1], "linear_num_value_heads": 6, "linear_value_head_dim": 32})
_WIDTHS = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256)
OF_256_COLUMNS = {**WIDE, "linear_value_head_dim": 64, **_WIDTHS}
"""A block of a K-quant has columns of all four value heads."""


def wide(name: str) -> tuple[str, dict[str, Any]]:
    """Return a shape whose matrices can be in K-quants."""
    model_type, fields = SHAPES[name]
    return model_type, fields | {key: value for key, value in OF_256_COLUMNS.items() if key in {**fields, **WIDE}}


MODELS = {
    "Qwen3.5 in F32": (QWEN3_5, F32),
    "Qwen3.5 in Q4_0": (QWEN3_5, Q4_0),
    "Qwen3.5 in Q4_K_M": (wide("Qwen3.5"), q4_k_m),
    "Qwen3.5 of six heads in Q8_0": (OF_SIX, Q8_0),
    "Qwen3.5 with experts in F32": (OF_EXPERTS, F32),
    "Qwen3.5 with experts in Q4_K_M": (wide("Qwen3.5 with experts"), q4_k_m),
    "Qwen3-Next in Q4_K_M": (wide("Qwen3-Next"), q4_k_m),
}


OF_ALL = {
    **{"context_length": 262_144, "nextn_predict_layers": 1, "full_attention_interval": 4},
    **{"attention.key_length": 256, "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6},
    **{"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7},
    **{"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "attention.head_count_kv": 2},
}
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3.5-0.8B": (
        "qwen35",
        {
            **{"block_count": 25, "embedding_length": 1024, "feed_forward_length": 3584, "attention.head_count": 8},
            **{"ssm.time_step_rank": 16, "ssm.inner_size": 2048},
        },
    ),
    "Qwen3.6-35B-A3B": (
        "qwen35moe",
        {
            **{"block_count": 41, "embedding_length": 2048, "attention.head_count": 16},
            **{"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 512},
            **{"expert_shared_feed_forward_length": 512, "ssm.time_step_rank": 32, "ssm.inner_size": 4096},
        },
    ),
}
"""What published files say; the last of their layers predicts a second token."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(
    shape: tuple[str, dict[str, Any]], quant: GGMLQuantizationType | TypeOf, folder: Path, *, older: bool = False
) -> Path:
    """Return the folder of a file; `folder` gets the same weights in safetensors."""
    path = folder.with_suffix(".gguf")
    write_model(folder, *shape)
    write_gguf(folder, path, quant, in_place=folder, older=older)
    return resolve_model(str(path))


@pytest.mark.some(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_logits_that_transformers_gives(name: str, tmp_path: Path) -> None:
    shape, quant = MODELS[name]
    of_file = written(shape, quant, tmp_path / "model")
    assert load_config(of_file, "refuse").layers[0].recurrence is not None
    prompts, model = ragged_prompts(5, 60, vocab_size=90), load_in_transformers(tmp_path / "model")
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    largest = max(its.abs().max() for its in expected)
    for found, its in zip(paged_logits(of_file, prompts, ReferenceAttention()), expected, strict=True):
        assert (found - its).abs().max() < 5e-5 * largest


def test_heads_in_the_order_of_the_checkpoint_would_give_others(tmp_path: Path) -> None:
    of_file, other = written(QWEN3_5, F32, tmp_path / "model"), tmp_path / "other"
    shutil.copytree(of_file, other)
    config = json.loads((of_file / "config.json").read_text(encoding="utf-8"))
    assert config.pop(TILED) is True
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prompts = ragged_prompts(1, 40, vocab_size=90)
    (found,), (expected,) = (paged_logits(its, prompts, ReferenceAttention()) for its in (other, of_file))
    assert (found - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_say_what_config_json_says(name: str, tmp_path: Path) -> None:
    config, (architecture, keys) = KNOWN[name][0], PUBLISHED[name]
    named = {f"{architecture}.{key}": value for key, value in {**OF_ALL, **keys}.items()}
    header = Header(tmp_path / "model.gguf", {"general.architecture": architecture, **named})
    matrix = StoredTensor(header.path, "", "Q8_0", (248_320, int(named[f"{architecture}.embedding_length"])), 0, 0)
    header.tensors["token_embd.weight"] = matrix
    if not config["tie_word_embeddings"]:
        header.tensors["output.weight"] = matrix
    models = []
    for fields in (describe_config(header), config):
        (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        its = load_config(tmp_path, "refuse")
        models.append(replace(its, model_type="", eos_token_ids=(), bos_token_id=None))
    tiled = [delta.tiled for layer in models[0].layers if isinstance(delta := layer.recurrence, GatedDelta)]
    assert tiled == [architecture == "qwen35moe"] * (len(models[1].layers) * 3 // 4)
    assert models[0].change_layers(_untiled) == models[1]


def _untiled(layer: LayerConfig) -> LayerConfig:
    delta = layer.recurrence
    return replace(layer, recurrence=replace(delta, tiled=False)) if isinstance(delta, GatedDelta) else layer


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5 with experts", "Qwen3-Next"])
def test_matrices_are_the_blocks_of_the_file(name: str, tmp_path: Path) -> None:
    folder = written(wide(name), q4_k_m, tmp_path / "model")
    checkpoint = Checkpoint(folder, load_config(folder))
    formats, block = checkpoint.code_formats, "blocks.0."
    assert {formats[f"{block}memory_{part}.weight"] for part in ("in", "gate", "rates", "out")} == {Q4_K}
    attention = load_config(folder).num_layers - 1
    assert formats[f"blocks.{attention}.qkv.weight"] == JoinedFormat(((8 * 24 + 4 * 24, Q4_K), (4 * 24, Q6_K)))
    of_experts = {its for key, its in formats.items() if ".experts." in key}
    assert of_experts <= {Q4_K, Q6_K}
    assert bool(of_experts) is (name != "Qwen3.5")
    assert all(isinstance(its, CodeFormat | JoinedFormat) for its in formats.values())
    check(checkpoint)


def test_older_files_of_qwen3_next_have_queries_keys_values_and_gates_in_one_tensor(tmp_path: Path) -> None:
    newer = written(SHAPES["Qwen3-Next"], F32, tmp_path / "newer")
    older = written(SHAPES["Qwen3-Next"], F32, tmp_path / "older", older=True)
    names = [read_header(tmp_path / f"{its}.gguf").tensors.keys() for its in ("newer", "older")]
    assert names[0] ^ names[1] == {"blk.0.attn_gate.weight", "blk.0.attn_qkv.weight", "blk.0.ssm_in.weight"}
    assert load_config(older) == load_config(newer)
    found, expected = (
        dict(Checkpoint(its, load_config(its)).stream(dtype=torch.float32, device="cpu")) for its in (older, newer)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], its) for key, its in expected.items())


def test_older_files_in_blocks_are_read_in_order(tmp_path: Path) -> None:
    folder = written(wide("Qwen3-Next"), q4_k_m, tmp_path / "model", older=True)
    checkpoint = Checkpoint(folder, load_config(folder))
    assert checkpoint.code_formats["blocks.0.memory_gate.weight"] == Q4_K
    check(checkpoint)


def test_a_file_may_say_which_layers_keep_states(tmp_path: Path) -> None:
    written(QWEN3_5, F32, tmp_path / "model")
    header = read_header(tmp_path / "model.gguf")
    expected = describe_config(header)["layer_types"]
    assert expected == ["linear_attention"] * 3 + ["full_attention"]
    del header.keys["qwen35.full_attention_interval"]
    assert describe_config(header)["layer_types"] == expected
    header.keys["qwen35.attention.recurrent_layers"] = [False, True, True, True]
    assert describe_config(header)["layer_types"] == ["full_attention"] + ["linear_attention"] * 3


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    written(OF_EXPERTS, F32, tmp_path / "model")
    header = read_header(tmp_path / "model.gguf")
    gates, _ = (header.tensors.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up"))
    header.tensors["blk.0.ffn_gate_up_exps.weight"] = gates
    found = named_tensors(header)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == gates
    assert "model.layers.0.mlp.experts.4.down_proj.weight" in found


def test_decays_that_are_no_powers_are_refused(tmp_path: Path) -> None:
    written(QWEN3_5, F32, tmp_path / "model")
    path = tmp_path / "model.gguf"
    stored = read_header(path).tensors["blk.0.ssm_a"]
    data = bytearray(path.read_bytes())
    data[stored.start : stored.end] = np.array([-1.0, -2.0, 0.0, 0.5], np.float32).tobytes()
    path.write_bytes(data)
    folder = resolve_model(str(path))
    message = "layers.0.linear_attn.A_log is in GGUF's F32, which must have no number above 0"
    with pytest.raises(InvalidCheckpointError, match=re.escape(message)):
        list(Checkpoint(folder, load_config(folder)).stream(dtype=torch.float32, device="cpu"))
