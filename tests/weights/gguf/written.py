"""GGUF files of models and tokenizers that transformers wrote, made with the package gguf and llama.cpp's names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

ARCHITECTURES = {
    "gpt2": MODEL_ARCH.GPT2,
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "arcee": MODEL_ARCH.ARCEE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo2": MODEL_ARCH.OLMO2,
    "phi3": MODEL_ARCH.PHI3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "gemma": MODEL_ARCH.GEMMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
}
"""By model_type."""
PAIRED = ("llama", "mixtral", "arcee", "smollm3")
"""Those of which llama.cpp's conversion puts rows of queries and keys in pairs."""


def add_tokens(writer: GGUFWriter, tokens: list[str], *, pre: str = "gpt-2", kinds: list[int] | None = None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [1] * len(tokens))
    writer.add_token_merges(["t 0"])  # an empty list is not written


def add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Add the keys of a config.json, as llama.cpp's conversion does."""
    hidden, heads = (
        config.get("hidden_size", config.get("n_embd")),
        config.get("num_attention_heads", config.get("n_head")),
    )
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.get("num_hidden_layers", config.get("n_layer")))
    writer.add_head_count(heads)
    writer.add_context_length(config.get("max_position_embeddings", config.get("n_positions")))
    writer.add_feed_forward_length(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden)
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "norm_epsilon" in config:
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_size = config.get("head_dim") or hidden // heads
    rotated = int(head_size * config.get("rope_parameters", {}).get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    rope = config.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":  # as llama.cpp's conversion/phi.py
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if rope["rope_type"] == "llama3":  # as llama.cpp's conversion/llama.py
        waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_size, 2) / head_size)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        context = rope["original_max_position_embeddings"]
        smooth = (context / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors = np.where(waves < context / high, 1, np.where(waves > context / low, rope["factor"], between))
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def write_gguf(folder: Path, path: Path, quant: GGMLQuantizationType, *, in_place: Path | None = None) -> None:
    """Write a model with matrices of a type; `in_place` gets its safetensors with the values they then have."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    add_sizes(writer, config)
    add_tokens(writer, [f"t{i}" for i in range(config["vocab_size"])])
    names = get_tensor_name_map(arch, config.get("num_hidden_layers", config.get("n_layer")))
    values = load_file(folder / "model.safetensors")
    experts: dict[str, list[np.ndarray]] = {}
    for name, value in values.items():
        if of_expert := re.fullmatch(r"model(\.layers\.\d+)\.(\w+)\.experts\.\d+\.(\w+)\.weight", name):
            layer, part, kind = of_expert.groups()  # as llama.cpp's conversion names what it joins
            whole = f"layers{layer[7:]}.feed_forward" if part == "block_sparse_moe" else f"model{layer}.{part}"
            packed = quantize(value.astype(np.float32), quant)
            experts.setdefault(f"{whole}.experts.{kind}.weight", []).append(packed)
            values[name] = dequantize(packed, quant)
            continue
        of_gguf = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert of_gguf is not None, name
        data = value.astype(np.float32)
        is_conv = config["model_type"] == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        data = data.T.copy() if is_conv else data
        if config["model_type"] in PAIRED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        is_norm = config["model_type"].startswith("gemma") and "norm" in name
        if data.ndim < 2 or name.startswith("transformer.wpe") or data.shape[-1] % 32:
            writer.add_tensor(of_gguf, data + 1 if is_norm else data)
            continue
        packed = quantize(data, quant)
        writer.add_tensor(of_gguf, packed, raw_dtype=quant)
        if in_place is not None:
            kept = dequantize(packed, quant)
            if config["model_type"] in PAIRED and (".q_proj." in name or ".k_proj." in name):
                kept = kept.reshape(heads, -1, 2, *kept.shape[1:]).swapaxes(1, 2).reshape(kept.shape)
            values[name] = np.ascontiguousarray(kept.T if is_conv else kept)
    for name, parts in experts.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.stack(parts), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if in_place is not None:
        save_file(values, in_place / "model.safetensors")


def write_tokenizer(tokenizer: Tokenizer, path: Path, *, pre: str | None, model: Path | None = None) -> None:
    """Write a file with this tokenizer; of sentencepiece's kind without `pre`."""
    raw = json.loads(tokenizer.to_str())
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    special = {entry["content"]: 3 if entry["special"] else 4 for entry in raw["added_tokens"]}
    kinds = [special.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
    writer = GGUFWriter(path, "gpt2")
    add_sizes(
        writer,
        {"model_type": "gpt2", "n_embd": 16, "n_head": 1, "n_layer": 1, "n_positions": 64, "layer_norm_epsilon": 1e-5},
    )
    merges = [" ".join(merge) for merge in raw["model"]["merges"]]
    writer.add_tokenizer_model("llama" if pre is None else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pre is None:
        ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(raw["model"]["merges"], 1)))}
        writer.add_token_scores(
            [ranks.get(token, 0.0 if kind == 3 else -1e6) for token, kind in zip(tokens, kinds, strict=True)]
        )
        writer.add_add_space_prefix(raw["normalizer"]["type"] == "Sequence")
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    post = json.dumps(raw["post_processor"])
    for bos in ("<s>", "<|begin_of_text|>"):
        if f'"{bos}"' in post:
            writer.add_bos_token_id(ids[bos])
    writer.add_add_bos_token("SpecialToken" in post)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
