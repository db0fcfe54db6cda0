"""Lists the keys of config.json that do not affect inference, and refuses the unknown ones.

A family reads every key that it computes with. Wrong numbers are worse than a refusal, so a key that was not read and
is not listed may only have a value that usually means "off". Called by `load_config` after a family has read its keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.errors import UnsupportedModelError, shown
from gptserve.weights.families.family import RawConfig

NUM_SHOWN = 3

NAMES = frozenset(
    (
        # what the files are and where they come from
        *("architectures", "author", "authors", "auto_map", "base_model", "citation", "created_at", "custom_pipelines"),
        *("datasets", "description", "homepage", "internal_version", "language", "library_name", "license", "model_id"),
        *("model_name", "model_version", "name_or_path", "organization", "pipeline_tag", "tags"),
        *("transformers.js_config", "transformers_version", "url", "is_composition", "is_llama_config"),
        # the tokenizer's
        *("merges_file", "model_max_length", "padding_side", "prefix", "tokenizer_class", "tokenizer_file"),
        *("tokenizer_model_max_length", "tokenizer_name", "tokenizer_padding_side", "use_fast", "vocab_file"),
        # other names of the context: they limit a text's length and change no result
        *("context_length", "initial_context_length", "max_seq_len", "max_seq_length", "max_sequence_length", "n_ctx"),
        "seq_length",
        # dtype, order of summation and kernel: rounding at most, and the softmax is always in fp32 here
        *("attention_softmax_in_fp32", "attn_impl", "attn_implementation"),
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
        *("initializer_range", "neftune_noise_alpha", "router_aux_loss_coef", "use_gradient_checkpointing", "verbose"),
        # heads and tasks other than the next token
        *("finetuning_task", "id2label", "is_decoder", "label2id", "n_special", "num_labels"),
        *("predict_special_tokens", "problem_type", "task_specific_params"),
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

PRIVATE_CHOICES = ("_remove_final_layer_norm", "_sliding_window_pattern")
"""The names with a leading underscore that some family computes with. Any other such name is a note of a library, such
as `_name_or_path` and `_attn_implementation`."""

DUPLICATES: Mapping[str, str] = {"sliding_window_size": "sliding_window"}
"""Second names of a key that a family reads: the values must be equal."""


def _of_layers(size: Callable[[LayerConfig], object]) -> Callable[[ModelConfig], object]:
    """Return the function to the size that all layers have; to None if they differ."""

    def of_all(config: ModelConfig) -> object:
        sizes = {size(layer) for layer in config.layers}
        return sizes.pop() if len(sizes) == 1 else None

    return of_all


SIZES: Mapping[str, Callable[[ModelConfig], object]] = {
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
    "head_dim": _of_layers(lambda layer: layer.head_size),
    "experts_per_token": _of_layers(lambda layer: layer.experts and layer.experts.num_active),
}
"""Sizes that a file gives again under the name of another family: they must be equal."""


def refuse_unread(raw: RawConfig, config: ModelConfig) -> None:
    """Raise UnsupportedModelError, naming the keys, if one that was not read may change the results."""
    unread = raw.unread()
    unknown = [
        f"`{name}` to {shown(value)}"
        for name, value in unread.items()
        if not (_changes_nothing(name.rpartition(": ")[2], value, config) or _is_duplicate(name, value, raw, unread))
    ]
    if unknown:
        more = ", ..." if len(unknown) > NUM_SHOWN else ""
        raise UnsupportedModelError(
            f"config.json sets {', '.join(unknown[:NUM_SHOWN])}{more}, which gptserve does not know and which may "
            "change what is computed; remove it from the file if you know that it changes nothing"
        )


def _changes_nothing(name: str, value: object, config: ModelConfig) -> bool:
    return (
        _is_neutral(value)
        or name in NAMES
        or PATTERN.fullmatch(name) is not None
        or (name.startswith("_") and name not in PRIVATE_CHOICES)
        or (name in SIZES and value == SIZES[name](config))
        or (
            name == "layer_types"
            and value == ["full_attention"] * config.num_layers
            and all(layer.window is None for layer in config.layers)
        )
    )


def _is_duplicate(name: str, value: object, raw: RawConfig, unread: Mapping[str, object]) -> bool:
    """Return whether another key, which was read, has the same meaning and value."""
    return name in DUPLICATES and DUPLICATES[name] not in unread and value == raw.value(DUPLICATES[name])


def _is_neutral(value: object) -> bool:
    """Return whether a value usually means "off". A factor of 1 does; true does not."""
    return value is None or value is False or value in ("", [], {}) or (value in (0, 1) and value is not True)
