"""From a folder to its ModelConfig: what is supported, and which sentence ends a config that lies."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, WeightsError
from gptserve.weights.families import FAMILIES, find_family, load_config
from gptserve.weights.quantized import METHODS
from gptserve.weights.refused import WHY_REFUSED
from tests.parity.shapes import SHAPES
from tests.weights.families.known import KNOWN
from tests.weights.families.models_table import PAGE, with_table

ENDS = {"eos_token_id": None, "bos_token_id": None}
GOOD = {"model_type": "gpt2", "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}


def load(folder: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(GOOD | fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_config(folder)


def test_every_family_is_found_by_its_model_type() -> None:
    assert [find_family(model_type).model_type for model_type in FAMILIES] == list(FAMILIES)
    assert len({id(family) for family in FAMILIES.values()}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", "bert is an encoder: .* cannot continue it; to embed or classify with it, use sentence-transformers"),
        ("roberta", "roberta is an encoder: it reads text in both directions and cannot continue it"),
        ("t5", "t5 is an encoder-decoder: .* cannot continue it; use transformers for it"),
        (
            "mllama",
            "mllama reads images or sound beside text, and only text is read here; use a text model of its lineage",
        ),
        ("paligemma", "paligemma reads images or sound beside text"),
        (
            "deepseek_v3",
            r"deepseek_v3 has latent attention \(MLA\), whose keys and values are one vector for all heads",
        ),
        (
            "jamba",
            "jamba has layers that keep a state in place of keys and values in another way than those that are served",
        ),
        (
            "llama4_text",
            "llama4_text attends within chunks of 8,192 positions, and its routers weigh what experts read",
        ),
        ("deepseek_v4", "deepseek_v4 attends to compressed keys and values"),
        ("phimoe", r"phimoe chooses each expert by a softmax of its own \(SparseMixer\)"),
        ("beam", r"beam multiplies what attention gives by gates of its input \(as BEAM does\)"),
        ("mimo_v2_flash", "mimo_v2_flash has values of another size than its keys"),
        ("bitnet", "bitnet has ternary weights, and norms inside attention and feed-forward"),
        ("RefinedWebModel", "RefinedWebModel is Falcon in the format of its own code: use its present files, whose"),
        ("mamba\n", r"config\.json: model_type 'mamba\\n' is not supported"),
    ],
)
def test_other_models_are_refused_with_the_reason_and_what_is_served(model_type: str, reason: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"^{reason}.*; decoder-only models of model_type .*gpt2.* are served$"
    ):
        find_family(model_type)


def test_the_table_of_models_is_that_of_the_families() -> None:
    """Else run `python -m tests.weights.families.models_table`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adapter_config.json", "it holds an adapter and no model; merge it into its base model, and serve that"),
        ("params.json", "it is in the format of its makers' own code; use its files in the format of transformers"),
    ],
)
def test_a_folder_without_config_json_is_told_by_another_file(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=f"^{tmp_path} has {name} and no config.json: {reason}$"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    assert load_config(tmp_path).model_type == "gpt2"


def test_no_model_is_both_served_and_refused() -> None:
    refused = [model_type for model_types in WHY_REFUSED for model_type in model_types]
    assert len(set(refused)) == len(refused)
    assert not FAMILIES.keys() & set(refused)


def test_all_that_transformers_lists_is_served_or_refused_with_a_reason() -> None:
    from transformers.models.auto import modeling_auto as auto

    listed = {*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    listed |= {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    refused = {model_type for model_types in WHY_REFUSED for model_type in model_types}
    assert listed - refused - set(FAMILIES) == {"gpt-sw3"}  # its files say gpt2


def test_a_model_with_code_of_its_own_is_refused_and_one_that_is_known_is_served(tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    with pytest.raises(UnsupportedModelError, match=r"^'chatglm' brings its own code .* which is never run; use"):
        load(tmp_path, model_type="chatglm", auto_map=code)
    with pytest.raises(UnsupportedModelError, match=r"^deepseek_v3 has latent attention"):
        load(tmp_path, model_type="deepseek_v3", auto_map=code)
    assert load(tmp_path, auto_map=code).model_type == "gpt2"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("quantization_config", {"quant_method": "hqq", "bits": 4}, "by the method 'hqq', which gptserve cannot read"),
        (
            "quantization_config",
            {"load_in_8bit": True},
            "in a way that gptserve cannot read (config.json: quantization_config",
        ),
        ("quantization", {"group_size": 64}, "in a way that gptserve cannot read (config.json: quantization)"),
        ("compression_config", {"quant_method": "torchao"}, "by the method 'torchao'"),
        ("quantization_config", {"quant_method": ["x"]}, "in a way that gptserve cannot read"),
    ],
)
def test_quantized_weights_are_named_with_what_to_use_instead(
    key: str, value: object, named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, **{key: value})
    assert str(caught.value).startswith("the weights are quantized " + named)
    use = f"use a checkpoint of this model in fp32, fp16 or bf16, or one that is quantized by {', '.join(METHODS)}"
    assert str(caught.value).endswith(f"; {use}")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("hf_quant_config.json", ": quantization: quant_algo must be nvfp4, fp8, got None: others are not read"),
        ("quantize_config.json", ": bits must be 4 or 8, but is missing"),
        ("quant_config.json", ": w_bit must be 4, but is missing"),
    ],
)
def test_quantized_weights_are_known_by_the_file_beside_them(name: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert str(caught.value) == name + rule


def test_gpt_oss_is_read_in_its_own_quantization(tmp_path: Path) -> None:
    raw = KNOWN["gpt-oss-20b"][0]
    assert raw["quantization_config"]["quant_method"] == "mxfp4"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).model_type == "gpt_oss"
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(UnsupportedModelError, match=r"'hqq', which .* in fp32, fp16 or bf16, or .*mxfp4"):
        load_config(tmp_path)


