"""Models in GGUF: the configuration and, bit for bit, the weights of the checkpoint that they were made from."""

from __future__ import annotations

import math
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.errors import InvalidCheckpointError, WeightsError
from gptserve.weights.families import load_config
from gptserve.weights.gguf.architectures import (
    ARCHITECTURES,
    describe_config,
    named_tensors,
)
from gptserve.weights.gguf.reader import read_header
from gptserve.weights.gguf.refused import _REASONS, MODEL_TYPES, why_refused
from gptserve.weights.inventory import stored_parts
from gptserve.weights.sharding import Share
from gptserve.weights.source import resolve_model
from tests.engine.runs import make_engine, make_request, ragged_prompts, run
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.gguf.written import write_gguf

_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_HEAD = {"query_pre_attn_scalar": 24}  # that of the sizes: files have none
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_OLMO3 = SHAPES["OLMo 3, YaRN on some layers"][1]
_THREE_OF_FOUR = ["sliding_attention"] * 3
_TRINITY, _LAGUNA = SHAPES["Trinity, past its window"][1], SHAPES["Laguna, gates of heads"][1]
_MELLUM, _COMMAND = SHAPES["Mellum 2, past its window"][1], SHAPES["Command A+, past its window"][1]
_COMMAND_OF_DENSE = SHAPES["Command A+, a dense first layer"][1]
_PLAIN_FALCON = {
    **SHAPES["Falcon-H1, norms, no factors"][1],
    **{"tie_word_embeddings": False, "mamba_rms_norm": False, "mamba_conv_bias": True},
}
_INPUTS_OF_ALL = {"vocab_size_per_layer_input": 96}
_ANY_STEP = {"time_step_limit": [0.0, math.inf]}
_SWASH = SHAPES["Granite Swash, past its window"][1]
_SWASH_OF_EXPERTS = SHAPES["Granite Swash with experts, past its window"][1]
_ONE_BASE = {"layer_rope_theta": [10_000.0, 10_000.0, 0, 10_000.0]}
_LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: SHAPES[name]
        for name in (
            *("GPT-2", "GPT-NeoX", "GPT-NeoX, sequential, all rotary, no bias", "GPTBigCode, one KV head"),
            *("Falcon 7B", "Falcon 11B", "BLOOM, six heads", "MPT", "MPT, six heads, clipped", "Phi"),
            *(
                "Llama",
                "Llama, biases, own head size, tied",
                "Llama, linear scaling",
                "Mistral without a window",
            ),
            *(
                "Qwen2",
                "Qwen2, YaRN, past its first context",
                "Qwen3",
                "Ministral 3, YaRN",
                "Gemma",
                "SmolLM3",
                "Apertus",
                "Arcee",
                "Jais 2",
            ),
            *("OLMo, clipped", "OLMo 2", "OLMo 3, past its window", "OLMoE"),
            *(
                "StableLM",
                "StableLM, parallel, biases",
                "StableLM 2 12B",
                "Command R",
                "Command R+",
                "Command R7B, past its window",
            ),
            *("EXAONE 4, past its window", "EXAONE 4 without a window", "Granite", "Granite MoE", "Nemotron"),
            *("Granite with shared experts", "K-EXAONE, past its window"),
            *("ERNIE 4.5", "ERNIE 4.5 with biases", "GLM 4", "GLM 4 of 2025", "Seed-OSS", "MiniMax M2"),
            *("GLM 4.5", "GLM 4.5, in groups"),
        )
    },
    "OLMo 3, YaRN on some layers": ("olmo3", {**_OLMO3, "rope_parameters": {**_OLMO3["rope_parameters"], **_LOCAL}}),
    "Hy3": SHAPES["Hy3"],
    "Trinity": ("afmoe", {**_TRINITY, "layer_types": [*_THREE_OF_FOUR, "full_attention"]}),
    "Laguna": ("laguna", {**_LAGUNA, "layer_types": ["full_attention", *_THREE_OF_FOUR]}),
    "Laguna, gates of dimensions": (
        "laguna",
        {**SHAPES["Laguna, gates of dimensions"][1], "sliding_window": 0, "layer_types": ["full_attention"] * 2},
    ),
    "Mellum 2": ("mellum", {**_MELLUM, "mlp_layer_types": ["sparse"] * 4}),
    "Command A+": ("cohere2_moe", _COMMAND),
    "Command A+, a dense first layer": (
        "cohere2_moe",
        {**_COMMAND_OF_DENSE, "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "average"},
    ),
    "Granite Swash": ("granite_swa", {**_SWASH, **_ONE_BASE}),
    "Granite Swash with experts": ("granitemoe_swa", {**_SWASH_OF_EXPERTS, **_ONE_BASE}),
    "Qwen2 MoE": ("qwen2_moe", {**SHAPES["Qwen2 MoE"][1], "mlp_only_layers": []}),
    "gpt-oss": ("gpt_oss", {**SHAPES["gpt-oss, past its window"][1], "swiglu_limit": 7.0}),
    "dots.llm1": ("dots1", {**SHAPES["dots.llm1"][1], "sliding_window": None}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {**SHAPES["ERNIE 4.5 MoE"][1], "moe_layer_end_index": -1}),
    "Falcon 40B": ("falcon", {**SHAPES["Falcon 40B"][1], "bias": False}),
    "Hunyuan": ("hunyuan_v1_dense", {**SHAPES["Hunyuan"][1], **_PLAIN}),
    "Hunyuan MoE": ("hunyuan_v1_moe", {**SHAPES["Hunyuan MoE"][1], "moe_topk": [2, 2]}),
    "Llama 3.1": (
        "llama",
        {**SHAPES["Llama"][1], "rope_parameters": {**_ROPE, "original_max_position_embeddings": 8192}},
    ),
    "Phi-3": SHAPES["Phi-3, past its window"],
    "Phi-3, LongRoPE": SHAPES["Phi-3, LongRoPE"],
    "Phi-4 mini": (
        "phi3",
        {
            **SHAPES["Phi-3, LongRoPE"][1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "StarCoder2": ("starcoder2", {**SHAPES["StarCoder2, past its window"][1], "sliding_window": 4096}),
    "Mixtral": ("mixtral", {**SHAPES["Mixtral, past its window"][1], "sliding_window": None}),
    "Qwen3 MoE": ("qwen3_moe", {**SHAPES["Qwen3 MoE, weights of all"][1], "norm_topk_prob": True}),
    "Gemma 3n": ("gemma3n_text", {**SHAPES["Gemma 3n, past its window"][1], **_INPUTS_OF_ALL}),
    "Gemma 3n, two streams, all gates and keys": (
        "gemma3n_text",
        {**SHAPES["Gemma 3n, two streams, all gates and keys"][1], **_INPUTS_OF_ALL, "attention_bias": False},
    ),
    "Gemma 4": SHAPES["Gemma 4, past its window"],
    "Gemma 4 with experts": SHAPES["Gemma 4 with experts"],
    "Gemma 4, inputs of layers and shared keys": SHAPES["Gemma 4, inputs of layers and shared keys"],
    "LFM2, attention first, as wide as it says": SHAPES["LFM2, attention first, as wide as it says"],
    "LFM2 with experts": SHAPES["LFM2 with experts"],
    "Qwen3.5": ("qwen3_5_text", {**SHAPES["Qwen3.5"][1], "linear_num_key_heads": 4}),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {**SHAPES["Qwen3.5 with experts"][1], "linear_num_key_heads": 4}),
    "Qwen3-Next": SHAPES["Qwen3-Next"],
    "Granite 4-H": ("granitemoehybrid", {**SHAPES["Granite 4-H"][1], **_ANY_STEP}),
    "Granite 4-H with experts": (
        "granitemoehybrid",
        {**SHAPES["Granite 4-H with experts, groups and limits of steps"][1], **_ANY_STEP},
    ),
    "Falcon-H1": ("falcon_h1", {**_PLAIN_FALCON, **_ANY_STEP}),
    "Falcon-H1, norms": ("falcon_h1", {**_PLAIN_FALCON, **_ANY_STEP, "mamba_rms_norm": True, "mamba_conv_bias": False}),
    "Nemotron-H": ("nemotron_h", {**SHAPES["Nemotron-H"][1], **_ANY_STEP}),
    "Nemotron 3 Nano": ("nemotron_h", {**SHAPES["Nemotron 3 Nano"][1], **_ANY_STEP}),
    "Gemma 2": ("gemma2", {**SHAPES["Gemma 2, past its window"][1], **_HEAD}),
    "Gemma 3": (
        "gemma3_text",
        {**SHAPES["Gemma 3, past its window"][1], **_HEAD, "num_hidden_layers": 7, "layer_types": None},
    ),
}
QUANTS = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "quant"), [(name, QUANTS[i % len(QUANTS)]) for i, name in enumerate(MODELS)])
def test_a_file_is_the_checkpoint_that_it_was_made_from(name: str, quant: GGMLQuantizationType, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / f"{quant.name}.gguf"
    write_model(folder, *MODELS[name])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_gguf(folder, path, quant, in_place=copy)

    found, expected = load_config(resolve_model(str(path))), load_config(copy)
    assert replace(found, eos_token_ids=()) == replace(expected, eos_token_ids=())
    for share in (Share(), Share(1, 2)) if found.layer_input_size is None else (Share(),):
        of_file, of_copy = (
            dict(Checkpoint(its, load_config(its), share).stream(dtype=torch.float32, device="cpu"))
            for its in (resolve_model(str(path)), copy)
        )
        assert of_file.keys() == of_copy.keys()
        differing = [key for key in of_file if not torch.equal(of_file[key], of_copy[key])]
        assert [key for key in differing if not key.endswith(("norm.weight", "memory_decay"))] == []
        for key in differing:  # one was added and taken away, or a power taken
            assert (of_file[key] - of_copy[key]).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("as_type", "name"),
    [("exaone", "Llama"), ("internlm2", "Llama, linear scaling"), ("xverse", "Llama"), ("minicpm", "Granite")],
)
def test_models_that_are_others_by_another_name_are_read_as_those(as_type: str, name: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS[name])
    write_gguf(folder, path, GGMLQuantizationType.F32, as_type=as_type)
    assert read_header(path).keys["general.architecture"] == as_type
    its = resolve_model(str(path))
    assert replace(load_config(its), eos_token_ids=()) == replace(load_config(folder), eos_token_ids=())
    of_file, expected = (
        dict(Checkpoint(one, load_config(one)).stream(dtype=torch.float32, device="cpu")) for one in (its, folder)
    )
    assert of_file.keys() == expected.keys()
    assert all(torch.equal(of_file[key], expected[key]) for key in of_file)


