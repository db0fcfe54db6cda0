"""config.json of published models, shortened to what is read, with the number of parameters published for them.

published.json has more of them as published, each with the number of its tensors' parameters on the hub.
Where `is_computed`, no such number was found, or only one of a card that differs by less than 0.1 %.

Sources: GPT-1 and GPT-2, the tensors of openai-community/openai-gpt, gpt2, gpt2-medium, gpt2-large and gpt2-xl on the
hub; GPT-3, Brown et al. 2020, table 2.1 (175.0B, which counts 2048 positions and the vocabulary of GPT-2); Llama 3,
the hub's count for meta-llama/Meta-Llama-3-8B and -70B; gpt-oss, its model card, table 1 (20.91B and 116.83B).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def gpt2(width: int, layers: int, heads: int, context: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": context,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "activation_function": "gelu_new",
    }


def llama3(width: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "eos_token_id": 128001,
    }


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "eos_token_id": 200002,
    }


KNOWN: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-1 117M": (
        {name: value for name, value in gpt2(768, 12, 12, 512).items() if name != "activation_function"}
        | {"model_type": "openai-gpt", "vocab_size": 40478, "afn": "gelu"},
        116_534_784,
    ),
    "GPT-2 124M": (gpt2(768, 12, 12), 124_439_808),
    "GPT-2 355M": (gpt2(1024, 24, 16), 354_823_168),
    "GPT-2 774M": (gpt2(1280, 36, 20), 774_030_080),
    "GPT-2 1.5B": (gpt2(1600, 48, 25), 1_557_611_200),
    "GPT-3 175B": (gpt2(12288, 96, 96, 2048), 174_604_259_328),
    "Llama 3 8B": (llama3(4096, 32, 32, 14336), 8_030_261_248),
    "Llama 3 70B": (llama3(8192, 80, 64, 28672), 70_553_706_496),
    "gpt-oss-20b": (gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": (gpt_oss(36, 128), 116_829_156_672),
    **{name: (entry["config"], entry["num_parameters"]) for name, entry in _PUBLISHED.items()},
}
