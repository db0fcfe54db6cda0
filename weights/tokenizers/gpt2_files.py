"""Reads GPT-2's older tokenizer files, vocab.json and merges.txt, and describes them as a tokenizer.json.

tokenizer_config.json names the special tokens and what a prompt begins and ends with; it is read as transformers'
GPT2Tokenizer reads it. Files of another class are refused. vocabulary.py calls this and checks the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.json_file import MAX_VOCABULARY_BYTES, read_json_object, read_text
from gptserve.weights.special_tokens import DEFAULTS

HOW_TO_CONVERT = "let transformers write tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
# Classes that split as GPT-2 does; GPT-Neo, GPT-J and OPT name GPT-2's, Phi CodeGen's.
CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast")
NAMES = (*DEFAULTS, "pad_token", "sep_token", "cls_token", "mask_token")
FLAGS: Mapping[str, object] = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

Entry = dict[str, object]
"""A token as tokenizer.json describes it in added_tokens."""


def describe_gpt2_files(folder: Path) -> dict[str, object]:
    """Return the object of a tokenizer.json; raise TokenizerError for files that are not GPT-2's."""
    path = folder / "tokenizer_config.json"
    config = {**DEFAULTS, **_read(path)}
    if "added_tokens_decoder" not in config:
        config |= _read(folder / "special_tokens_map.json")
    vocab = read_json_object(folder / "vocab.json", TokenizerError, max_bytes=MAX_VOCABULARY_BYTES)
    lines = read_text(folder / "merges.txt", TokenizerError, max_bytes=MAX_VOCABULARY_BYTES).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    kind = config.get("tokenizer_class")
    if kind not in CLASSES or any(line.endswith("</w>") for line in merges):
        found = "GPT-1" if kind in CLASSES else shown(kind)
        raise TokenizerError(
            f"{folder}: vocab.json and merges.txt must be GPT-2's, got those of {found}; {HOW_TO_CONVERT}"
        )
    if config.get("add_prefix_space"):
        raise TokenizerError(f"{path}: add_prefix_space must be false, got {shown(config['add_prefix_space'])}")
    added = _added_tokens(config, vocab, path)
    for text in _read(folder / "added_tokens.json").keys() - added.keys():
        raise TokenizerError(f"{folder}: {shown(text)} of added_tokens.json must also be in tokenizer_config.json")
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "post_processor": _template(config, vocab | {text: entry["id"] for text, entry in added.items()}, path),
        "added_tokens": sorted(added.values(), key=lambda entry: str(entry["id"]).zfill(9)),
    }


def _read(path: Path) -> dict[str, object]:
    return read_json_object(path, TokenizerError, required=False)


def _added_tokens(config: Mapping[str, object], vocab: Mapping[str, object], path: Path) -> dict[str, Entry]:
    """Return the added tokens by their texts; a special token without any id is left out, as the model has none."""
    decoder, extra = config.get("added_tokens_decoder", {}), config.get("additional_special_tokens") or []
    if not isinstance(decoder, dict) or not isinstance(extra, list):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object and additional_special_tokens a list")
    added: dict[str, Entry] = {}
    for key, value in decoder.items():
        entry = _entry(value, path)
        is_id = key.isdecimal() and len(key) < 10  # int() refuses thousands of digits
        added[str(entry["content"])] = entry | {"id": int(key) if is_id else key}
    for value in (value for value in [*map(config.get, NAMES), *extra] if value is not None):
        entry = _entry(value, path)
        text = str(entry["content"])
        if text in vocab:
            added.setdefault(text, entry | {"id": vocab[text], "special": True})
    return added


def _entry(value: object, path: Path) -> Entry:
    """Return a token, which is a text or an object with content, with all flags that tokenizer.json must have."""
    given = {"content": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or not isinstance(given.get("content"), str):
        raise TokenizerError(f"{path}: a special token must be a string or have content, got {shown(value)}")
    return {**FLAGS, **given}


def _template(config: Mapping[str, object], ids: Mapping[str, object], path: Path) -> dict[str, object] | None:
    """Return the post-processor that add_bos_token and add_eos_token ask for."""
    single: list[object] = [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens: dict[str, object] = {}
    for name, place in (("bos_token", 0), ("eos_token", 2)):
        if config.get(f"add_{name}") and config.get(name) is not None:
            text = str(_entry(config[name], path)["content"])
            if text not in ids:
                raise TokenizerError(
                    f"{path}: {name} must be in the vocabulary as add_{name} is true, got {shown(text)}"
                )
            tokens[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
            single.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens} if tokens else None