def test_end_of_text_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    assert load(tmp_path).eos_token_ids == ()
    assert load(tmp_path, eos_token_id=3, bos_token_id=4).eos_token_ids == (3,)
    config = load(tmp_path, {"eos_token_id": [7, 3]}, eos_token_id=3, bos_token_id=4)
    assert config.eos_token_ids == (3, 7)
    assert config.bos_token_id == 4
    assert load(tmp_path, {"eos_token_id": 0}, eos_token_id=[1, 2]).eos_token_ids == (1, 2, 0)


@pytest.mark.parametrize("token_id", ["7", 1.0, True, [[3]]])
def test_an_end_of_text_id_that_is_no_integer_is_refused(tmp_path: Path, token_id: object) -> None:
    rule = "an integer or a list of integers, got "
    with pytest.raises(InvalidConfigError, match=rf"^config\.json: eos_token_id must be {rule}"):
        load(tmp_path, eos_token_id=token_id)
    with pytest.raises(InvalidConfigError, match=rf"^config\.json: bos_token_id must be {rule}"):
        load(tmp_path, bos_token_id=token_id)
    with pytest.raises(InvalidConfigError, match=rf"^generation_config\.json: eos_token_id must be {rule}"):
        load(tmp_path, {"eos_token_id": token_id})


