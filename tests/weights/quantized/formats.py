"""The quantized formats of folders: each with its quantization_config, and what packs its linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.parity.models import write_model
from tests.weights.quantized import packers
from tests.weights.quantized.packers import Packer, write_quantized

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 32}
PHI3 = {**LLAMA, "pad_token_id": 0}
NEOX = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 32}
MIXTRAL = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
FAMILIES = {"llama": LLAMA, "phi3": PHI3, "gpt_neox": NEOX, "gpt2": GPT2, "mixtral": MIXTRAL}


def group(**weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}


def compressed(layout: str, *groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    section = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "kv_cache_scheme": None}
    section |= {"quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.20"}
    return {**section, "config_groups": {f"group_{i}": its for i, its in enumerate(groups)}, **fields}


def gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **fields}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 16]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
E4M3 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@dataclass(frozen=True)
class Format:
    """A quantization_config, and what packs a linear."""

    section: Mapping[str, Any]
    packer: Packer
    others: Mapping[str, Packer] = field(default_factory=dict)
    """By the last part of a module's name."""

    def of(self, module: str) -> Packer | None:
        if module.endswith(("lm_head", "embed_out", "embed_in", "embed_tokens", "wte", "wpe", ".gate")):
            return None
        return self.others.get(module.rpartition(".")[2], self.packer)


FORMATS: dict[str, Format] = {
    "gptq": Format(gptq(), packers.gptq()),
    "gptq of rows": Format(gptq(group_size=-1), packers.gptq(group_size=-1)),
    "gptq of ragged groups": Format(gptq(group_size=28), packers.gptq(group_size=28)),
    "gptq with act-order": Format(gptq(desc_act=True), packers.gptq(act_order=True)),
    "gptq with act-order, others for each": Format(
        gptq(
            desc_act=True, dynamic={"+:.*[kv]_proj": {"group_size": 40}, "+:.*up_proj": {"bits": 8, "group_size": -1}}
        ),
        packers.gptq(act_order=True),
        {
            "k_proj": packers.gptq(group_size=40, act_order=True),
            "v_proj": packers.gptq(group_size=40),
            "up_proj": packers.gptq(8, -1, act_order=True),
        },
    ),
    "gptq of rows with act-order": Format(
        gptq(group_size=-1, desc_act=True), packers.gptq(group_size=-1, act_order=True)
    ),
    "gptq v2": Format(gptq(checkpoint_format="gptq_v2"), packers.gptq(version=2)),
    "gptq of 8 bits": Format(gptq(bits=8, group_size=16), packers.gptq(8, 16)),
    "gptq of both": Format(
        gptq(dynamic={"+:.*down.*": {"bits": 8, "group_size": 16}, "-:lm_head": {}}),
        packers.gptq(),
        {"down_proj": packers.gptq(8, 16)},
    ),
    "awq": Format(AWQ, packers.awq()),
    "awq of rows": Format({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}, packers.awq(-1)),
    "fp8": Format(FP8, packers.fp8()),
    "fp8 of ragged blocks": Format({**FP8, "weight_block_size": [40, 24]}, packers.fp8((40, 24))),
    "fp8 of large blocks": Format({**FP8, "weight_block_size": [2**62, 2**62]}, packers.fp8((2**62, 2**62))),
    "fp8 without blocks": Format({"quant_method": "fp8"}, packers.fp8(None, "weight_scale")),
    "packed": Format(compressed("pack-quantized", group(**INT4)), packers.packed()),
    "packed, asymmetric": Format(
        compressed("pack-quantized", group(**INT4 | {"symmetric": False})), packers.packed(symmetric=False)
    ),
    "packed of 8 bits": Format(
        compressed("pack-quantized", group(**INT8 | {"symmetric": False})),
        packers.packed(8, group_size=None, symmetric=False),
    ),
    "packed with act-order": Format(
        compressed("pack-quantized", group(**INT4, actorder="group")), packers.packed(act_order=True)
    ),
    "integers": Format(compressed("int-quantized", group(**INT8)), packers.integers()),
    "integers, asymmetric": Format(
        compressed("int-quantized", group(**INT8 | {"strategy": "tensor", "symmetric": False})),
        packers.integers("tensor", symmetric=False),
    ),
    "floats": Format(compressed("float-quantized", group(**E4M3)), packers.floats()),
    "floats of a tensor": Format(
        compressed("float-quantized", group(**E4M3 | {"strategy": "tensor"})), packers.floats("tensor")
    ),
    "floats of blocks": Format(
        compressed("float-quantized", group(**E4M3 | {"strategy": "block", "block_structure": [32, 16]})),
        packers.floats("block"),
    ),
    "nvfp4": Format(compressed("nvfp4-pack-quantized", group(**NVFP4)), packers.nvfp4()),
    "mxfp4": Format(compressed("mxfp4-pack-quantized", group(**MXFP4)), packers.mxfp4()),
    "nvfp4 of modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        packers.nvfp4(("weight", "weight_scale", "weight_scale_2")),
    ),
    "fp8 of modelopt": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, packers.fp8(None, "weight_scale")),
    "mlx": Format({"bits": 4, "group_size": 32}, packers.mlx()),
    "mlx of both": Format(
        {"bits": 4, "group_size": 32, "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 16}},
        packers.mlx(),
        {"down_proj": packers.mlx(8, 16)},
    ),
    "four bits": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, packers.four_bits()),
    "four bits, nested": Format({"quant_method": "bitsandbytes"}, packers.four_bits(is_nested=True)),
    "eight bits": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, packers.eight_bits()),
    "packed and floats": Format(
        compressed(
            "mixed-precision",
            {**group(**INT4), "format": "pack-quantized"},
            {**group(**E4M3), "format": "float-quantized"},
            {**group(**INT8), "format": "int-quantized"},
            {**group(**NVFP4), "format": "nvfp4-pack-quantized"},
            {**group(**MXFP4), "format": "mxfp4-pack-quantized"},
        ),
        packers.packed(),
        {
            "down_proj": packers.floats(),
            "o_proj": packers.integers(),
            "gate_proj": packers.nvfp4(),
            "up_proj": packers.mxfp4(),
        },
    ),
}


def write(folder: Path, form: Format, model_type: str = "llama") -> Path:
    write_model(folder, model_type, FAMILIES[model_type])
    return write_quantized(folder, form.section, form.of, is_transposed=model_type == "gpt2")
