"""Models to measure with: real shapes of GPT-2 and Llamas and small mixtures of experts, with random weights, and a
tokenizer of their size."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GPT2_SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
_LLAMA_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "tie_word_embeddings",
)
LLAMA_SHAPES: dict[str, tuple[Any, ...]] = {
    "llama-135m": (30, 576, 1536, 9, 3, 49152, 2048, 1e4, True),  # SmolLM 135M
    "llama-1b": (16, 2048, 8192, 32, 8, 128256, 131072, 5e5, True),  # Llama 3.2 1B, but for its scaled positions
    "llama-8b": (32, 4096, 14336, 32, 8, 128256, 8192, 5e5, False),  # Llama 3 8B
}
MOE_SHAPES: dict[str, dict[str, int]] = {
    "moe": {  # a small gpt-oss
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 50257,
    }
}
_QWEN3_MOE = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 384}
_QWEN3_MOE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8}
_QWEN3_MOE |= {"vocab_size": 50257, "max_position_embeddings": 4096}
QWEN3_MOE_SHAPES: dict[str, dict[str, int]] = {  # Qwen3-30B-A3B with half of its width and a sixth of its layers
    "qwen3-moe-64": _QWEN3_MOE | {"num_experts": 64},
    "qwen3-moe-128": _QWEN3_MOE | {"num_experts": 128},
}
SHAPES = (*GPT2_SHAPES, *LLAMA_SHAPES, *MOE_SHAPES, *QWEN3_MOE_SHAPES)


@contextmanager
def served_model(shape: str, kept: Path | None = None) -> Iterator[Path]:
    """Give the folder of a model of this shape with a tokenizer.

    It is a folder in `kept`, which is written unless it is there; without `kept` it ends with the context.
    """
    if kept is not None and (kept / shape).is_dir():
        yield kept / shape
        return
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as name:
        folder = Path(name, shape)
        write_served_model(folder, shape)
        yield folder if kept is None else folder.rename(kept / shape)


def write_model(folder: Path, shape: str) -> Any:
    """Write a model of this shape with random weights and return transformers' model of it, on the CPU.

    GPT-2 is in fp32, others in bf16, as they were published. A GPU draws the weights where there is one.
    """
    from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    if shape in GPT2_SHAPES:
        config, dtype = GPT2Config(**GPT2_SHAPES[shape]), torch.float32
    elif shape in MOE_SHAPES:
        config, dtype = GptOssConfig(**MOE_SHAPES[shape], head_dim=64), torch.bfloat16
    elif shape in QWEN3_MOE_SHAPES:
        config, dtype = Qwen3MoeConfig(**QWEN3_MOE_SHAPES[shape], norm_topk_prob=True), torch.bfloat16
    else:
        fields = dict(zip(_LLAMA_NAMES, LLAMA_SHAPES[shape], strict=True))
        rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
        config, dtype = LlamaConfig(**fields, rope_parameters=rope), torch.bfloat16
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().cpu()
    torch.cuda.empty_cache()  # others may compute there now
    model.save_pretrained(folder)
    return model


def write_served_model(folder: Path, shape: str) -> Any:
    """Write a model and a tokenizer for it, and return the model as `write_model` does."""
    model = write_model(folder, shape)
    write_tokenizer(folder, model.config.vocab_size)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')  # also of a Llama
    return model


def write_tokenizer(folder: Path, vocab_size: int = 50257) -> None:
    """Write vocab.json and merges.txt: the bytes, pairs of bytes until the vocabulary is full, and the end of text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = list(bytes_to_unicode().values())
    pairs = [(a, b) for a in characters for b in characters][: vocab_size - len(characters) - 1]
    tokens = [*characters, *(a + b for a, b in pairs), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