def test_an_end_of_text_id_outside_the_vocabulary_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(tmp_path, {"eos_token_id": [3, 99]}, eos_token_id=[-1, 50, 7], bos_token_id=50)
    assert (config.eos_token_ids, config.bos_token_id, caplog.messages) == ((7, 3), None, [])

    load_config(tmp_path, "warn")
    assert caplog.messages == [
        "config.json: eos_token_id has -1, 50; config.json: bos_token_id has 50; generation_config.json: eos_token_id "
        "has 99: no text has such tokens, as the ids of this model are in [0, 50); it goes on without them"
    ]


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM"])
def test_without_model_type_the_architectures_are_named(tmp_path: Path, names: object) -> None:
    missing = "config.json: model_type must be a string, but is missing"
    for architectures, reason in (
        (names, missing),
        (["XForCausalLM"], f"{missing}; architectures is ['XForCausalLM']"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
        with pytest.raises(InvalidConfigError, match=f"^{re.escape(reason)}$"):
            load_config(tmp_path)


@pytest.mark.parametrize("model_type", [None, "", 3, ["gpt2"]])
def test_model_type_must_be_a_name(tmp_path: Path, model_type: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"config\.json: model_type must be a string, got"):
        load(tmp_path, model_type=model_type)


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"config\.json is missing in"):
        load_config(tmp_path)
    load(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InvalidConfigError, match=r"generation_config\.json must hold a JSON object"):
        load_config(tmp_path)


VALUES = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 20) | st.floats() | st.text(max_size=3) | st.just([])
)
FIELDS = st.sampled_from(
    [
        *GOOD,
        "eos_token_id",
        "bos_token_id",
        "n_inner",
        "activation_function",
        "layer_norm_epsilon",
        "tie_word_embeddings",
    ]
)


@settings(max_examples=3 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(FIELDS, VALUES | st.just(10**400), max_size=4))
def test_any_values_are_a_sound_config_or_one_sentence(fields: dict[str, Any], tmp_path: Path) -> None:
    try:
        config = load(tmp_path, **fields)
    except WeightsError:
        return
    assert {layer.q_size for layer in config.layers} == {config.hidden_size}
    assert all(0 <= token_id < config.vocab_size for token_id in config.eos_token_ids)


@pytest.mark.parametrize(
    ("shape", "section", "field", "value", "message"),
    [
        ("GPTBigCode, one KV head", None, "add_cross_attention", True, "add_cross_attention must be false, got True"),
        ("XGLM", None, "add_cross_attention", True, "add_cross_attention must be false, got True"),
        ("OPT", None, "_remove_final_layer_norm", True, "_remove_final_layer_norm must be false, got True"),
        ("BLOOM", None, "apply_residual_connection_post_layernorm", True, "layernorm must be false, got True"),
        ("MPT", None, "no_bias", False, "no_bias must be true, got False"),
        ("MPT", None, "logit_scale", 0.5, "logit_scale must be null, got 0.5"),
        ("MPT", "attn_config", "alibi", False, "attn_config: alibi must be true"),
        ("MPT", "attn_config", "qk_ln", True, "attn_config: qk_ln must be false, got True"),
        ("MPT", "attn_config", "prefix_lm", True, "attn_config: prefix_lm must be false, got True"),
        ("MPT", "attn_config", "attn_type", "multiquery_attention", 'must be "multihead_attention", got'),
        ("Falcon 7B", None, "apply_residual_connection_post_layernorm", True, "layernorm must be false, got True"),
        ("Falcon 7B", None, "num_ln_in_parallel_attn", 2, "num_ln_in_parallel_attn must be 1, got 2"),
        ("Falcon 11B", None, "ff_factor", 4, "ff_factor must be 1, got 4"),
        ("Falcon 40B", None, "parallel_attn", False, "parallel_attn must be true, got False"),
        ("Falcon RW", None, "num_kv_heads", 2, "num_kv_heads must be 4, got 2"),
        ("Phi", None, "qk_layernorm", True, "qk_layernorm must be false, got True"),
        ("Gemma 3, past its window", None, "use_bidirectional_attention", True, "must be false, got True"),
        ("gpt-oss, past its window", None, "swiglu_alpha", 2.0, "swiglu_alpha must be 1.702, got 2.0"),
        (
            "HyperCLOVA X",
            None,
            "residual_multiplier",
            0.5,
            "residual_multiplier must be 1.0, got 0.5: with use_post_norm",
        ),
        (
            "InternLM3",
            None,
            "bias",
            True,
            "bias must be false, got True: transformers has biases everywhere or nowhere",
        ),
        ("InternLM3", None, "qkv_bias", True, "qkv_bias must be false, got True: it is another name of attention_bias"),
        ("IQuest-Coder", None, "clip_qkv", 8.0, "clip_qkv must be null, got 8.0: no published model has another"),
        ("IQuest-Coder", None, "use_sliding_window", True, "use_sliding_window must be false, got True"),
    ],
)
def test_a_choice_that_is_not_computed_is_refused_by_name(
    shape: str, section: str | None, field: str, value: object, message: str, tmp_path: Path
) -> None:
    raw = copy.deepcopy(complete_configs()[list(SHAPES).index(shape)])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    load_config(tmp_path)
    (raw if section is None else raw[section])[field] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: .*{re.escape(message)}"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("shape", "field", "value", "rule"),
    [
        ("Falcon 40B", "num_kv_heads", 3, "a divisor of num_attention_heads (4), got 3"),
        ("CodeGen", "n_head", 2, "a multiple of 4, got 2"),
    ],
)
def test_heads_that_are_not_in_groups_are_refused(
    shape: str, field: str, value: int, rule: str, tmp_path: Path
) -> None:
    raw = complete_configs()[list(SHAPES).index(shape)] | {field: value}
    with pytest.raises(InvalidConfigError, match=rf"^config\.json: {field} must be {re.escape(rule)}$"):
        load_raw(tmp_path, raw)


