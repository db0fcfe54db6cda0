"""A key that nobody reads and that may change numbers is refused by name; real configurations are not."""

from __future__ import annotations

import copy
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families import FAMILIES, config_keys, load_config
from gptserve.weights.families.config_keys import (
    NAMES,
    PATTERN,
    PRIVATE_CHOICES,
    SAID_AGAIN,
    DoubtfulKeys,
)
from gptserve.weights.families.family import RawConfig
from tests.parity.shapes import SHAPES
from tests.weights.families.harmless_keys import modeling_of, of_family
from tests.weights.families.known import KNOWN

OF_TRANSFORMERS = sorted(FAMILIES.keys() - {"nanogpt"})
OF_GGUF = ("bloom", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Those that transformers makes of GGUF files."""
FIRST = {model_type: name for name, (model_type, _) in reversed(SHAPES.items())}
LLAMA = KNOWN["Llama 3 8B"][0]
QWEN = KNOWN["qwen2.5-0.5b"][0]

OF_OTHER_CLASSES = {
    *("get_text_config", "is_encoder_decoder", "mm_tokens_per_image", "text_config", "vision_config"),
    *("depth", "in_channels", "num_position_embeddings", "out_hidden_size", "patch_size", "spatial_merge_size"),
    *("image_token_id", "temporal_patch_size", "video_token_id", "vision_start_token_id"),
}
"""Fields of other classes of a family's file: Gemma 3 and Qwen3.5 with images, encoder-decoders."""

# As they are found in files on the hub, beside the fields of their families.
EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every field of transformers 4": (
        LLAMA,
        {
            **{"return_dict": True, "output_hidden_states": False, "torchscript": False, "torch_dtype": "bfloat16"},
            **{"use_bfloat16": False, "tf_legacy_loss": False, "pruned_heads": {}, "chunk_size_feed_forward": 0},
            **{"is_encoder_decoder": False, "is_decoder": False, "cross_attention_hidden_size": None},
            **{"add_cross_attention": False, "tie_encoder_decoder": False, "max_length": 20, "min_length": 0},
            **{"do_sample": True, "num_beams": 1, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "typical_p": 1.0},
            **{"repetition_penalty": 1.1, "length_penalty": 1.0, "bad_words_ids": None, "num_return_sequences": 1},
            **{"architectures": ["LlamaForCausalLM"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
            **{"tokenizer_class": "LlamaTokenizer", "prefix": None, "task_specific_params": {"x": 1}},
            **{"_name_or_path": "meta-llama/Meta-Llama-3-8B", "transformers_version": "4.40.0", "use_cache": True},
            **{"attention_bias": False, "attention_dropout": 0.1, "initializer_range": 0.02, "pretraining_tp": 1},
            **{"bos_token_id": 128000, "pad_token_id": 128001, "_attn_implementation_autoset": True},
        },
    ),
    "an early K-EXAONE": (
        {"model_type": "exaone_moe", **SHAPES["K-EXAONE, past its window"][1]},
        {
            **{"first_last_k_dense_replace": 1, "is_moe_layer": [False, True, True, True], "scoring_func": "sigmoid"},
            **{"layer_types": [*["sliding_attention"] * 3, "full_attention"], "sliding_window_pattern": "LLLG"},
            **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "quantization_config": None},
        },
    ),
    "Hy3": (
        {"model_type": "hy_v3", **SHAPES["Hy3"][1]},
        {
            **{"enable_attention_fp32_softmax": False, "enable_lm_head_fp32": True, "enable_moe_fp32_combine": False},
            **{"expert_hidden_dim": 32, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "qk_norm": True},
            **{"moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "route_norm": True},
            **{"use_grouped_mm": False},
        },
    ),
    "SmolVLM2": (
        {"model_type": "smolvlm", **SHAPES["SmolVLM"][1]},
        {
            **{"vocab_size": 96, "image_seq_len": 81, "scale_factor": 3, "use_reentrant_checkpointing": False},
            "text_config": {
                **SHAPES["SmolVLM"][1]["text_config"],
                **{"_flash_attn_2_enabled": True, "is_llama_config": True, "neftune_noise_alpha": 0.0},
                **{"perceiver_config": {"resampler_depth": 6}, "pixel_shuffle_factor": 3, "qk_layer_norms": False},
                **{"rope_interleaved": False, "use_resampler": False, "transformers.js_config": {}},
            },
        },
    ),
    "InternVL 3.5": (
        {"model_type": "internvl", **SHAPES["InternVL 3.5"][1]},
        {
            **{"downsample_ratio": 0.5, "image_seq_length": 256, "vision_feature_select_strategy": "default"},
            "text_config": {
                **SHAPES["InternVL 3.5"][1]["text_config"],
                **{"debug": False, "ep_size": 1, "micro_forward": False, "moe_config": None, "skip_checkpoint": False},
                **{"use_deepep": False, "use_bfloat16": True},
            },
        },
    ),
    "HyperCLOVA X": (
        {"model_type": "hyperclovax", **SHAPES["HyperCLOVA X"][1]},
        {"resid_pdrop": 0.2, "residual_multiplier": 1.0, "end_token_id": 1, "pretraining_tp": 1, "use_post_norm": True},
    ),
    "IQuest-Coder": (
        {"model_type": "iquestcoder", **SHAPES["IQuest-Coder"][1]},
        {"clip_qkv": None, "max_window_layers": 0, "sliding_window": None, "use_sliding_window": False},
    ),
    "a fine-tune by unsloth": (LLAMA, {"unsloth_fixed": True, "unsloth_version": "2025.8.1", "mlp_bias": False}),
    "for a browser": (LLAMA, {"transformers.js_config": {"dtype": {"q4": "x"}}, "head_dim": 128}),
    "an early Llama": (LLAMA, {"max_sequence_length": 2048, "pad_token_id": -1, "rope_interleaved": False}),
    "Qwen2.5 written by transformers 5": (
        QWEN,
        {
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 24,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "use_sliding_window": False,
        },
    ),
    "the text part of a Qwen2.5-VL": (
        QWEN,
        {"rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}},
    ),
    "a Qwen2.5-1M": (
        QWEN,
        {
            "dual_chunk_attention_config": {
                "chunk_size": 262_144,
                "local_size": 8192,
                "original_max_position_embeddings": 1,
            }
        },
    ),
    "GPT-2": (
        KNOWN["GPT-2 124M"][0],
        {
            **{"n_ctx": 1024, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "n_inner": None},
            **{"summary_activation": None, "summary_proj_to_labels": True, "summary_type": "cls_index"},
            **{"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "_num_labels": 1},
            **{"reorder_and_upcast_attn": True, "gradient_checkpointing": False, "output_past": True},
        },
    ),
    "GPT-SW3": (
        KNOWN["GPT-2 124M"][0],
        {
            "apply_query_key_layer_scaling": True,
            "normalize_attention_scores": True,
            "tokenizer_class": "GPTSw3Tokenizer",
        },
    ),
    "one that says how it reads": (QWEN, {"is_causal": True}),
    "GPT-1": (KNOWN["GPT-1 117M"][0], {"n_ctx": 512, "n_special": 0, "predict_special_tokens": True}),
    "Falcon 11B": (
        KNOWN["falcon-40b"][0],
        {
            **{
                "activation": "gelu",
                "ff_factor": 4,
                "ffn_hidden_size": 32_768,
                "multi_query": True,
                "rope_scaling": None,
            },
            **{"num_ln_in_parallel_attn": 1, "rope_theta": 500_042.0, "max_position_embeddings": 8192},
        },
    ),
    "CodeGen": (KNOWN["codegen-350M-mono"][0], {"n_ctx": 2048, "scale_attn_weights": True}),
    "GPT-J": (KNOWN["gpt-j-6b"][0], {"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False}),
    "BLOOM": (
        KNOWN["bloom-560m"][0],
        {
            **{"attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True},
            **{"skip_bias_add": True, "skip_bias_add_qkv": False, "pretraining_tp": 2, "slow_but_exact": False},
            **{"unk_token_id": 0, "hidden_dropout": 0.0},
        },
    ),
    "StarCoder": (
        KNOWN["starcoder"][0],
        {"scale_attention_softmax_in_fp32": True, "pad_key_length": True, "pre_allocate_kv_cache": False},
    ),
    "Galactica": (KNOWN["opt-125m"][0], {"learned_embeddings": True, "scale_embeddings": False, "layerdrop": 0.0}),
    "MPT": (
        KNOWN["mpt-7b"][0],
        {
            "init_config": {"init_std": 0.02},
            "init_device": "cpu",
            "tokenizer_name": "x",
            "verbose": 0,
            "fc_type": "torch",
        },
    ),
    "Phi-4-mini": (KNOWN["phi-3-mini-4k"][0], {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
    "Gemma 3": (KNOWN["gemma-3-1b"][0], {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}),
    "Gemma 2 9B and 27B": (KNOWN["gemma-2-2b"][0], {"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"}),
    "OPT 13B": (KNOWN["opt-125m"][0], {"output_projection": True, "prefix": "</s>", "activation_dropout": 0.0}),
    "some of Falcon 3": (LLAMA, {"activation": "swiglu"}),
    "ALLaM": (LLAMA, {"internal_version": "7b-alpha-v1.27.2.25", "_name_or_path": "x"}),
    "from GGUF": (LLAMA, {"_model_name_or_path": "Meta Llama 3 8B", "unk_token_id": 0}),
    "with texts": (
        LLAMA,
        {
            **{"description": "a fine-tune", "author": "me", "authors": ["me", "you"], "license": "apache-2.0"},
            **{"vocab_file": "tokenizer.model", "tokenizer_file": "tokenizer.json", "organization": "us"},
        },
    ),
    "layers without windows": (LLAMA, {"layer_types": ["full_attention"] * 32}),
    "QwQ 32B": (
        QWEN,
        {"use_sliding_window": True, "sliding_window": 32_768, "max_window_layers": QWEN["num_hidden_layers"]},
    ),
    "Qwen3-Coder 30B": (
        KNOWN["Qwen3-30B-A3B"][0],
        {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0},
    ),
    "ERNIE 4.5 21B": (KNOWN["ERNIE-4.5-21B-A3B-PT"][0], {"use_rmsnorm": True, "moe_capacity": [64, 64, 64]}),
    "Command A": (KNOWN["c4ai-command-r7b-12-2024"][0], {"use_parallel_embedding": False}),
    "gpt-oss": (
        KNOWN["gpt-oss-20b"][0],
        {
            **{"experts_per_token": 4, "initial_context_length": 4096, "output_router_logits": False},
            **{"router_aux_loss_coef": 0.9, "hidden_act": "silu", "attention_dropout": 0.0},
        },
    ),
}


def load(folder: Path, raw: dict[str, Any], doubtful_keys: DoubtfulKeys = "accept") -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder, doubtful_keys)


_IDS = {"bos_token_id": 0, "eos_token_id": 0}
NEEDED: dict[str, dict[str, Any]] = {
    "arcee": _IDS,
    "starcoder2": _IDS,
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16, "num_local_experts": 0},
}
"""What no model can be without, where transformers' class has no value, or one outside of its vocabulary."""


SEEING = (
    *(
        "aya_vision",
        "cohere2_vision",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "idefics3",
        "internvl",
        "lfm2_vl",
        "llava",
    ),
    *("llava_next", "llava_onevision", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3_5_moe", "smolvlm"),
)
"""Their modeling files read the fields of what sees, too; the fields of their text have tests as families of text."""
BESIDE_SEEING = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
"""Their modeling files have what sees and hears, too."""


def default_config(model_type: str, *, use_diff: bool = False) -> dict[str, Any]:
    """What transformers writes for a model of its default size."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=use_diff))
    return raw


@pytest.mark.some(11)
@pytest.mark.parametrize("use_diff", [True, False])
@pytest.mark.parametrize("model_type", OF_TRANSFORMERS)
def test_what_transformers_writes_is_accepted(model_type: str, use_diff: bool, tmp_path: Path) -> None:
    load(tmp_path, default_config(model_type, use_diff=use_diff), "refuse")


@pytest.mark.some(16)
@pytest.mark.parametrize("model_type", OF_TRANSFORMERS)
def test_what_transformers_saves_is_accepted(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))
    config.save_pretrained(tmp_path)
    saved = load_config(tmp_path)

    assert load(tmp_path, config.to_dict()) == saved


@pytest.mark.some(4)
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.slow) for name in SHAPES]
)
def test_a_field_that_is_absent_or_null_is_what_transformers_takes_it_for(
    name: str, absent: bool, tmp_path: Path
) -> None:
    """Or the file is refused, as ours reads no model without a size. Ends of text have tests of their own."""
    from transformers import AutoConfig

    model_type, fields = SHAPES[name]
    whole: dict[str, Any] = json.loads(AutoConfig.for_model(model_type, **fields).to_json_string(use_diff=False))
    whole |= {name: fields.get(name) for name in ("eos_token_id", "bos_token_id")}
    num_compared = 0
    for field in whole.keys() - {"model_type", "eos_token_id", "bos_token_id"}:
        sparse = {key: value for key, value in whole.items() if key != field} | ({} if absent else {field: None})
        try:
            found = load(tmp_path, sparse)
            filled = json.loads(AutoConfig.for_model(**sparse).to_json_string(use_diff=False))
            expected = load(tmp_path, filled)
        except Exception:  # transformers has many kinds
            continue
        assert found == expected, field
        num_compared += 1
    assert num_compared > 9


@pytest.mark.parametrize("model_type", OF_GGUF)
def test_what_transformers_makes_of_a_gguf_file_is_accepted(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    default = AutoConfig.for_model(model_type).to_dict()
    default |= {"n_ctx": 1024, "feed_forward_length": 3072, "rope_theta": 10_000.0}
    of_type = GGUF_CONFIG_MAPPING[model_type.removesuffix("_text")].values()
    fields = {name: default[name] for name in of_type if name is not None and default.get(name) is not None}
    config = AutoConfig.for_model(model_type, **fields, _model_name_or_path="A Model", unk_token_id=0)
    config.save_pretrained(tmp_path)

    assert json.loads((tmp_path / "config.json").read_text())["_model_name_or_path"] == "A Model"
    load_config(tmp_path)


@pytest.mark.some(40)
@pytest.mark.parametrize("name", KNOWN)
def test_no_key_of_a_published_config_is_doubtful(name: str, tmp_path: Path) -> None:
    load(tmp_path, KNOWN[name][0], "refuse")


@pytest.mark.some(11)
@pytest.mark.parametrize("name", EXTRAS)
def test_what_is_found_on_the_hub_is_accepted(name: str, tmp_path: Path) -> None:
    raw, extra = EXTRAS[name]
    load(tmp_path, raw | extra, "refuse")


@pytest.mark.some(14)
@pytest.mark.parametrize("model_type", [name for name in OF_TRANSFORMERS if name not in SEEING])
def test_every_field_that_transformers_computes_with_is_read_or_known(model_type: str) -> None:
    from transformers import AutoConfig

    path = importlib.import_module(modeling_of(type(AutoConfig.for_model(model_type)))).__file__
    assert path is not None
    fields = set(re.findall(r"config\.(\w+)", Path(path).read_text(encoding="utf-8")))
    if model_type in BESIDE_SEEING:
        fields &= default_config(model_type).keys()
    raw = RawConfig(dict.fromkeys(fields) | default_config(model_type))

    FAMILIES[model_type].read_config(raw)

    known = NAMES | SAID_AGAIN.keys() | OF_OTHER_CLASSES
    unread = fields & {name.rpartition(": ")[2] for name in raw.unread()}
    unread = {name for name in unread if name in PRIVATE_CHOICES or not name.startswith("_")}
    assert {name for name in unread if not PATTERN.fullmatch(name)} <= known


@pytest.mark.some(16)
@pytest.mark.parametrize("model_type", [*OF_TRANSFORMERS, "nanogpt"])
def test_an_unknown_key_is_refused_by_name_with_its_value(model_type: str, tmp_path: Path) -> None:
    raw = (
        {"model_type": "nanogpt", "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 9}
        if model_type == "nanogpt"
        else default_config(model_type)
    )
    load(tmp_path, raw)
    for value in (3, 0.5, True, "on", [1], {"a": 1}):
        with pytest.raises(UnsupportedModelError) as caught:
            load(tmp_path, raw | {"residual_factor": value})
        assert str(caught.value) == (
            f"config.json sets `residual_factor` to {value!r}, which gptserve does not know and which may "
            "change what is computed; remove it from the file if you know that it changes nothing"
        )


@pytest.mark.parametrize("value", [None, False, 0, 1, 0.0, 1.0, "", [], {}])
def test_an_unknown_key_that_is_off_is_accepted_with_a_warning(
    value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = LLAMA | {"residual_multiplier": value}
    load(tmp_path, raw)
    assert not caplog.records
    load(tmp_path, raw, "warn")
    (warning,) = caplog.messages
    assert warning.startswith(f"config.json sets `residual_multiplier` to {value!r}, which gptserve does not know;")
    with pytest.raises(UnsupportedModelError, match="sets `residual_multiplier` to "):
        load(tmp_path, raw, "refuse")


def test_a_key_that_has_the_default_of_transformers_class_is_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"llama": {"unread": ["spare"], "defaults": {"depth": 3, "is_deep": True}}}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    monkeypatch.setattr(config_keys, "HARMLESS_FILE", tmp_path / "keys.json")
    config_keys.harmless_keys.cache_clear()
    try:
        load(tmp_path, LLAMA | {"depth": 3, "is_deep": True, "spare": 7}, "warn")
        assert caplog.messages[0].startswith("config.json sets `depth` to 3, `is_deep` to True, which")
        load(tmp_path, LLAMA | {"spare": 7}, "refuse")
        for changed in ({"depth": 4}, {"depth": True}, {"rope_scaling": {"rope_type": "default", "depth": 3}}):
            with pytest.raises(UnsupportedModelError, match=r"`(rope_scaling: )?depth` to "):
                load(tmp_path, LLAMA | changed)
        with pytest.raises(UnsupportedModelError, match="`spare` to 7"):
            load(tmp_path, QWEN | {"spare": 7})
    finally:
        config_keys.harmless_keys.cache_clear()


def test_the_first_of_many_doubtful_keys_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, LLAMA | {f"a{i}": 0 for i in range(1, 6)}, "warn")
    assert "sets `a1` to 0, `a2` to 0, `a3` to 0, ..., which" in caplog.text


@pytest.mark.some(5)
@pytest.mark.parametrize("model_type", OF_TRANSFORMERS)
def test_the_list_of_harmless_keys_is_that_of_the_pinned_transformers(model_type: str) -> None:
    """Else run `python -m tests.weights.families.harmless_keys`."""
    assert config_keys.harmless_keys().get(model_type) == of_family(model_type)


def test_an_unknown_key_in_a_section_is_refused_by_name(tmp_path: Path) -> None:
    raw = copy.deepcopy(KNOWN["gpt-oss-20b"][0])
    raw["rope_scaling"]["attn_factor"] = 2.0
    with pytest.raises(UnsupportedModelError, match=r"^config\.json sets `rope_scaling: attn_factor` to 2\.0, which"):
        load(tmp_path, raw)


def test_many_unknown_keys_are_counted_not_listed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"`a1` to 2, `a2` to 2, `a3` to 2, \.\.\., which"):
        load(tmp_path, LLAMA | {f"a{i}": 2 for i in range(1, 6)})


def test_a_size_under_another_name_must_be_the_same(tmp_path: Path) -> None:
    gpt2 = KNOWN["GPT-2 124M"][0]
    load(tmp_path, gpt2 | {"hidden_size": 768, "num_hidden_layers": 12, "num_key_value_heads": 12, "head_dim": 64})
    with pytest.raises(UnsupportedModelError, match="sets `num_key_value_heads` to 4, which"):
        load(tmp_path, gpt2 | {"num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("gpt-j-6b", "scale_attn_weights", False, "scale_attn_weights must be true, got False"),
        ("gpt-j-6b", "rotary", False, "rotary must be true, got False"),
        ("opt-125m", "scale_embeddings", True, "scale_embeddings must be false, got True"),
        ("mpt-7b", "expansion_ratio", 2, "expansion_ratio must be 4, got 2"),
        ("bloom-560m", "n_inner", 2048, "sets `n_inner` to 2048"),
        ("gemma-2-2b", "use_bidirectional_attention", True, "use_bidirectional_attention must be false, got True"),
        ("tinyllama", "rope_interleaved", True, "sets `rope_interleaved` to True"),
        ("qwen2.5-0.5b", "use_mrope", True, "sets `use_mrope` to True"),
        ("GPT-2 124M", "pruned_heads", {"0": [1]}, "sets `pruned_heads` to {'0': [1]}"),
        ("gemma-2-2b", "sliding_window_size", 2048, "sets `sliding_window_size` to 2048"),
        ("Llama 3 8B", "sliding_window_size", 4096, "sets `sliding_window_size` to 4096"),
        ("Llama 3 8B", "sliding_window", 4096, "sets `sliding_window` to 4096"),
        ("Llama 3 8B", "layer_types", ["full_attention"] * 31, "sets `layer_types` to ["),
        ("Llama 3 8B", "layer_types", ["full_attention"] * 31 + ["sliding_attention"], "sets `layer_types` to ["),
        ("Llama 3 8B", "_sliding_window_pattern", 6, "sets `_sliding_window_pattern` to 6"),
        ("Llama 3 8B", "_remove_final_layer_norm", True, "sets `_remove_final_layer_norm` to True"),
        ("Llama 3 8B", "activation", "geglu", "sets `activation` to 'geglu'"),
        ("GPT-2 124M", "activation", "swiglu", "sets `activation` to 'swiglu'"),
        ("qwen2.5-0.5b", "is_causal", False, "sets `is_causal` to False"),
        ("starcoder2-3b", "scale_attn_weights", False, "sets `scale_attn_weights` to False"),
        ("starcoder2-3b", "mlp_type", "gated", "sets `mlp_type` to 'gated'"),
        ("starcoder2-3b", "norm_type", "rms_norm", "sets `norm_type` to 'rms_norm'"),
        ("starcoder2-3b", "activation_function", "gelu", "sets `activation_function` to 'gelu'"),
        ("starcoder2-3b", "layer_norm_epsilon", 1e-6, "sets `layer_norm_epsilon` to 1e-06"),
        ("stablelm-2-1_6b", "rotary_scaling_factor", 2.0, "sets `rotary_scaling_factor` to 2.0"),
        ("mistral-7b-v0.1", "max_window_layers", 21, "sets `max_window_layers` to 21"),
        ("Llama 3 8B", "norm_type", "layernorm", "sets `norm_type` to 'layernorm'"),
        ("GPT-2 124M", "feed_forward_length", 4096, "sets `feed_forward_length` to 4096"),
    ],
)
def test_a_real_key_that_changes_numbers_is_refused(
    name: str, field: str, value: object, message: str, tmp_path: Path
) -> None:
    load(tmp_path, KNOWN[name][0])
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        load(tmp_path, KNOWN[name][0] | {field: value})
