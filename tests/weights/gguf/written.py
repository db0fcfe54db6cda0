"""GGUF files of models and tokenizers that transformers wrote, made with the package gguf and llama.cpp's names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.weights.gguf.falcon_h1 import with_factors
from tests.weights.gguf.k_quants import TypeOf, packed
from tests.weights.gguf.keys import ARCHITECTURES, NEWER, add_keys, size_of
from tests.weights.gguf.qwen import QWENS, as_published, as_written

FUSED = ("bloom", "gpt_neox", "falcon")
"""Those of which the conversion parts queries, keys and values of all heads."""
PAIRED = (
    *("llama", "mistral", "ministral3", "mixtral", "arcee", "smollm3", "olmo", "granite", "granitemoe"),
    *("granitemoeshared", "granite_swa", "granitemoe_swa", "internlm2", "xverse", "minicpm", "granitemoehybrid"),
    *("nemotron_h", "nemotron_h with experts"),
)
"""Those of which the conversion puts rows of queries and keys in pairs."""
ADDING = ("gemma", "gemma2", "gemma3_text", "nemotron", *QWENS)
"""Those of which the conversion adds one to the weights of norms."""
UNPACKED = ("exp_probs_b", "position_embd", "ffn_gate_inp_shexp", "shortconv.conv", "ssm_conv1d", "ssm_norm")
"""What stays in F32."""
NEWER_NAMES = {
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.down_proj.weight": "ffn_down_exps.weight",
    "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
"""Those that the released package gguf lacks for NEWER, and those of Gemma 3n's and 4's parameters without a kind."""

_INPUTS = "model.embed_tokens_per_layer.weight"
"""Of which the conversion of Gemma 3n fills rows up with zeros."""

Pieces = list[tuple[str, np.ndarray]]


def _pieces(config: dict[str, Any], name: str, num_rows: int) -> Pieces:
    """Return the tensors that one becomes, by the names of a checkpoint, and which rows each has."""
    rows, model_type = np.arange(num_rows), config["model_type"]
    if model_type in PAIRED and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return [(name, rows.reshape(heads, 2, -1).swapaxes(1, 2).ravel())]
    if model_type in FUSED and ".query_key_value." in name:
        heads = size_of(config, "num_attention_heads")
        groups = heads
        if model_type == "falcon":
            groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        parts = np.split(rows.reshape(groups, heads // groups + 2, -1), [-2, -1], axis=1)
        return [(name, np.concatenate([part.ravel() for part in parts]))]
    if model_type == "gpt_oss" and "gate_up_proj" in name:
        kind = "bias" if name.endswith("bias") else "weight"
        stem = name.partition("gate_up_proj")[0]
        return [(f"{stem}gate_proj.{kind}", rows[::2]), (f"{stem}up_proj.{kind}", rows[1::2])]
    joined = {"granitemoe": "input_linear", "granitemoeshared": "input_linear", "granitemoe_swa": "gate_up_proj"}
    joined["granitemoehybrid"] = "input_linear"
    if model_type in joined and joined[model_type] in name:
        number, kind = name.split(".")[2], "_shexp" if "shared_mlp" in name else "_exps"
        kind = "" if config.get("num_local_experts") == 0 else kind
        return [
            (f"blk.{number}.ffn_{part}{kind}.weight", half)
            for part, half in zip(("gate", "up"), np.split(rows, 2), strict=True)
        ]
    if model_type == "granitemoehybrid" and "shared_mlp" in name and not config["num_local_experts"]:
        return [(name.replace("shared_mlp.output_linear", "mlp.down_proj"), rows)]
    if model_type in ("afmoe", "lfm2_moe") and name.endswith("expert_bias"):
        return [(f"{name}.bias", rows)]
    return [
        (re.sub(r"(down_proj)(_bias)?$", lambda found: f"{found[1]}.{'bias' if found[2] else 'weight'}", name), rows)
    ]


def _of_mixer(config: dict[str, Any], name: str, part: np.ndarray) -> np.ndarray:
    """Return numbers of a mixer of Mamba-2 as the conversion leaves them, and any other as they are."""
    if ".mamba." not in name and ".mixer." not in name:
        return part
    if name.endswith(".A_log"):
        return -np.exp(part)[:, None]
    if name.endswith(".norm.weight"):
        return part.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return part[:, None] if name.endswith(".D") else part


def _is_transposed(config: dict[str, Any], name: str) -> bool:
    if config["model_type"] == "gpt_oss":
        return name.endswith(("gate_up_proj", "down_proj"))
    return config["model_type"] == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def write_gguf(
    folder: Path,
    path: Path,
    quant: GGMLQuantizationType | TypeOf,
    *,
    in_place: Path | None = None,
    fuses: bool = False,
    num_behind: int = 0,
    as_type: str | None = None,
    older: bool = False,
) -> None:
    """Write a model with matrices of a type, or of several; `in_place` gets its safetensors with their values then.

    `fuses`: queries, keys and values are one tensor. `num_behind`: so many layers are said to predict further tokens.
    `as_type`: the model_type as whose the file is written. `older`: as the first files of Qwen3-Next were.
    """
    type_of = (lambda name, width: quant) if isinstance(quant, GGMLQuantizationType) else quant
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if kinds := config.get("layers_block_type"):
        config |= {"num_hidden_layers": len(kinds)}
        as_type = "nemotron_h with experts" if "moe" in kinds else as_type
    config |= {} if as_type is None else {"model_type": as_type}
    arch = ARCHITECTURES.get(config["model_type"], MODEL_ARCH.EXAONE_MOE)  # which names what most of NEWER have
    writer = GGUFWriter(path, NEWER.get(config["model_type"], MODEL_ARCH_NAMES[arch]))
    add_keys(writer, config)
    add_tokens(writer, ["t", "0", *(f"t{i}" for i in range(config["vocab_size"] - 2))])
    num_layers = size_of(config, "num_hidden_layers")
    names = get_tensor_name_map(arch, num_layers)
    published = load_file(folder / "model.safetensors")
    values = _fused(published, num_layers) if fuses else dict(published)
    if config["model_type"] in QWENS:
        values = as_written(config, values, older=older)
    if config["model_type"] == "falcon_h1":
        values = with_factors(config, values)
    if config["model_type"] == "gemma3n_text":
        table = values[_INPUTS]
        values[_INPUTS] = np.pad(table, ((0, config["vocab_size"] - len(table)), (0, 0)))
    if num_behind:
        writer.add_block_count(num_layers + num_behind)
        writer.add_nextn_predict_layers(num_behind)
        for i in range(num_layers, num_layers + num_behind):
            writer.add_tensor(f"blk.{i}.nextn.enorm.weight", np.ones(8, np.float32))
            writer.add_tensor(f"blk.{i}.attn_q.weight", np.ones((8, 8), np.float32))
    for part in ("alpha_p", "alpha_n", "beta", "eps") if config["model_type"] == "apertus" else ():
        in_layers = [values[f"model.layers.{i}.mlp.act_fn.{part}"].item() for i in range(num_layers)]
        getattr(writer, f"add_xielu_{part}")(in_layers)
    experts, heads = dict[tuple[str, GGMLQuantizationType], list[np.ndarray]](), dict[str, list[np.ndarray]]()
    for name, value in values.items():
        if ".act_fn." in name:
            continue
        if joined := _joined(name):
            its_type = type_of(_of_gguf(joined, names), value.shape[-1])
            blocks = packed(value.astype(np.float32), its_type)
            experts.setdefault((joined, its_type), []).append(blocks)
            values[name] = dequantize(blocks, its_type)
            continue
        if of_head := re.fullmatch(r"(model\.layers\.\d+\.self_attn\.[qk]_layernorm)\.norms\.\d+\.weight", name):
            heads.setdefault(f"{of_head[1]}.weight", []).append(value)
            continue
        data = value.astype(np.float32)
        is_transposed, axis = _is_transposed(config, name), -1 if value.ndim < 2 or name.endswith("bias") else -2
        data = data.swapaxes(-1, -2) if is_transposed else data
        is_norm = config["model_type"] in ADDING and name.endswith("norm.weight") and "linear_attn" not in name
        for its_name, order in _pieces(config, name, data.shape[axis]):
            of_gguf = its_name if its_name.startswith("blk.") else _of_gguf(its_name, names)
            part = np.ascontiguousarray(np.take(data, order, axis))
            if axis == -1 or part.shape[-1] % 32 or any(kept in of_gguf for kept in UNPACKED):
                part = part[0] if "ffn_gate_inp_shexp" in of_gguf else part
                part = part[:, 0] if part.ndim == 3 and "conv" in of_gguf else part
                part = _of_mixer(config, name, part)
                writer.add_tensor(of_gguf, part + 1 if is_norm else part)
                continue
            its_type = type_of(of_gguf, part.shape[-1])
            blocks = packed(part, its_type)
            writer.add_tensor(of_gguf, blocks, raw_dtype=its_type)
            data = data.copy()
            data[(..., order, slice(None))] = dequantize(blocks, its_type)
        values[name] = np.ascontiguousarray(data.swapaxes(-1, -2) if is_transposed else data)
    for (name, its_type), parts in experts.items():
        writer.add_tensor(_of_gguf(name, names), np.stack(parts), raw_dtype=its_type)
    for name, parts in heads.items():
        writer.add_tensor(_of_gguf(name, names), np.stack(parts))
    _finish(writer)
    if in_place is not None:
        values = as_published(config, values, published) if config["model_type"] in QWENS else values
        save_file(values, in_place / "model.safetensors")


def _joined(name: str) -> str | None:
    """Return what a weight of one expert, or of one stream, is a part of."""
    if of_expert := re.fullmatch(r"(\w+\.layers\.\d+\.\w+\.experts)\.\d+\.(\w+)\.weight", name):
        return f"{of_expert[1]}.{of_expert[2]}.weight"
    of_stream = re.fullmatch(r"(model\.altup_\w+)\.\d+\.weight", name)
    return None if of_stream is None else f"{of_stream[1]}.weight"


def _fused(values: dict[str, np.ndarray], num_layers: int) -> dict[str, np.ndarray]:
    for i in range(num_layers):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{i}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            values[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate([values.pop(name) for name in names])
    return values


def _of_gguf(name: str, names: Any) -> str:
    of_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if of_layer and of_layer[2] in NEWER_NAMES:
        return f"blk.{of_layer[1]}.{NEWER_NAMES[of_layer[2]]}"
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("dt_bias", "dt_proj.bias")
    name = re.sub(r"sinks$", "sinks.weight", name)
    name = re.sub(r"^backbone\.(layers\.\d+)\.mixer\.experts", r"model.\1.mlp.experts", name)
    older = re.sub(r"^model\.(layers\.\d+)\.(block_sparse_moe|feed_forward)\.experts", r"\1.feed_forward.experts", name)
    tried = (name, older, name.removeprefix("transformer."))
    found: list[str | None] = [names.get_name(its, try_suffixes=(".weight", ".bias")) for its in tried]
    assert any(found), name
    return next(its for its in found if its)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokens(writer: GGUFWriter, tokens: list[str], *, pre: str = "gpt-2", kinds: list[int] | None = None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [1] * len(tokens))
    writer.add_token_merges(["t 0"])  # an empty list is not written


def write_tokenizer(tokenizer: Tokenizer, path: Path, *, pre: str | None, model: Path | None = None) -> None:
    """Write a file with this tokenizer; of sentencepiece's kind if `pre` is None, and an empty one is left out.

    "gemma4" as `pre` is the kind of that name.
    """
    raw = json.loads(tokenizer.to_str())
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    special = {entry["content"]: 3 if entry["special"] else 4 for entry in raw["added_tokens"]}
    kinds = [special.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
    writer = GGUFWriter(path, "gpt2")
    add_keys(
        writer,
        {"model_type": "gpt2", "n_embd": 16, "n_head": 1, "n_layer": 1, "n_positions": 64, "layer_norm_epsilon": 1e-5},
    )
    merges = [" ".join(merge) for merge in raw["model"]["merges"]]
    writer.add_tokenizer_model("llama" if pre is None else pre if pre == "gemma4" else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pre is None:
        ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(raw["model"]["merges"], 1)))}
        writer.add_token_scores(
            [ranks.get(token, 0.0 if kind == 3 else -1e6) for token, kind in zip(tokens, kinds, strict=True)]
        )
        writer.add_add_space_prefix(raw["normalizer"]["type"] == "Sequence")
    else:
        if pre == "gemma4":
            writer.add_add_space_prefix(False)
        elif pre:
            writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    post = json.dumps(raw["post_processor"])
    for bos in ("<s>", "<|begin_of_text|>"):
        if f'"{bos}"' in post:
            writer.add_bos_token_id(ids[bos])
    writer.add_add_bos_token("SpecialToken" in post)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 16), np.float32))
    _finish(writer)
