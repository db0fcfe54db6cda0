"""The text of models that also see: Gemma 3, Qwen2-VL to 3-VL, Mistral 3, LFM2-VL, Command A; llava.py has more.

What sees is left out. Their text models are those of other families. config.json has their fields in `text_config`,
where those that are absent have the defaults of transformers' class; older files of Qwen have them beside the others.
Text has one position in all three parts of Qwen's rotation, so this is the usual one. Logits of Cohere's are scaled as
without images, and as in vLLM; transformers' class that sees leaves the factor out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import UnsupportedModelError, shown
from gptserve.weights.families.cohere import COHERE2, COHERE2_MOE
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.gemma import GEMMA3 as GEMMA3_TEXT
from gptserve.weights.families.lfm2 import LFM2, LFM2_MOE
from gptserve.weights.families.mistral import MINISTRAL3, MISTRAL
from gptserve.weights.families.qwen import QWEN2, QWEN3
from gptserve.weights.families.qwen3_5 import QWEN3_5 as QWEN3_5_TEXT
from gptserve.weights.families.qwen3_5_moe import QWEN3_5_MOE as QWEN3_5_MOE_TEXT
from gptserve.weights.families.qwen_moe import QWEN3_VL_MOE_TEXT

PREFIXES = ("model.language_model.", "model.text_model.", "language_model.model.", "language_model.", "model.")
OF_IMAGES = (  # and of sound
    *("language_model_only", "audio_config", "eoa_token_index", "vision_soft_tokens_per_image"),
    "audio_soft_tokens_per_image",
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    *("projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"),
    *("adapter_layer_norm_eps", "alignment_intermediate_size", "downsample_factor", "downsample_ratio"),
    *("ignore_index", "image_aspect_ratio", "image_grid_pinpoints", "image_seq_length", "scale_factor"),
    *(
        "image_seq_len",
        "use_image_newline_parameter",
        "video_token_index",
        "vision_aspect_ratio",
        "vision_feature_select_strategy",
    ),
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance"),
    *("max_tiles", "min_image_tokens", "min_tiles", "projector_bias", "projector_hidden_size"),
    *("projector_use_layernorm", "tile_size", "use_image_special_tokens", "use_thumbnail"),
)
OF_RESAMPLERS = ("perceiver_config", "pixel_shuffle_factor")
"""What text_config says of Idefics's eyes."""
OF_TEXT = ("vocab_size",)
"""What some files say again beside text_config."""
IGNORED = r"((visual|vision_tower|vision_model|multi_modal_projector|connector)\..*|image_newline)"


def text_of(
    model_type: str,
    text_family: Family,
    *others: Family,
    models: str,
    tied_head: bool,
    defaults_of: Mapping[str, Mapping[str, object]],
    text_ties: bool = False,
) -> Family:
    """Return the family of a model with a text model of `text_family`, or of one of `others`; the last has all tensors.

    `tied_head` and `defaults_of` are those of transformers' classes, for the whole and for texts by their model_type.
    `text_ties`: the text may tie the head, too.
    """
    return Family(
        model_type,
        _reader((text_family, *others), defaults_of, tied_head=tied_head, text_ties=text_ties),
        (text_family, *others)[-1].sources,
        PREFIXES,
        f"{text_family.ignored}|{IGNORED}",
        models=models,
    )


