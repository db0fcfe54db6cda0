"""Every family by its model_type. A family's file is imported once somebody asks for it: together they take long.

A new family is one file that makes a Family, and one line here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Final

from gptserve.weights.families.family import Family


class Registry(Mapping[str, Family]):
    """Families, each by its model_type, from where they are: the name of a file beside this one, and of its Family."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, model_type: str) -> Family:
        """Return the family; raise KeyError if there is none."""
        file_name, name = self._places[model_type].split(".")
        family = getattr(import_module(f"{__package__}.{file_name}"), name)
        assert isinstance(family, Family), family
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, model_type: object) -> bool:
        return model_type in self._places


FAMILIES: Final = Registry(
    {
        "openai-gpt": "openai_gpt.OPENAI_GPT",
        "gpt2": "gpt2.GPT2",
        "gpt_neo": "gpt_neo.GPT_NEO",
        "gptj": "gptj.GPTJ",
        "gpt_neox": "gpt_neox.GPT_NEOX",
        "gpt_bigcode": "gpt_bigcode.GPT_BIGCODE",
        "codegen": "codegen.CODEGEN",
        "opt": "opt.OPT",
        "bloom": "bloom.BLOOM",
        "mpt": "mpt.MPT",
        "xglm": "xglm.XGLM",
        "falcon": "falcon.FALCON",
        "llama": "llama.LLAMA",
        "mistral": "mistral.MISTRAL",
        "ministral": "mistral.MINISTRAL",
        "ministral3": "mistral.MINISTRAL3",
        "qwen2": "qwen.QWEN2",
        "qwen3": "qwen.QWEN3",
        "qwen3_next": "qwen3_5_moe.QWEN3_NEXT",
        "qwen3_5_text": "qwen3_5.QWEN3_5",
        "qwen3_5_moe_text": "qwen3_5_moe.QWEN3_5_MOE",
        "lfm2": "lfm2.LFM2",
        "lfm2_moe": "lfm2.LFM2_MOE",
        "lfm3": "lfm3.LFM3",
        "phi": "phi.PHI",
        "phi3": "phi3.PHI3",
        "gemma": "gemma.GEMMA",
        "gemma2": "gemma.GEMMA2",
        "gemma3_text": "gemma.GEMMA3",
        "vaultgemma": "gemma.VAULTGEMMA",
        "olmo": "olmo.OLMO",
        "olmo2": "olmo.OLMO2",
        "olmo3": "olmo.OLMO3",
        "gpt_oss": "gpt_oss.GPT_OSS",
        "cohere": "cohere.COHERE",
        "cohere2": "cohere.COHERE2",
        "granite": "granite.GRANITE",
        "granitemoehybrid": "granite_hybrid.GRANITE_HYBRID",
        "granite_swa": "granite.GRANITE_SWA",
        "nemotron": "nemotron.NEMOTRON",
        "nemotron_h": "nemotron_h.NEMOTRON_H",
        "falcon_h1": "falcon_h1.FALCON_H1",
        "apertus": "apertus.APERTUS",
        "arcee": "arcee.ARCEE",
        "cwm": "cwm.CWM",
        "ernie4_5": "ernie4_5.ERNIE4_5",
        "exaone": "exaone.EXAONE",
        "exaone4": "exaone4.EXAONE4",
        "glm": "glm.GLM",
        "glm4": "glm.GLM4",
        "helium": "helium.HELIUM",
        "hunyuan_v1_dense": "hunyuan.HUNYUAN",
        "hyperclovax": "hyperclovax.HYPERCLOVAX",
        "internlm3": "internlm3.INTERNLM3",
        "iquestcoder": "internlm3.IQUESTCODER",
        "jais2": "jais2.JAIS2",
        "persimmon": "persimmon.PERSIMMON",
        "seed_oss": "seed_oss.SEED_OSS",
        "smollm3": "smollm3.SMOLLM3",
        "stablelm": "stablelm.STABLELM",
        "starcoder2": "starcoder2.STARCODER2",
        "mixtral": "mixtral.MIXTRAL",
        "qwen2_moe": "qwen_moe.QWEN2_MOE",
        "qwen3_moe": "qwen_moe.QWEN3_MOE",
        "olmoe": "olmoe.OLMOE",
        "granitemoe": "granite.GRANITE_MOE",
        "glm4_moe": "glm4_moe.GLM4_MOE",
        "dots1": "glm4_moe.DOTS1",
        "ernie4_5_moe": "ernie4_5_moe.ERNIE4_5_MOE",
        "minimax_m2": "minimax_m2.MINIMAX_M2",
        "hunyuan_v1_moe": "hunyuan.HUNYUAN_MOE",
        "cohere2_moe": "cohere.COHERE2_MOE",
        "granitemoeshared": "granite.GRANITE_MOE_SHARED",
        "granitemoe_swa": "granite.GRANITE_MOE_SWA",
        "solar_open": "glm4_moe.SOLAR_OPEN",
        "exaone_moe": "exaone4.EXAONE_MOE",
        "hy_v3": "hunyuan.HY_V3",
        "mellum": "mellum.MELLUM",
        "flint": "mellum.FLINT",
        "flex_olmo": "olmoe.FLEX_OLMO",
        "afmoe": "afmoe.AFMOE",
        "laguna": "afmoe.LAGUNA",
        "gemma3n_text": "gemma3n.GEMMA3N",
        "gemma3n": "gemma3n.GEMMA3N_WITH_VISION",
        "gemma4_text": "gemma4.GEMMA4",
        "gemma4_unified_text": "gemma4.GEMMA4_UNIFIED",
        "gemma4": "gemma4.GEMMA4_WITH_VISION",
        "gemma4_unified": "gemma4.GEMMA4_UNIFIED_WITH_VISION",
        "gemma3": "with_vision.GEMMA3",
        "cohere2_vision": "with_vision.COHERE2_VISION",
        "mistral3": "with_vision.MISTRAL3",
        "qwen2_vl": "with_vision.QWEN2_VL",
        "qwen2_5_vl": "with_vision.QWEN2_5_VL",
        "qwen3_vl": "with_vision.QWEN3_VL",
        "qwen3_vl_moe": "with_vision.QWEN3_VL_MOE",
        "lfm2_vl": "with_vision.LFM2_VL",
        "qwen3_5": "with_vision.QWEN3_5",
        "qwen3_5_moe": "with_vision.QWEN3_5_MOE",
        "smolvlm": "llava.SMOLVLM",
        "idefics3": "llava.IDEFICS3",
        "internvl": "llava.INTERNVL",
        "llava": "llava.LLAVA",
        "llava_next": "llava.LLAVA_NEXT",
        "llava_onevision": "llava.LLAVA_ONEVISION",
        "aya_vision": "llava.AYA_VISION",
        "nanochat": "nanochat.NANOCHAT",
        "nanogpt": "nanogpt.NANOGPT",
    }
)