def test_falcons_slopes_are_those_of_bloom_in_bf16_scaled_as_scores_are(tmp_path: Path) -> None:
    """transformers multiplies slopes in bf16 with positions."""
    layer = load_raw(tmp_path, KNOWN["falcon-rw-1b"][0]).layers[0]
    exact = torch.tensor([2.0 ** (-8 * (head + 1) / 32) for head in range(32)])
    assert layer.alibi_slopes == tuple((exact.bfloat16().double() * layer.head_size**-0.5).tolist())


def test_ministral_3_multiplies_queries_behind_the_original_context(tmp_path: Path) -> None:
    _, fields = SHAPES["Ministral 3 without factors of queries"]
    raw = {**fields, "model_type": "ministral3", "max_position_embeddings": 4096}
    rope = {**raw["rope_parameters"], "original_max_position_embeddings": 512}
    for beta, growth in ((0.1, (0.1, 512)), (0.0, None), (None, None)):
        rope["llama_4_scaling_beta"] = beta
        config = load_raw(tmp_path, {**raw, "rope_parameters": rope})
        assert config.max_position == 4096
        assert {layer.rotary.growth for layer in config.layers if layer.rotary is not None} == {growth}
    rope["llama_4_scaling_beta"] = 0.1
    with pytest.raises(InvalidConfigError, match=r"^config\.json: head_dim must be even, got 15$"):
        load_raw(tmp_path, {**raw, "rope_parameters": rope, "head_dim": 15})


def test_the_context_is_the_one_that_yarn_stretches_to(tmp_path: Path) -> None:
    qwen, gpt_oss = KNOWN["qwen2.5-0.5b"][0], KNOWN["gpt-oss-20b"][0]
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    for raw, context in ((qwen, 32_768), (qwen | {"rope_scaling": yarn}, 131_072), (gpt_oss, 131_072)):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert load_config(tmp_path).max_position == context


def test_a_longrope_model_of_any_family_ends_at_its_original_context(tmp_path: Path) -> None:
    raw = KNOWN["tinyllama"][0] | {"max_position_embeddings": 8192}
    raw["rope_scaling"] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 2048,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).max_position == 2048