def _reader(
    families: tuple[Family, ...], defaults: Mapping[str, Mapping[str, object]], *, tied_head: bool, text_ties: bool
) -> Callable[[RawConfig], ModelConfig]:
    def read(raw: RawConfig) -> ModelConfig:
        raw.skip(*OF_IMAGES)
        text = raw.section("text_config") if "text_config" in raw else raw
        if text is raw and "hidden_size" not in raw:
            raise raw.error("text_config", "an object")
        raw.skip(*OF_TEXT)
        text.skip(*OF_RESAMPLERS)
        is_tied = raw.boolean("tie_word_embeddings", default=tied_head)
        is_tied = is_tied or (text_ties and text.boolean("tie_word_embeddings", default=False))
        text.default(model_type=families[0].model_type)
        found, outer = text.text("model_type"), raw.text("model_type")
        by_type = {family.model_type: family for family in families}
        family = families[0] if found in (outer, f"{outer}_text") else by_type.get(found)
        if family is None:
            names = " or ".join(by_type)
            raise UnsupportedModelError(
                f"config.json: text_config: model_type must be {names}, got {shown(found)}: the text of {outer} is "
                "read as that alone"
            )
        text.default(replaces_null=False, **defaults.get(family.model_type, {}))
        config = replace(family.read_config(text), model_type=outer, tied_head=is_tied)
        bos_token_ids = text.token_ids("bos_token_id", config.vocab_size)
        return replace(
            config,
            eos_token_ids=text.token_ids("eos_token_id", config.vocab_size),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        )

    return read


_QWEN2_VL: Mapping[str, Mapping[str, object]] = {
    "qwen2": {
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }
}
GEMMA3 = text_of(
    "gemma3",
    GEMMA3_TEXT,
    models="Gemma 3 that sees",
    tied_head=True,
    defaults_of={
        "gemma3_text": {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        }
    },
)
OF_COHERE2: Mapping[str, Mapping[str, object]] = {
    "cohere2": {
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    }
}
COHERE2_VISION = text_of(
    "cohere2_vision",
    COHERE2,
    COHERE2_MOE,
    models="Command A Vision, A+",
    tied_head=True,
    defaults_of=OF_COHERE2,
)
QWEN2_VL = text_of("qwen2_vl", QWEN2, models="Qwen2-VL", tied_head=False, defaults_of=_QWEN2_VL)
QWEN2_5_VL = text_of("qwen2_5_vl", QWEN2, models="Qwen2.5-VL", tied_head=False, defaults_of=_QWEN2_VL)
QWEN3_VL = text_of(
    "qwen3_vl",
    QWEN3,
    models="Qwen3-VL",
    tied_head=False,
    defaults_of={
        "qwen3": {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 22_016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0,
        }
    },
)
QWEN3_VL_MOE = text_of(
    "qwen3_vl_moe",
    QWEN3_VL_MOE_TEXT,
    models="Qwen3-VL with experts",
    tied_head=False,
    defaults_of={
        "qwen3_vl_moe_text": {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0,
        }
    },
)
QWEN3_5 = text_of(
    "qwen3_5",
    QWEN3_5_TEXT,
    models="Qwen3.5",
    tied_head=False,
    text_ties=True,
    defaults_of={
        "qwen3_5_text": {
            "vocab_size": 248_320,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "max_position_embeddings": 32_768,
        }
    },
)
QWEN3_5_MOE = text_of(
    "qwen3_5_moe",
    QWEN3_5_MOE_TEXT,
    models="Qwen3.5 with experts",
    tied_head=False,
    text_ties=True,
    defaults_of={
        "qwen3_5_moe_text": {
            "vocab_size": 248_320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "max_position_embeddings": 32_768,
        }
    },
)
LFM2_VL = text_of(
    "lfm2_vl",
    LFM2,
    LFM2_MOE,
    models="LFM2-VL",
    tied_head=True,
    defaults_of={
        "lfm2": {
            "vocab_size": 65_536,
            "hidden_size": 2560,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        "lfm2_moe": {
            "vocab_size": 65_536,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    },
)
MISTRAL3 = text_of(
    "mistral3",
    MISTRAL,
    MINISTRAL3,
    models="Mistral Small 3.1+, Ministral 3",
    tied_head=True,
    defaults_of={
        "mistral": {
            "vocab_size": 131_072,
            "hidden_size": 5120,
            "intermediate_size": 32_768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000_000.0,
            "sliding_window": None,
        }
    },
)
