"""The rule for the keys of config.json that no family reads: known to change nothing, doubtful, or refused.

A family reads every key that it computes with. A key that it did not read is known if it is listed here, if
transformers' class has it and never reads it (harmless_keys.json), if its name is private, or if it says again what
another key says. Wrong numbers are worse than a refusal, so any other may only have a value that means "off", or the
default of transformers' class: it is doubtful. Called by `load_config` after a family has read its keys.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.errors import UnsupportedModelError, shown
from gptserve.weights.families.family import RawConfig

logger = logging.getLogger(__name__)

DoubtfulKeys = Literal["accept", "warn", "refuse"]

HARMLESS_FILE = Path(__file__).with_name("harmless_keys.json")
"""By model_type the fields of transformers' class that it never reads, and the defaults of the others. A script writes
it: tests/weights/families/harmless_keys.py."""

NUM_SHOWN = 3

NAMES = frozenset(
    (
        # what the files are and where they come from
        *("architectures", "author", "authors", "auto_map", "base_model", "citation", "created_at", "custom_pipelines"),
        *("datasets", "description", "homepage", "internal_version", "language", "library_name", "license", "model_id"),
        *("model_name", "model_type", "model_version", "name_or_path", "organization", "pipeline_tag", "tags"),
        *("transformers.js_config", "transformers_version", "url", "is_composition", "is_llama_config"),
        # the tokenizer's
        *("merges_file", "model_max_length", "padding_side", "prefix", "tokenizer_class", "tokenizer_file"),
        *("tokenizer_model_max_length", "tokenizer_name", "tokenizer_padding_side", "use_fast", "vocab_file"),
        # other names of the context: they limit a text's length and change no result
        *("context_length", "initial_context_length", "max_seq_len", "max_seq_length", "max_sequence_length", "n_ctx"),
        "seq_length",
        # dtype, order of summation and kernel: rounding at most, and the softmax is always in fp32 here
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "attn_impl", "attn_implementation"),
        *("bias_dropout_fusion", "chunk_size_feed_forward", "dtype", "fc_type", "flash_attention"),
        *("masked_softmax_fusion", "offset_alibi", "pretraining_tp", "reorder_and_upcast_attn"),
        *("scale_attention_softmax_in_fp32", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "torch_dtype"),
        *("torchscript", "use_bfloat16", "use_flash_attention", "use_flash_attention_2", "use_flash_attn", "use_sdpa"),
        # caches, and the form of a call's results
        *("cache_implementation", "inference_runner", "keys_to_ignore_at_inference", "max_batch_size"),
        *("output_attentions", "output_hidden_states", "output_past", "output_router_logits", "output_scores"),
        *("pad_key_length", "pre_allocate_kv_cache", "return_dict", "return_dict_in_generate", "use_cache"),
        *("use_return_dict", "validate_runner_input"),
        # training
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "init_config", "init_device", "init_std"),
        *(
            "initializer_range",
            "neftune_noise_alpha",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "use_gradient_checkpointing",
            "verbose",
        ),
        # heads and tasks other than the next token
        *("finetuning_task", "id2label", "is_decoder", "label2id", "n_special", "num_labels"),
        *("predict_special_tokens", "problem_type", "task_specific_params", "is_original_qwen3_reranker"),
        *("classifier_from_token", "sentence_transformers", "sbert_ce_default_activation_function"),
        "output_projection",  # OPT 13B's: that it has a head
        # defaults of generation, which a request gives here
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("generation_config", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens"),
        *("min_p", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "penalty_alpha"),
        *("remove_invalid_values", "renormalize_logits", "repetition_penalty", "suppress_tokens", "temperature"),
        *("top_k", "top_p", "typical_p"),
    )
)
PATTERN = re.compile(r".*_token_ids?|.*dropout.*|.*pdrop|.*layerdrop|summary_.*|unsloth_.*")
"""Ids of special tokens, settings of training and classification, and notes of other libraries."""

OFF_NAMES = frozenset(
    (
        *("add_cross_attention", "cross_attention_hidden_size", "decoder_start_token_id", "is_encoder_decoder"),
        *("pruned_heads", "tf_legacy_loss", "tie_encoder_decoder"),
        # choices that remote code or another family has
        *("attn_uses_sequence_id", "full_attn_mod", "interpolate_factor", "learned_embeddings", "lm_head_bias"),
        *("hidden_activation", "mlp_bias", "qk_layernorm", "quantization_config", "rope_interleaved", "rope_scaling"),
        *("rotary_scaling_factor", "sliding_window", "use_bidirectional_attention", "use_mrope", "use_sliding_window"),
        *("debug", "ep_size", "micro_forward", "moe_config", "qk_layer_norms", "skip_checkpoint", "use_deepep"),
        *("use_reentrant_checkpointing", "use_resampler"),
    )
)
"""Choices that files name to say that a model has not made them: such a key is known as long as it is off."""

ON_NAMES = frozenset(("causal", "is_causal", "normalize_attention_scores", "scale_attn_weights"))
"""Choices that all families have made: such a key is known as long as it is on. Off, it changes what is computed."""

PRIVATE_CHOICES = ("_remove_final_layer_norm", "_sliding_window_pattern")
"""The names with a leading underscore that some family computes with. Any other such name is a note of a library, such
as `_name_or_path` and `_attn_implementation`."""

DUPLICATES: Mapping[str, str] = {
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "norm_epsilon",
    "sliding_window_size": "sliding_window",
}
"""Second names of a key that a family reads: the values must be equal."""


def _of_layers(size: Callable[[LayerConfig], object]) -> Callable[[ModelConfig], object]:
    """Return the function to the size that all layers have; to None if they differ."""

    def of_all(config: ModelConfig) -> object:
        sizes = {size(layer) for layer in config.layers}
        return sizes.pop() if len(sizes) == 1 else None

    return of_all


SAID_AGAIN: Mapping[str, Callable[[ModelConfig], object]] = {
    **dict.fromkeys(("d_model", "hidden_size", "n_embd", "n_embed"), lambda config: config.hidden_size),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers", "num_layers"), lambda config: config.num_layers),
    **dict.fromkeys(
        ("attention_heads", "n_head", "n_heads", "num_attention_heads", "num_heads"),
        _of_layers(lambda layer: layer.num_heads),
    ),
    **dict.fromkeys(("kv_n_heads", "num_key_value_heads"), _of_layers(lambda layer: layer.num_kv_heads)),
    **dict.fromkeys(
        ("feed_forward_length", "ffn_dim", "intermediate_size", "n_inner"), _of_layers(lambda layer: layer.ffn_size)
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), lambda config: config.max_position),
    **dict.fromkeys(("attention_head_dim", "head_dim"), _of_layers(lambda layer: layer.head_size)),
    "activation": lambda config: "swiglu" if config.gated_ffn and config.activation == "silu" else None,
    "mlp_type": lambda config: None if config.gated_ffn else "default",
    "norm_type": lambda config: "layer_norm" if config.norm == "layernorm" else None,
    "qkv_bias": lambda config: config.qkv_bias,
    "use_qk_norm": lambda config: config.qk_norm is not None,
    "use_rmsnorm": lambda config: config.norm == "rmsnorm",
    "experts_per_token": _of_layers(lambda layer: layer.experts and layer.experts.num_active),
}
"""Sizes and choices that a file says again by a name of another family or of its own code: they must be equal."""


def refuse_unread(raw: RawConfig, config: ModelConfig, doubtful: DoubtfulKeys = "accept") -> None:
    """Raise UnsupportedModelError, naming the keys, if one that was not read may change the results.

    `doubtful` says what becomes of keys that probably do not: they are off, or as in transformers by default.
    """
    unread = raw.unread()
    unknown = {name: value for name, value in unread.items() if not _is_known(name, value, raw, config, unread)}
    refused = {name: value for name, value in unknown.items() if doubtful == "refuse" or not _is_off(name, value, raw)}
    if refused:
        raise UnsupportedModelError(
            f"config.json sets {_listed(refused)}, which gptserve does not know and which may "
            "change what is computed; remove it from the file if you know that it changes nothing"
        )
    if unknown and doubtful == "warn":
        logger.warning(
            "config.json sets %s, which gptserve does not know; it goes on, as such a value usually changes nothing",
            _listed(unknown),
        )


def _listed(fields: Mapping[str, object]) -> str:
    texts = [f"`{name}` to {shown(value)}" for name, value in fields.items()]
    return ", ".join(texts[:NUM_SHOWN]) + (", ..." if len(texts) > NUM_SHOWN else "")


def _is_known(full_name: str, value: object, raw: RawConfig, config: ModelConfig, unread: Mapping[str, object]) -> bool:
    """Return whether the key surely changes nothing: by its name, or because another that was read says the same."""
    name = full_name.rpartition(": ")[2]
    return (
        name in NAMES
        or PATTERN.fullmatch(name) is not None
        or (name.startswith("_") and name not in PRIVATE_CHOICES)
        or (name in OFF_NAMES and is_neutral(value))
        or (name in ON_NAMES and (value is True or value is None))
        or name in _of_class(full_name, raw).get("unread", ())
        or (name in SAID_AGAIN and value in (None, SAID_AGAIN[name](config)))
        or (_has_no_windows(config) and name == "max_window_layers")
        or (_has_no_windows(config) and name == "layer_types" and value == ["full_attention"] * config.num_layers)
        or (name in DUPLICATES and DUPLICATES[name] not in unread and value == raw.value(DUPLICATES[name]))
    )


def _has_no_windows(config: ModelConfig) -> bool:
    return all(layer.window is None for layer in config.layers)


def _is_off(full_name: str, value: object, raw: RawConfig) -> bool:
    """Return whether the value usually means "off", or is what transformers takes where the key is absent."""
    defaults = _of_class(full_name, raw).get("defaults", {})
    name = full_name.rpartition(": ")[2]
    return (is_neutral(value) and name not in ON_NAMES) or (name in defaults and _same(value, defaults[name]))


def _of_class(full_name: str, raw: RawConfig) -> Mapping[str, Any]:
    """Return what is known of transformers' class for the object that holds the key; nothing of a section's."""
    section = full_name.rpartition(": ")[0]
    return harmless_keys().get(raw.text("model_type"), {}) if section in ("", "text_config") else {}


@cache
def harmless_keys() -> dict[str, Any]:
    """Return HARMLESS_FILE."""
    keys: dict[str, Any] = json.loads(HARMLESS_FILE.read_text(encoding="utf-8"))
    return keys


def _same(value: object, default: object) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def is_neutral(value: object) -> bool:
    """Return whether a value usually means "off". A factor of 1 does; true does not."""
    return value is None or value is False or value in ("", [], {}) or (value in (0, 1) and value is not True)
