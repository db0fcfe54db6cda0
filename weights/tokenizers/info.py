"""Describes a tokenizer to clients: tokenizer_config.json, as vLLM's route /tokenizer_info shows it."""

from __future__ import annotations

from pathlib import Path

from gptserve.weights.errors import TokenizerError
from gptserve.weights.json_file import read_json_object
from gptserve.weights.special_tokens import special_tokens

_OF_FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
_FALLBACK_CLASS = "PreTrainedTokenizerFast"  # transformers' name for a tokenizer.json without another one


def load_tokenizer_info(folder: Path) -> dict[str, object]:
    """Return the fields of the file but those about files, and each special token as text. Raises TokenizerError."""
    config = read_json_object(folder / "tokenizer_config.json", TokenizerError, required=False)
    shown = {name: value for name, value in config.items() if name not in _OF_FILES}
    return {"tokenizer_class": _FALLBACK_CLASS, **shown, **special_tokens(folder, config)}
