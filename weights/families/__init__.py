"""The way from a folder to its ModelConfig, by its family.

A new family is one file that makes a Family, and one line in registry.py. Torch-free.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown
from gptserve.weights.families.config_keys import DoubtfulKeys, refuse_unread
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.registry import FAMILIES as FAMILIES
from gptserve.weights.json_file import read_json_object
from gptserve.weights.quantized import stored_types
from gptserve.weights.refused import WHY_REFUSED
from gptserve.weights.special_tokens import eos_token_id

logger = logging.getLogger(__name__)

MAX_SHARED_EXPERTS = 2**16  # over all layers, far above any model

NO_MODELS = {
    "adapter_config.json": "holds an adapter and no model; merge it into its base model, and serve that",
    "params.json": "is in the format of its makers' own code; use its files in the format of transformers",
}
"""What a folder without config.json is, by a file in it."""


def find_family(model_type: str) -> Family:
    """Return the family of a model_type; raise UnsupportedModelError with the reason if there is none."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    supported = f"decoder-only models of model_type {', '.join(sorted(FAMILIES))} are served"
    for model_types, why in WHY_REFUSED.items():
        if model_type in model_types:
            raise UnsupportedModelError(f"{model_type} {why}; {supported}")
    raise UnsupportedModelError(f"config.json: model_type {shown(model_type)} is not supported; {supported}")


def read_raw_config(folder: Path) -> RawConfig:
    """Return the fields of config.json. Raises InvalidConfigError, UnsupportedModelError by NO_MODELS."""
    for name, why in NO_MODELS.items():
        if (folder / name).is_file() and not (folder / "config.json").exists():
            raise UnsupportedModelError(f"{folder} has {name} and no config.json: it {why}")
    return RawConfig(read_json_object(folder / "config.json", InvalidConfigError))


def open_config(folder: Path) -> tuple[RawConfig, Family]:
    """Return config.json and its family, without reading its other fields.

    Raises InvalidConfigError, or UnsupportedModelError for a kind of model or weights that is not supported.
    """
    raw = read_raw_config(folder)
    model_type = _model_type(raw)
    if "auto_map" in raw and model_type not in {*FAMILIES, *chain.from_iterable(WHY_REFUSED)}:
        raise UnsupportedModelError(
            f"{shown(model_type)} brings its own code (config.json: auto_map), which is never run; use a checkpoint in "
            "the format of transformers' own models, if there is one"
        )
    family = find_family(model_type)
    stored_types(raw, folder)  # or why the weights cannot be read
    return raw, family


def _model_type(raw: RawConfig) -> str:
    """Return model_type; an error says what `architectures` says, by which a reader knows the model."""
    try:
        return raw.text("model_type")
    except InvalidConfigError as fault:
        names = raw.value("architectures")
        if not isinstance(names, list) or not names:
            raise
        raise InvalidConfigError(f"{fault}; architectures is {shown(names)}") from fault


def load_config(folder: Path, doubtful_keys: DoubtfulKeys = "accept") -> ModelConfig:
    """Read config.json, and the end-of-text ids of generation_config.json and of the tokenizer's eos_token, too.

    Any of these ids ends a text, as in vLLM: many files name the end of a turn in one place only.
    `doubtful_keys` says what becomes of keys that probably change nothing (config_keys.py). Raises InvalidConfigError
    naming file, field, rule and value, TokenizerError or UnsupportedModelError.
    """
    raw, family = open_config(folder)
    config = family.read_config(raw)
    if not any(layer.num_kv_heads for layer in config.distinct_layers):
        raise UnsupportedModelError("config.json: no layer attends to tokens, and states alone are not computed")
    if sum(layer.experts.num_shared for layer in config.layers if layer.experts) > MAX_SHARED_EXPERTS:
        raise InvalidConfigError(f"config.json: layers have more than {MAX_SHARED_EXPERTS} shared experts in all")
    path = folder / "generation_config.json"
    generation = RawConfig(read_json_object(path, InvalidConfigError, required=False), path.name)
    eos_token_ids = config.eos_token_ids + raw.token_ids("eos_token_id", config.vocab_size)
    eos_token_ids += generation.token_ids("eos_token_id", config.vocab_size)
    tokenizer_eos_id = eos_token_id(folder)
    if tokenizer_eos_id is not None and tokenizer_eos_id < config.vocab_size:
        eos_token_ids += (tokenizer_eos_id,)
    bos_token_ids = raw.token_ids("bos_token_id", config.vocab_size)
    refuse_unread(raw, config, doubtful_keys)
    if (left_out := raw.left_out() + generation.left_out()) and doubtful_keys == "warn":
        logger.warning(
            "%s: no text has such tokens, as the ids of this model are in [0, %d); it goes on without them",
            "; ".join(left_out),
            config.vocab_size,
        )
    return replace(
        config,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=bos_token_ids[0] if bos_token_ids else config.bos_token_id,
    )
