"""The text of models that see through a projector, as LLaVA does: LLaVA, SmolVLM, Idefics 3, InternVL 3, Aya Vision.

Their text models are whole ones of other families, and files name no size that is the default of that one's class.
Liu et al., "Visual Instruction Tuning" (2023); Marafioti et al., "SmolVLM" (2025); Zhu et al., "InternVL3" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping

from gptserve.weights.families.cohere import COHERE2
from gptserve.weights.families.llama import LLAMA
from gptserve.weights.families.mistral import MISTRAL
from gptserve.weights.families.qwen import QWEN2, QWEN3
from gptserve.weights.families.qwen_moe import QWEN3_MOE
from gptserve.weights.families.with_vision import OF_COHERE2, text_of

_WIDE: dict[str, object] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = {**_WIDE, "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048}
_QWEN = {**_WIDE, "vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
_SIZES: Mapping[str, Mapping[str, object]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14_336, "max_position_embeddings": 131_072},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": {**_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24},
}
"""Of transformers' classes."""
_OF_LLAMA = {"llama": {**_LLAMA, "rms_norm_eps": 1e-5}}
LLAVA = text_of(
    "llava",
    LLAMA,
    MISTRAL,
    QWEN2,
    models="LLaVA 1.5, Pixtral",
    tied_head=False,
    text_ties=True,
    defaults_of=_SIZES,
)
LLAVA_NEXT = text_of("llava_next", LLAMA, MISTRAL, QWEN2, models="LLaVA 1.6", tied_head=False, defaults_of=_SIZES)
LLAVA_ONEVISION = text_of(
    "llava_onevision", QWEN2, QWEN3, models="LLaVA-OneVision", tied_head=False, defaults_of=_SIZES
)
SMOLVLM = text_of("smolvlm", LLAMA, models="SmolVLM2", tied_head=False, defaults_of=_OF_LLAMA)
IDEFICS3 = text_of("idefics3", LLAMA, models="Idefics 3, SmolVLM", tied_head=False, defaults_of=_OF_LLAMA)
INTERNVL = text_of(
    "internvl",
    QWEN2,
    QWEN3,
    LLAMA,
    QWEN3_MOE,
    models="InternVL 3, 3.5",
    tied_head=True,
    defaults_of=_SIZES,
)
AYA_VISION = text_of("aya_vision", COHERE2, models="Aya Vision", tied_head=True, defaults_of=OF_COHERE2)
