"""Models to measure with: GPT-2's real shapes with random weights, and a tokenizer of the real size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}


def write_model(folder: Path, shape: str) -> Any:
    """Write a GPT-2 of this shape with random weights and return transformers' model of it, in fp32 on the CPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPES[shape])).eval()
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path, vocab_size: int = 50257) -> None:
    """Write vocab.json and merges.txt: the bytes, pairs of bytes until the vocabulary is full, and the end of text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = list(bytes_to_unicode().values())
    pairs = [(a, b) for a in characters for b in characters][: vocab_size - len(characters) - 1]
    tokens = [*characters, *(a + b for a, b in pairs), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