def test_older_files_of_minicpm_have_its_factors(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Granite"])
    write_gguf(folder, path, GGMLQuantizationType.F32, as_type="minicpm")
    header = read_header(path)
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        del header.keys[f"minicpm.{name}"]
    fields = describe_config(header)
    hidden, num_layers = fields["hidden_size"], fields["num_hidden_layers"]
    factors = [fields[f"{name}"] for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")]
    assert factors == [12.0, 1.4 / num_layers**0.5, hidden / 256]


@pytest.mark.parametrize("name", ["GLM 4", "Phi"])
def test_queries_keys_and_values_may_be_one_tensor(name: str, tmp_path: Path) -> None:
    folder, path, fused = tmp_path / "folder", tmp_path / "model.gguf", tmp_path / "fused.gguf"
    write_model(folder, *MODELS[name])
    write_gguf(folder, path, GGMLQuantizationType.Q8_0)
    write_gguf(folder, fused, GGMLQuantizationType.Q8_0, fuses=True)
    assert "blk.0.attn_qkv.bias" in read_header(fused).tensors
    of_file, of_fused = (
        dict(Checkpoint(its, load_config(its)).stream(dtype=torch.float32, device="cpu"))
        for its in (resolve_model(str(path)), resolve_model(str(fused)))
    )
    assert of_file.keys() == of_fused.keys()
    assert all(torch.equal(of_file[key], of_fused[key]) for key in of_file)


def test_experts_may_be_tensors_of_their_own(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Mixtral"])
    write_gguf(folder, path, GGMLQuantizationType.Q8_0)
    header = read_header(path)
    expected = named_tensors(header)
    for name in [name for name in header.tensors if "_exps." in name]:
        joined = header.tensors.pop(name)
        for e in range(joined.shape[0]):
            header.tensors[name.replace("_exps.", f".{e}.")] = joined.entry(e)
    assert "blk.1.ffn_gate.3.weight" in header.tensors
    assert named_tensors(header) == expected


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("GLM 4.5", "blk.2.nextn"),
        ("K-EXAONE, past its window", "blk.4.nextn"),
        ("Qwen3.5", "blk.4.nextn"),
        ("Qwen3.5 with experts", "blk.2.nextn"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(name: str, tensor: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS[name])
    write_gguf(folder, path, GGMLQuantizationType.Q8_0, num_behind=1)
    assert f"{tensor}.enorm.weight" in read_header(path).tensors
    its = resolve_model(str(path))
    assert replace(load_config(its), eos_token_ids=()) == replace(load_config(folder), eos_token_ids=())
    Checkpoint(its, load_config(its))


@pytest.mark.parametrize(("name", "kinds"), [("Laguna", "fsss"), ("Command A+", "fsss"), ("Trinity", "sssf")])
def test_a_pattern_of_windows_that_no_file_says_is_that_of_the_architecture(
    name: str, kinds: str, tmp_path: Path
) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS[name])
    write_gguf(folder, path, GGMLQuantizationType.F16)
    header = read_header(path)
    header.keys.pop(f"{header.keys['general.architecture']}.attention.sliding_window_pattern", None)
    assert "".join(kind[0] for kind in describe_config(header)["layer_types"]) == kinds


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "another router": (
        "GLM 4.5",
        {"expert_gating_func": 1},
        "expert_gating_func must be 2, as in all of them, got 1",
    ),
    "no layer at all": (
        "GLM 4.5",
        {"nextn_predict_layers": 2},
        "glm4moe.nextn_predict_layers must be an integer in [0, 2), got 2",
    ),
    "rows for images": (
        "GLM 4 of 2025",
        {"rope.dimension_sections": [8, 4, 4, 0]},
        "glm4.rope.dimension_sections must be None, as files of models that see order rows otherwise, got [8, 4, 4, 0]",
    ),
    "another epsilon": (
        "OLMo, clipped",
        {"attention.layer_norm_epsilon": 1e-6},
        "must be 1e-05, as in all, got 1e-06",
    ),
    "windows of some layers": (
        "EXAONE 4, past its window",
        {"attention.sliding_window_pattern": [True]},
        "exaone4.attention.sliding_window_pattern must be an integer or a list of 4, got [True]",
    ),
    "another YaRN": (
        "Qwen2, YaRN, past its first context",
        {"rope.scaling.yarn_ext_factor": 0.5},
        "qwen2.rope.scaling.yarn_ext_factor must be 1.0, as in all published files, got 0.5",
    ),
    "another scaling": (
        "Llama, linear scaling",
        {"rope.scaling.type": "dynamic"},
        "llama.rope.scaling.type must be none, linear, yarn or longrope, got 'dynamic'",
    ),
    "many heads of keys": (
        "GPTBigCode, one KV head",
        {"attention.head_count_kv": 4},
        "must be 1, as in all published, got 4",
    ),
    "heads of three of four layers": (
        "Laguna",
        {"attention.head_count": [4, 6, 4]},
        "laguna.attention.head_count must be an integer of at least 1, or a list of 4, got [4, 6, 4]",
    ),
    "turns of no layer": (
        "Granite Swash",
        {"attention.rope_pattern": [0.5]},
        "granite_swa.attention.rope_pattern must be a list of true or false, got [0.5]",
    ),
    "gates of too few layers": (
        "Gemma 3n",
        {"activation_sparsity_scale": [0.5, 1.5]},
        "gemma3n.activation_sparsity_scale must be a list of 6 numbers, or -inf for some, got [0.5, 1.5]",
    ),
    "no gates": (
        "Gemma 3n",
        {"activation_sparsity_scale": [float("inf")] * 6},
        "gemma3n.activation_sparsity_scale must be a list of 6 numbers, or -inf for some, got [inf, inf",
    ),
    "no numbers of gates": (
        "Gemma 3n",
        {"activation_sparsity_scale": None},
        "gemma3n.activation_sparsity_scale must be a list of 6 numbers, or -inf for some, but is missing",
    ),
    "widths of no kind": (
        "Gemma 4, inputs of layers and shared keys",
        {"feed_forward_length": [96, 96, 96, 192, 192, 96]},
        "gemma4.feed_forward_length must be one width, or twice it for the last 3 layers, got [96, 96, 96, 192, 192",
    ),
    "heads of too few layers": (
        "Gemma 4",
        {"attention.head_count_kv": [2, 1]},
        "gemma4.attention.head_count_kv must be an integer of at least 1, or a list of 4, got [2, 1]",
    ),
    "heads of layers that differ": (
        "LFM2 with experts",
        {"attention.head_count_kv": [0, 2, 0, 4]},
        "lfm2moe.attention.head_count_kv must be a list of 4, each of them 0 or the same integer, got [0, 2, 0, 4]",
    ),
    "no heads": (
        "LFM2 with experts",
        {"attention.head_count_kv": [0, 0, 0, 0]},
        "lfm2moe.attention.head_count_kv must be an integer of at least 1, got [0, 0, 0, 0]",
    ),
    "a part of a value": (
        "Qwen3.5",
        {"ssm.inner_size": 97},
        "qwen35.ssm.inner_size must be a multiple of ssm.time_step_rank (4), got 97",
    ),
    "states of three of four layers": (
        "Qwen3.5",
        {"attention.recurrent_layers": [True, True, False]},
        "qwen35.attention.recurrent_layers must be a list of 4 times true or false, got [True, True, False]",
    ),
    "weights of all experts": (
        "Qwen3-Next",
        {"expert_weights_norm": False},
        "qwen3next.expert_weights_norm must be True, as in all of them, got False",
    ),
    "weights of experts times a factor": (
        "Qwen3.5 with experts",
        {"expert_weights_scale": 2.5},
        "qwen35moe.expert_weights_scale must be 1.0, as in all of them, got 2.5",
    ),
    "heads that rotate": (
        "Granite 4-H",
        {"rope.scaling.finetuned": True},
        "granitehybrid.rope.scaling.finetuned must be False, as files of models that rotate heads (Bamba) are not read",
    ),
    "more heads than channels": (
        "Granite 4-H",
        {"attention.head_count": 65},
        "granitehybrid.attention.head_count must be at most embedding_length (64), got 65",
    ),
    "a mixer of no whole width": (
        "Granite 4-H",
        {"ssm.inner_size": 100},
        "granitehybrid.ssm.inner_size must be a multiple of embedding_length (64), got 100",
    ),
    "a part of a head of a mixer": (
        "Nemotron-H",
        {"ssm.inner_size": 63},
        "nemotron_h.ssm.inner_size must be a multiple of ssm.time_step_rank (4), got 63",
    ),
    "one width for all blocks": (
        "Nemotron-H",
        {"feed_forward_length": 96},
        "nemotron_h.feed_forward_length must be a list of 8, got 96",
    ),
    "a part of a head": (
        "Gemma 4",
        {"rope.dimension_count_swa": 8},
        "gemma4.rope.dimension_count_swa must be 16, as whole heads turn, got 8",
    ),
    "no flag": ("GPT-NeoX", {"use_parallel_residual": 1}, "gptneox.use_parallel_residual must be true or false, got 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_family_computes_is_refused(name: str, tmp_path: Path) -> None:
    model, keys, message = REFUSED[name]
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS[model])
    write_gguf(folder, path, GGMLQuantizationType.F16)
    header = read_header(path)
    architecture = header.keys["general.architecture"]
    header.keys.update({f"{architecture}.{key}": value for key, value in keys.items()})
    with pytest.raises(WeightsError, match=re.escape(message)):
        describe_config(header)


@pytest.mark.parametrize(("kind", "scaling"), [("none", None), (None, {"rope_type": "linear", "factor": 4.0})])
def test_a_factor_counts_unless_nothing_is_scaled(
    kind: str | None, scaling: dict[str, object] | None, tmp_path: Path
) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Llama, linear scaling"])
    write_gguf(folder, path, GGMLQuantizationType.F16)
    header = read_header(path)
    header.keys.update({"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0})
    assert describe_config(header).get("rope_scaling") == scaling


@pytest.mark.parametrize(
    ("factors", "rule"),
    [
        ([1.0, 1e30, 1.0, 1e30], "have 16 factors, 1 and then another"),
        ([1.0] * 4 + [2.0] * 12, "have no factor but 1 below 1e+20"),
        ([2.0] * 16, "have 16 factors, 1 and then another"),
    ],
)
def test_factors_that_turn_no_share_of_a_head_are_refused(factors: list[float], rule: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Gemma 4"])
    write_gguf(folder, path, GGMLQuantizationType.F32)
    header = read_header(path)
    stored = header.tensors["rope_freqs.weight"]
    data = bytearray(path.read_bytes())
    values = struct.pack(f"<{len(factors)}f", *factors)
    data[stored.start : stored.start + len(values)] = values
    path.write_bytes(data)
    end = stored.start + len(values)
    header.tensors["rope_freqs.weight"] = replace(stored, shape=(len(factors),), end=end)
    with pytest.raises(InvalidCheckpointError) as refused:
        describe_config(header)
    assert str(refused.value) == f"{path}: rope_freqs.weight must {rule}"


def test_gates_and_ups_of_experts_may_be_tensors_of_their_own(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Gemma 4 with experts"])
    write_gguf(folder, path, GGMLQuantizationType.F32)
    header = read_header(path)
    for name in [name for name in header.tensors if "ffn_gate_up_exps" in name]:
        joined = header.tensors.pop(name)
        for part in ("gate", "up"):
            header.tensors[name.replace("gate_up", part)] = joined
    found = named_tensors(header)
    assert {name for name in found if "gate_up" in name} == {
        f"model.layers.{i}.experts.gate_up_proj.{half}" for i in range(4) for half in ("first", "last")
    }


def test_rows_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["GLM 4"])
    write_gguf(folder, path, GGMLQuantizationType.F16, fuses=True)
    header = read_header(path)
    header.keys["chatglm.attention.head_count"] = 2
    with pytest.raises(InvalidCheckpointError, match=r"tensor blk.0.attn_qkv.\w+ must have \d+ rows, got 128"):
        named_tensors(header)


@pytest.mark.parametrize(
    ("model", "key", "tensor", "of_what"),
    [
        ("StableLM 2 12B", "stablelm.attention.head_count_kv", "attn_k_norm", "1 heads, got 2"),
        ("Mixtral", "llama.expert_count", r"ffn_\w+_exps", "1 experts, got 4"),
    ],
)
def test_parts_that_are_no_heads_or_experts_are_refused(
    model: str, key: str, tensor: str, of_what: str, tmp_path: Path
) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS[model])
    write_gguf(folder, path, GGMLQuantizationType.F16)
    header = read_header(path)
    header.keys[key] = 1
    with pytest.raises(InvalidCheckpointError, match=rf"tensor blk.0.{tensor}.weight must have {of_what}$"):
        named_tensors(header)


@pytest.mark.parametrize(("value", "found"), [(None, "but is missing"), ([0.5], r"got \[0.5\]"), (0.5, "got 0.5")])
def test_numbers_that_no_layer_has_are_refused(value: list[float] | float | None, found: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Apertus"])
    write_gguf(folder, path, GGMLQuantizationType.F16)
    header = read_header(path)
    assert header.vectors["xielu.beta"].shape == (2,)
    whole = header.vectors.pop("xielu.beta")
    del header.keys["xielu.beta"]
    if value is not None:
        header.keys["xielu.beta"] = value
    if isinstance(value, list):
        header.vectors["xielu.beta"] = replace(whole, shape=(1,))
    with pytest.raises(InvalidCheckpointError, match=rf"xielu.beta must be an array of 2 numbers in F32, {found}$"):
        named_tensors(header)


def test_the_inventory_names_the_types_of_a_file(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Mixtral"])
    write_gguf(folder, path, GGMLQuantizationType.Q4_1)
    its = resolve_model(str(path))
    parts = list(stored_parts(its, load_config(its)))

    experts = [part for part in parts if ".experts." in part.canonical]
    assert {part.type for part in experts} == {"GGUF's Q4_1"}
    assert sum(part.num_bytes for part in experts) * 8 == 5 * sum(part.num_weights for part in experts)
    assert {part.type for part in parts if part.canonical.endswith("norm.weight")} == {"GGUF's F32"}


def test_an_engine_gives_the_tokens_of_the_checkpoint(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model-Q8_0.gguf"
    write_model(folder, *MODELS["Llama"])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_gguf(folder, path, GGMLQuantizationType.Q8_0, in_place=copy)
    requests = [make_request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(ragged_prompts(4, 60))]
    folders = resolve_model(str(path)), copy, folder
    of_file, of_copy, of_float = (run(make_engine(its, quantization="none"), requests) for its in folders)
    assert of_file == of_copy != of_float


def test_all_architectures_are_tried() -> None:
    assert {its.model_type for its in ARCHITECTURES.values()} == {model_type for model_type, _ in MODELS.values()}


def test_what_is_refused_as_another_architecture_has_its_reason() -> None:
    assert set(MODEL_TYPES.values()) <= _REASONS.keys()
    assert not {name.replace("-", "_") for name in ARCHITECTURES} & {*_REASONS, *MODEL_TYPES}


def test_all_architectures_of_llama_cpp_are_read_or_refused_with_a_reason() -> None:
    assert [name for name in MODEL_ARCH_NAMES.values() if name not in ARCHITECTURES and why_refused(name) is None] == []
