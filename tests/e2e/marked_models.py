"""Tiny models whose vocabularies have the marks of reasoning and of calls."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.conftest import MakeGPT2
from tests.weights.tiny_tokenizers import byte_level

Marks = tuple[tuple[str, ...], bool]
"""The marks in a vocabulary, and whether they are special tokens; Qwen's are not."""


def marked_model(make_gpt2: MakeGPT2, folder: Path, marks: tuple[str, ...], is_special: bool) -> Path:
    """Write a model with these marks into an empty folder, and return that."""
    library = byte_level(size=330)
    library.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in marks])
    source = make_gpt2(vocab_size=library.get_vocab_size(), n_positions=512, eos_token_id=0)
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
