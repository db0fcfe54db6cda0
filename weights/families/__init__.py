"""The known families, and the way from a folder to its ModelConfig.

A new family is one file that makes a Family, and one line in FAMILIES. Torch-free.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown
from gptserve.weights.families.afmoe import AFMOE, LAGUNA
from gptserve.weights.families.apertus import APERTUS
from gptserve.weights.families.arcee import ARCEE
from gptserve.weights.families.bloom import BLOOM
from gptserve.weights.families.codegen import CODEGEN
from gptserve.weights.families.cohere import COHERE, COHERE2, COHERE2_MOE
from gptserve.weights.families.config_keys import DoubtfulKeys, refuse_unread
from gptserve.weights.families.cwm import CWM
from gptserve.weights.families.ernie4_5 import ERNIE4_5
from gptserve.weights.families.ernie4_5_moe import ERNIE4_5_MOE
from gptserve.weights.families.exaone import EXAONE
from gptserve.weights.families.exaone4 import EXAONE4, EXAONE_MOE
from gptserve.weights.families.falcon import FALCON
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULTGEMMA
from gptserve.weights.families.gemma4 import GEMMA4, GEMMA4_UNIFIED, GEMMA4_UNIFIED_WITH_VISION, GEMMA4_WITH_VISION
from gptserve.weights.families.glm import GLM, GLM4
from gptserve.weights.families.glm4_moe import DOTS1, GLM4_MOE, SOLAR_OPEN
from gptserve.weights.families.gpt2 import GPT2
from gptserve.weights.families.gpt_bigcode import GPT_BIGCODE
from gptserve.weights.families.gpt_neo import GPT_NEO
from gptserve.weights.families.gpt_neox import GPT_NEOX
from gptserve.weights.families.gpt_oss import GPT_OSS
from gptserve.weights.families.gptj import GPTJ
from gptserve.weights.families.granite import (
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SWA,
    GRANITE_SWA,
)
from gptserve.weights.families.helium import HELIUM
from gptserve.weights.families.hunyuan import HUNYUAN, HUNYUAN_MOE, HY_V3
from gptserve.weights.families.hyperclovax import HYPERCLOVAX
from gptserve.weights.families.internlm3 import INTERNLM3, IQUESTCODER
from gptserve.weights.families.jais2 import JAIS2
from gptserve.weights.families.lfm2 import LFM2, LFM2_MOE
from gptserve.weights.families.lfm3 import LFM3
from gptserve.weights.families.llama import LLAMA
from gptserve.weights.families.llava import (
    AYA_VISION,
    IDEFICS3,
    INTERNVL,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    SMOLVLM,
)
from gptserve.weights.families.mellum import FLINT, MELLUM
from gptserve.weights.families.minimax_m2 import MINIMAX_M2
from gptserve.weights.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from gptserve.weights.families.mixtral import MIXTRAL
from gptserve.weights.families.mpt import MPT
from gptserve.weights.families.nanochat import NANOCHAT
from gptserve.weights.families.nanogpt import NANOGPT
from gptserve.weights.families.nemotron import NEMOTRON
from gptserve.weights.families.olmo import OLMO, OLMO2, OLMO3
from gptserve.weights.families.olmoe import FLEX_OLMO, OLMOE
from gptserve.weights.families.openai_gpt import OPENAI_GPT
from gptserve.weights.families.opt import OPT
from gptserve.weights.families.persimmon import PERSIMMON
from gptserve.weights.families.phi import PHI
from gptserve.weights.families.phi3 import PHI3
from gptserve.weights.families.qwen import QWEN2, QWEN3
from gptserve.weights.families.qwen3_5 import QWEN3_5 as QWEN3_5_TEXT
from gptserve.weights.families.qwen3_5_moe import QWEN3_5_MOE as QWEN3_5_MOE_TEXT
from gptserve.weights.families.qwen3_5_moe import QWEN3_NEXT
from gptserve.weights.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from gptserve.weights.families.seed_oss import SEED_OSS
from gptserve.weights.families.smollm3 import SMOLLM3
from gptserve.weights.families.stablelm import STABLELM
from gptserve.weights.families.starcoder2 import STARCODER2
from gptserve.weights.families.with_vision import (
    COHERE2_VISION,
    LFM2_VL,
    MISTRAL3,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from gptserve.weights.families.with_vision import GEMMA3 as GEMMA3_WITH_VISION
from gptserve.weights.families.xglm import XGLM
from gptserve.weights.json_file import read_json_object
from gptserve.weights.quantized import stored_types
from gptserve.weights.refused import WHY_REFUSED
from gptserve.weights.special_tokens import eos_token_id

logger = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(OPENAI_GPT, GPT2, GPT_NEO, GPTJ, GPT_NEOX, GPT_BIGCODE, CODEGEN, OPT, BLOOM, MPT, XGLM, FALCON),
        *(
            LLAMA,
            MISTRAL,
            MINISTRAL,
            MINISTRAL3,
            QWEN2,
            QWEN3,
            QWEN3_NEXT,
            QWEN3_5_TEXT,
            QWEN3_5_MOE_TEXT,
            LFM2,
            LFM2_MOE,
            LFM3,
            PHI,
            PHI3,
            GEMMA,
            GEMMA2,
            GEMMA3,
            VAULTGEMMA,
            OLMO,
            OLMO2,
            OLMO3,
            GPT_OSS,
        ),
        *(
            COHERE,
            COHERE2,
            GRANITE,
            GRANITE_HYBRID,
            GRANITE_SWA,
            NEMOTRON,
            APERTUS,
            ARCEE,
            CWM,
            ERNIE4_5,
            EXAONE,
            EXAONE4,
            GLM,
            GLM4,
            HELIUM,
            HUNYUAN,
            HYPERCLOVAX,
            INTERNLM3,
            IQUESTCODER,
            JAIS2,
            PERSIMMON,
            SEED_OSS,
            SMOLLM3,
            STABLELM,
            STARCODER2,
        ),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GLM4_MOE, DOTS1, ERNIE4_5_MOE, MINIMAX_M2, HUNYUAN_MOE),
        *(COHERE2_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA, SOLAR_OPEN, EXAONE_MOE, HY_V3, MELLUM, FLINT, FLEX_OLMO),
        *(AFMOE, LAGUNA, GEMMA4, GEMMA4_UNIFIED, GEMMA4_WITH_VISION, GEMMA4_UNIFIED_WITH_VISION),
        *(
            GEMMA3_WITH_VISION,
            COHERE2_VISION,
            MISTRAL3,
            QWEN2_VL,
            QWEN2_5_VL,
            QWEN3_VL,
            QWEN3_VL_MOE,
            LFM2_VL,
            QWEN3_5,
            QWEN3_5_MOE,
        ),
        *(SMOLVLM, IDEFICS3, INTERNVL, LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, AYA_VISION, NANOCHAT, NANOGPT),
    )
}

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
