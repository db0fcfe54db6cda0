"""GPT-2's older tokenizer files, vocab.json and merges.txt, as the tokenizer.json that they stand for.

What they leave to the code that reads them (how text is split, which tokens are special, what a prompt begins with) is
taken from tokenizer_config.json as transformers' GPT2Tokenizer takes it. Files of another class are refused.
Called by vocabulary.py only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.json_file import read_json_object

HOW_TO_CONVERT = "let transformers write tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
# Classes that split as GPT-2 does; GPT-Neo, GPT-J and OPT name GPT-2's, Phi CodeGen's.
CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast")
DEFAULTS: Mapping[str, object] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
NAMES = (*DEFAULTS, "pad_token", "sep_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def describe_gpt2_files(folder: Path) -> dict[str, object]:
    """Return the object of a tokenizer.json; raise TokenizerError for files that are not GPT-2's."""
    vocab = read_json_object(folder / "vocab.json", TokenizerError)
    merges = _merge_lines(folder / "merges.txt")
    config = _configuration(folder)
    path = folder / "tokenizer_config.json"
    found = config.get("tokenizer_class")
    if found not in CLASSES or any(line.endswith("</w>") for line in merges):
        found = "those of GPT-1" if found in CLASSES else f"those of {shown(found)}"
        raise TokenizerError(f"{folder}: vocab.json and merges.txt must be GPT-2's, got {found}; {HOW_TO_CONVERT}")
    if config.get("add_prefix_space"):
        raise TokenizerError(f"{path}: add_prefix_space must be false, got {shown(config['add_prefix_space'])}")
    added = _added_tokens(config, vocab, path)
    extra_path = folder / "added_tokens.json"
    extra = read_json_object(extra_path, TokenizerError) if extra_path.exists() else {}
    for text in extra.keys() - {entry["content"] for entry in added}:
        raise TokenizerError(
            f"{extra_path}: {shown(text)} must also be in tokenizer_config.json, which says how it is cut out"
        )
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "post_processor": _template(config, vocab | {str(entry["content"]): entry["id"] for entry in added}, path),
        "added_tokens": added,
    }


def _merge_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise TokenizerError(f"{path} could not be read as UTF-8: {fault}") from fault
    return [line for line in lines if line and not line.startswith("#version")]


def _configuration(folder: Path) -> dict[str, object]:
    """Return tokenizer_config.json over GPT2Tokenizer's defaults; special_tokens_map.json counts for old ones only."""
    config = dict(DEFAULTS)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists() and "added_tokens_decoder" not in config:
            config |= read_json_object(folder / name, TokenizerError)
    return config


def _added_tokens(config: Mapping[str, object], vocab: Mapping[str, object], path: Path) -> list[dict[str, object]]:
    """Return the entries of added_tokens: those with an id in the configuration, then the named ones in the vocabulary.

    A named token without any id is left out: the model has no such token.
    """
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object, got {shown(decoder)}")
    added: dict[str, dict[str, object]] = {}
    for key, value in decoder.items():
        entry = _entry(value, path)
        if not re.fullmatch("[0-9]{1,9}", key):  # fewer digits than int() refuses
            raise TokenizerError(f"{path}: the id of an added token must be digits, got {shown(key)}")
        added[str(entry["content"])] = {**entry, "id": int(key), "special": value.get("special", False)}
    extra = config.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise TokenizerError(f"{path}: additional_special_tokens must be a list, got {shown(extra)}")
    for value in [*(config.get(name) for name in NAMES), *extra]:
        if value is not None:
            entry = _entry(value, path)
            text = str(entry["content"])
            if text in vocab and text not in added:
                added[text] = {**entry, "id": vocab[text], "special": True}
    return sorted(added.values(), key=lambda entry: str(entry["id"]).zfill(9))


def _entry(value: object, path: Path) -> dict[str, object]:
    """Return a token of the configuration, a text or an object with content, with every flag of tokenizer.json."""
    given = {"content": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or not isinstance(given.get("content"), str):
        raise TokenizerError(f"{path}: a special token must be a string or have content, got {shown(value)}")
    return {"content": given["content"], **{flag: given.get(flag, False) for flag in FLAGS}}


def _template(config: Mapping[str, object], ids: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return the post-processor that add_bos_token and add_eos_token ask for."""
    single: list[object] = [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens: dict[str, object] = {}
    for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        if config.get(flag) and config.get(name) is not None:
            text = str(_entry(config[name], path)["content"])
            if text not in ids:
                raise TokenizerError(f"{path}: {name} must be in the vocabulary as {flag} is true, got {shown(text)}")
            tokens[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
            piece = {"SpecialToken": {"id": text, "type_id": 0}}
            single = [piece, *single] if name == "bos_token" else [*single, piece]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
