"""The special tokens that tokenizer_config.json or special_tokens_map.json names, and the id of the end of text.

Opens no tokenizer. Torch-free. Called by the configuration, by chat templates and by what describes a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.json_file import MAX_VOCABULARY_BYTES, read_json_object, read_leading_list

DEFAULTS: Mapping[str, object] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
"""Those of a folder with GPT-2's older files that names none."""
MAX_DIGITS = 9  # of an id; int() refuses thousands


def special_tokens(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the text of each special token that has a name, such as bos_token; `config` is tokenizer_config.json."""
    texts = {name: _text(value) for name, value in _named(folder, config).items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def eos_token_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's eos_token; None if it has none. Raises TokenizerError.

    vLLM ends an answer at this token, too, whatever config.json says.
    """
    config = read_json_object(folder / "tokenizer_config.json", TokenizerError, required=False)
    value = _named(folder, config).get("eos_token")
    has_older_files = not (folder / "tokenizer.json").is_file() and (folder / "vocab.json").is_file()
    text = _text(DEFAULTS["eos_token"] if value is None and has_older_files else value)
    if text is None:
        return None
    if not isinstance(text, str):
        raise TokenizerError(f"{folder}: eos_token must be a string or have content, got {shown(value)}")
    token_id = _id_in(config.get("added_tokens_decoder"), text)
    if token_id is None:
        token_id = _id_in_files(folder, text)
    return token_id


def _named(folder: Path, config: Mapping[str, object]) -> dict[str, object]:
    """Return the named special tokens as transformers reads them."""
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= read_json_object(folder / "special_tokens_map.json", TokenizerError, required=False)
    extra = named.get("extra_special_tokens")
    return named | extra if isinstance(extra, dict) else named


def _text(value: object) -> object:
    return value.get("content", value) if isinstance(value, dict) else value


def _id_in(added_tokens_decoder: object, text: str) -> int | None:
    for key, entry in added_tokens_decoder.items() if isinstance(added_tokens_decoder, dict) else ():
        if _text(entry) == text and key.isdecimal() and len(key) <= MAX_DIGITS:
            return int(key)
    return None


def _id_in_files(folder: Path, text: str) -> int | None:
    """Return the id in tokenizer.json, where special tokens are mostly among the added ones, or in vocab.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _id_in_vocabulary(_read(folder / "vocab.json"), text)
    for entry in read_leading_list(path, "added_tokens", TokenizerError, max_bytes=MAX_VOCABULARY_BYTES):
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    model = _read(path).get("model")
    return _id_in_vocabulary(model.get("vocab") if isinstance(model, dict) else None, text)


def _read(path: Path) -> dict[str, object]:
    return read_json_object(path, TokenizerError, required=False, max_bytes=MAX_VOCABULARY_BYTES)


def _id_in_vocabulary(vocabulary: object, text: str) -> int | None:
    """Return the id in an object of ids, or in a list of tokens with their scores."""
    if isinstance(vocabulary, list):
        tokens = (entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary)
        return next((token_id for token_id, token in enumerate(tokens) if token == text), None)
    token_id = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return token_id if type(token_id) is int else None
