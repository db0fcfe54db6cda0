"""The models that no family is for, by model_type, each with the reason. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping

ENCODERS = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "longformer"),
    *("modernbert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"),
)
ENCODER_DECODERS = ("bart", "led", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "t5gemma", "umt5", "whisper")
WITH_IMAGES = (
    *("blip-2", "idefics", "idefics2", "idefics3", "internvl", "llama4", "llava", "llava_next"),
    *("mllama", "paligemma", "pixtral", "smolvlm"),
)
WITH_LATENTS = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "longcat_flash"),
    *("minicpm3", "youtu"),
)
WITH_STATES = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma"),
    *("rwkv", "xlstm", "zamba", "zamba2"),
)
WITH_SHARED_LAYERS = ("gemma3n", "gemma4", "gemma4_text")
OF_2023 = ("RefinedWeb", "RefinedWebModel")

WHY_REFUSED: Mapping[tuple[str, ...], str] = {
    ENCODERS: (
        "is an encoder: it reads text in both directions and cannot continue it; to embed or classify with it, use "
        "sentence-transformers or text-embeddings-inference"
    ),
    ENCODER_DECODERS: (
        "is an encoder-decoder: it rewrites one text as another and cannot continue it; use transformers for it"
    ),
    WITH_IMAGES: (
        "reads images beside text, and only text is read here; use a text model of its lineage, or a server for images"
    ),
    WITH_LATENTS: "has latent attention (MLA), whose keys and values are one vector for all heads: it is not computed",
    WITH_STATES: (
        "has layers that keep a state in place of keys and values, as Mamba, convolutions and linear attention do: "
        "they are not computed"
    ),
    WITH_SHARED_LAYERS: "has layers that share keys and values or have embeddings of their own: they are not computed",
    ("phimoe",): "chooses each expert by a softmax of its own (SparseMixer): it is not computed",
    ("bitnet",): "has ternary weights, and norms inside attention and feed-forward: they are not computed",
    OF_2023: "is Falcon in the format of its own code: use its present files, whose model_type is falcon",
}