def test_a_qwen_of_a_million_tokens_ends_where_its_attention_is_no_longer_plain(tmp_path: Path) -> None:
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}
    raw = KNOWN["qwen2.5-0.5b"][0] | {"max_position_embeddings": 1_010_000, "dual_chunk_attention_config": chunks}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).max_position == 253_952


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"attention_layers": ["local", "global"]}, (256, None)),
        ({"attention_types": [[["global", "local"], 1]]}, (None, 256)),
        ({"attention_types": [[["local"], 1], [["global"], 1]], "attention_layers": ["local", "global"]}, (256, None)),
    ],
)
def test_gpt_neos_layers_are_read_in_either_form(
    fields: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert tuple(layer.window for layer in load_neo(tmp_path, **fields).layers) == windows


def test_internlm3_is_read_under_its_older_names(tmp_path: Path) -> None:
    fields = {"model_type": "internlm3", "vocab_size": 9, "hidden_size": 256, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 9}
    for has_bias in (False, True):
        text = json.dumps({**fields, "qkv_bias": has_bias, "bias": has_bias})
        (tmp_path / "config.json").write_text(text)
        config = load_config(tmp_path, "refuse")
        assert (config.qkv_bias, config.attn_out_bias, config.ffn_bias) == (has_bias,) * 3


def test_exaone_3_is_read_under_its_older_names(tmp_path: Path) -> None:
    fields = {"model_type": "exaone", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8}
    fields |= {"num_attention_heads": 8, "max_position_embeddings": 9}
    older = {"num_layers": 3, "layer_norm_epsilon": 1e-3, "activation_function": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(fields | older))
    config = load_config(tmp_path, "refuse")
    assert (config.num_layers, config.norm_eps, config.activation) == (3, 1e-3, "gelu")
    (tmp_path / "config.json").write_text(json.dumps(fields | older | {"num_hidden_layers": 2}))
    with pytest.raises(UnsupportedModelError, match="num_layers must be 2, got 3: it is another name of num_hidden_"):
        load_config(tmp_path)


@pytest.mark.parametrize("thetas", [[1e4], [1e4, 1e4, 1e4, 0.5], [1e4, 1e4, 1e4, "0"], 1e4])
def test_each_layer_of_granite_swash_has_a_base(thetas: object, tmp_path: Path) -> None:
    _, fields = SHAPES["Granite Swash, past its window"]
    with pytest.raises(InvalidConfigError, match="layer_rope_theta must be a list of 4, each 0 or a number above 1"):
        load(tmp_path, **{**fields, "model_type": "granite_swa", "layer_rope_theta": thetas})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_types": 3},
        {"attention_types": [3]},
        {"attention_types": [[["global"], 1]]},
        {"attention_types": [[["global"], 3]]},
        {"attention_types": [[["global"], 10**9], [["local"], 10**9]]},
        {"attention_types": [[["sideways"], 2]]},
        {"attention_types": [[["global"], 2]], "attention_layers": ["local", "global"]},
    ],
)
def test_gpt_neos_layers_must_be_as_many_as_there_are_and_agree(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"^config\.json: attention_(types|layers) must be "):
        load_neo(tmp_path, **fields)


def load_raw(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder)


def load_neo(folder: Path, **fields: Any) -> ModelConfig:
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neo", **sizes, **fields}))
    return load_config(folder)


