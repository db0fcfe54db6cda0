"""How the hidden states of a text become one vector: what sentence-transformers' files in a folder say. Torch-free.

modules.json lists a transformer, a pooling and perhaps a normalisation; the pooling has a config.json of its own. A
folder without modules.json has the last token's state, normalised, as decoders are trained to embed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown
from gptserve.weights.json_file import read_json_object, read_text

Task = Literal["generate", "embed", "classify", "score"]
"""What a model is loaded for."""
Pooling = Literal["last", "mean", "cls"]

_MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLDER_NAMES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
"""Of the flags of a pooling's config.json, behind `pooling_mode_`, to the modes."""
_MAX_BYTES = 2**16
MODULES_FILE = "modules.json"
_TRANSFORMER_FILE = "sentence_bert_config.json"
_PROMPTS_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class TextVector:
    """Which state of a text its vector is, and whether the vector gets the length 1."""

    pooling: Pooling = "last"
    normalizes: bool = True


def load_text_vector(folder: Path) -> TextVector:
    """Return what the folder says. Raises InvalidConfigError, or UnsupportedModelError for a module not known here."""
    path = folder / MODULES_FILE
    if not path.exists():
        return TextVector()
    pooling: Pooling | None = None
    normalizes = False
    for kind, where in modules_of(path):
        if kind == "Transformer" and where in ("", "."):
            _check_kinds(folder / _TRANSFORMER_FILE)
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _pooling(folder / where)
        elif kind == "Normalize" and pooling is not None:
            normalizes = True
        else:
            rule = "a Transformer in the folder itself, then one Pooling, then nothing or Normalize"
            raise UnsupportedModelError(f"{MODULES_FILE} must list {rule}, got {shown(kind)} in {shown(where)}")
    if pooling is None:
        raise UnsupportedModelError(f"{MODULES_FILE} must list a Pooling, got none")
    return TextVector(pooling, normalizes)


def load_default_prompt(folder: Path) -> str | None:
    """Return the prompt that texts get where nobody names one, None for none. Raises InvalidConfigError."""
    config = read_json_object(folder / _PROMPTS_FILE, InvalidConfigError, required=False, max_bytes=_MAX_BYTES)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return None
    prompt = prompts.get(name) if isinstance(name, str) and isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise InvalidConfigError(f"{_PROMPTS_FILE}: default_prompt_name must name one of prompts, got {shown(name)}")
    return prompt or None


def modules_of(path: Path) -> list[tuple[str, str]]:
    """Return the kinds of the modules, which are the last part of their type, and their folders."""
    try:
        modules = json.loads(read_text(path, InvalidConfigError, max_bytes=_MAX_BYTES))
    except (ValueError, RecursionError) as fault:
        raise InvalidConfigError(f"{path} is not valid JSON: {fault}") from fault
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InvalidConfigError(f"{path} must hold a list of objects")
    found = []
    for module in modules:
        kind, where = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(where, str) or PurePath(where).name != where.strip("."):
            rule = "a type and the name of a folder as its path"
            raise InvalidConfigError(f"{path}: each module must have {rule}, got {shown(module)}")
        found.append((kind.rpartition(".")[2], where))
    return found


def _check_kinds(path: Path) -> None:
    """Raise UnsupportedModelError if sentence-transformers makes chats of texts, as it does wherever it can."""
    config = read_json_object(path, InvalidConfigError, max_bytes=_MAX_BYTES) if path.exists() else {}
    kinds = config.get("modality_config")
    if isinstance(kinds, dict) and "message" in kinds:
        rule = "modality_config must not have message, by which texts become chats; without it they stay as they are"
        raise UnsupportedModelError(f"{path.name}: {rule}, got {shown(list(kinds))}")


def _pooling(folder: Path) -> Pooling:
    path = folder / "config.json"
    config = read_json_object(path, InvalidConfigError, max_bytes=_MAX_BYTES)
    mode = config.get("pooling_mode")
    modes = [mode] if mode is not None else [name for flag, name in _OLDER_NAMES.items() if _is_on(config, flag)]
    if len(modes) != 1 or modes[0] not in _MODES:
        known, where = ", ".join(_MODES.values()), f"{folder.name}/config.json"
        raise UnsupportedModelError(f"{where} must set one pooling out of {known}, got {shown(modes)}")
    if config.get("include_prompt", True) is not True:
        raise UnsupportedModelError(f"{folder.name}/config.json: include_prompt must be true, got false")
    return _MODES[str(modes[0])]


def _is_on(config: Mapping[str, object], flag: str) -> bool:
    return config.get(f"pooling_mode_{flag}") is True