@pytest.mark.parametrize(
    "model_type",
    [
        *("gemma3", "gemma3n", "gemma4", "gemma4_unified", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl"),
        *("qwen3_5_moe", "qwen3_vl_moe"),
        *("aya_vision", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next", "llava_onevision", "smolvlm"),
    ],
)
def test_what_a_text_config_does_not_name_is_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    whole = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    ends = {
        name: whole["text_config"][name] for name in ("eos_token_id", "bos_token_id") if name in whole["text_config"]
    }
    kind = {"model_type": whole["text_config"]["model_type"]}

    assert load_raw(tmp_path, {"model_type": model_type, "text_config": {**kind, **ends}}) == load_raw(tmp_path, whole)


@pytest.mark.parametrize(
    ("shape", "names"), [("Mistral 3 that sees", "mistral or ministral3"), ("Qwen2.5-VL", "qwen2")]
)
def test_the_text_of_another_model_is_refused(shape: str, names: str, tmp_path: Path) -> None:
    model_type, fields = SHAPES[shape]
    fields = {**fields, "text_config": {**fields["text_config"], "model_type": "llama"}}

    with pytest.raises(UnsupportedModelError) as caught:
        load_raw(tmp_path, {**fields, "model_type": model_type})
    assert str(caught.value) == (
        f"config.json: text_config: model_type must be {names}, got 'llama': the text of {model_type} is read as that "
        "alone"
    )


def test_a_qwen_that_sees_is_read_in_its_older_form(tmp_path: Path) -> None:
    model_type, fields = SHAPES["Qwen2-VL"]
    flat = {name: value for name, value in fields["text_config"].items() if name != "rope_parameters"}
    flat |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": {}}

    assert load_raw(tmp_path, {**flat, "model_type": model_type}) == load_raw(
        tmp_path, {**fields, "model_type": model_type}
    )


def test_a_cohere_that_sees_scales_its_logits_as_its_text_alone(tmp_path: Path) -> None:
    model_type, fields = SHAPES["Command A that sees"]
    text = {**fields["text_config"], "logit_scale": 0.3}
    for raw in ({**fields, "model_type": model_type, "text_config": text}, text):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert load_config(tmp_path).logit_scale == 0.3


def test_bloom_is_read_under_its_older_names(tmp_path: Path) -> None:
    new = {"model_type": "bloom", "vocab_size": 50, "hidden_size": 8, "n_layer": 1, "n_head": 2, "seq_length": 64}
    old = {name: value for name, value in new.items() if name not in ("hidden_size", "n_head")}
    (tmp_path / "config.json").write_text(json.dumps(new))
    expected = load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(old | {"n_embed": 8, "num_attention_heads": 2}))
    assert load_config(tmp_path) == expected


def test_llama_is_read_under_its_older_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    raw = {"model_type": "llama", **sizes, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_sequence_length": 64}))
    assert load_config(tmp_path).max_position == 64
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidConfigError, match=r"max_position_embeddings must be .*, but is missing"):
        load_config(tmp_path)


@functools.cache
def complete_configs() -> list[dict[str, Any]]:
    """A whole config.json of every shape that is tested for parity, as transformers writes them."""
    from transformers import AutoConfig

    configs = [
        json.loads(AutoConfig.for_model(model_type, **{**ENDS, **fields}).to_json_string(use_diff=False))
        for model_type, fields in SHAPES.values()
    ]
    return [
        *configs,
        {"model_type": "nanogpt", "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 9},
    ]


def test_the_complete_configs_are_sound_before_they_are_spoilt(tmp_path: Path) -> None:
    for raw in complete_configs():
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert load_config(tmp_path).model_type == raw["model_type"]


@settings(max_examples=6 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_odd_value_in_any_familys_config_is_a_sound_config_or_one_sentence(
    data: st.DataObject, tmp_path: Path
) -> None:
    raw = copy.deepcopy(data.draw(st.sampled_from(complete_configs())))
    section = data.draw(st.sampled_from([raw, *(value for value in raw.values() if isinstance(value, dict))]))
    name = data.draw(st.sampled_from(sorted(section))) if section else "rope_type"
    odd = st.sampled_from([10**400, 2**31 - 1, 2**20, 0.5, {}, [1.0], ["full_attention"], "relu", [[["local"], 2]]])
    section[name] = data.draw(VALUES | odd)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    try:
        config = load_config(tmp_path)
    except WeightsError:
        return
    for layer in config.layers:
        assert layer.mixes or layer.ffn_size
        assert layer.num_heads % max(1, layer.num_kv_heads) == 0
        assert len(layer.alibi_slopes) in (0, layer.num_heads)
    assert all(0 <= token_id < config.vocab_size for token_id in config.eos_token_ids)
    assert find_family(config.model_type).sources(config)
