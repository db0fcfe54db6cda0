"""The models that no family is for, by model_type, each with the reason. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping

ENCODERS = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
    *("electra", "ernie", "esm", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert", "jina_embeddings_v3"),
    *("layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert"),
    *("nystromformer", "perceiver", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("squeezebert", "tapas", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"),
)
ENCODER_DECODERS = (
    *("bart", "bert-generation", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt"),
    *("led", "longt5"),
    *("m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet"),
    *("seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5", "whisper"),
)
WITH_IMAGES = (
    *("aria", "audioflamingo3", "blip", "blip-2", "chameleon", "deepseek_vl"),
    *("deepseek_vl_hybrid", "deepseek_vl_v2", "emu3", "ernie4_5_moe_vl", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm"),
    *("florence2", "fuyu", "git", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "got_ocr2", "granite4_vision"),
    *("granite_docling", "granite_speech", "granite_speech_plus", "hunyuan_vl", "hyperclovax_vision_v2", "idefics"),
    *("idefics2", "instructblip", "instructblipvideo", "internvl_chat", "janus", "kimi_k25"),
    *("kimi_vl", "kosmos-2", "kosmos-2.5", "lfm3_vl", "lighton_ocr"),
    *("llava_next_video", "minicpmv", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mllama"),
    *("molmo2", "musicflamingo", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "perception_lm"),
    *("phi4_multimodal", "phi4mm", "pix2struct", "pixtral", "qwen2_5_omni", "qwen2_audio", "qwen3_asr"),
    *("qwen3_omni_moe", "shieldgemma2", "step3p7", "t5gemma2", "udop", "video_llama_3", "video_llava"),
    *("vipllava", "vision-encoder-decoder", "voxtral", "voxtral_realtime"),
    *("apertus1p5", "apertus1p5_text", "hy_v4_vl", "inkling2_loop", "omniasr"),
    *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2", "diffusion_gemma", "dots3_note", "evolla"),
    *("fun_asr_nano", "glmasr", "glmga", "inkling2", "inkling_mm_model", "kyutai_speech_to_text", "minicpm_ocr"),
    *("moss_transcribe_diarize", "muse_glimmer", "muse_spark", "nemo_speechlm", "pi0", "pp_chart2table"),
    *("pp_formulanet", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "unlimited_ocr"),
    *("aria_text", "cohere_compass_text", "dots3_note_text", "minimax_m3_vl_text", "moshi", "musicgen"),
    *("musicgen_melody", "trocr", "vibevoice_asr"),
)
WITH_LATENTS = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm5_next", "glm_moe_dsa"),
    *("hy_v4", "kimi_k2", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "sarvam_mla", "youtu"),
)
WITH_STATES = (
    *(
        "bailing_hybrid",
        "bamba",
        "falcon_mamba",
        "inkling_text",
        "inkling2_loop_text",
        "inkling2_text",
        "jamba",
        "kimi_linear",
        "lara_mini",
    ),
    *("mamba", "mamba2", "minimax", "olmo_hybrid", "qwen4_exp", "qwen4_exp_text"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
)
WITH_GATES = ("beam",)
WITH_OTHER_TOKENIZERS = ("biogpt", "cpmant", "ctrl", "gpt_neox_japanese", "xlm")
OF_2023 = ("RefinedWeb", "RefinedWebModel")

KEEPS_STATES = (
    "has layers that keep a state in place of keys and values in another way than those that are served: they are not "
    "computed"
)
WHY_REFUSED: Mapping[tuple[str, ...], str] = {
    ENCODERS: (
        "is an encoder: it reads text in both directions and cannot continue it; to embed or classify with it, use "
        "sentence-transformers or text-embeddings-inference"
    ),
    ENCODER_DECODERS: (
        "is an encoder-decoder: it rewrites one text as another and cannot continue it; use transformers for it"
    ),
    WITH_IMAGES: (
        "reads images or sound beside text, and only text is read here; use a text model of its lineage, or a server "
        "for images"
    ),
    WITH_LATENTS: "has latent attention (MLA), whose keys and values are one vector for all heads: it is not computed",
    WITH_STATES: KEEPS_STATES,
    ("llama4", "llama4_text"): (
        "attends within chunks of 8,192 positions, and its routers weigh what experts read: that is not computed"
    ),
    ("deepseek_v4",): "attends to compressed keys and values: they are not computed",
    WITH_GATES: "multiplies what attention gives by gates of its input (as BEAM does): that is not computed",
    WITH_OTHER_TOKENIZERS: "has a tokenizer that only Python code of transformers reads",
    ("gemma4_assistant", "gemma4_unified_assistant"): "drafts for a Gemma 4, whose keys and values it reads",
    ("blt",): "reads bytes in patches that another model finds: that is not computed",
    ("dbrx",): "has all experts of a layer in one matrix: they are not read",
    ("diffllama",): "subtracts one attention from another: that is not computed",
    ("doge",): "attends to keys that a mask of its own chooses: that is not computed",
    ("dory", "hrm_text"): "runs its layers several times for each token: that is not computed",
    ("jetmoe",): "has attention whose heads are experts: it is not computed",
    ("kolibri1",): "adds corrections to logits of its routers, not to scores: that is not computed",
    ("mimo_v2_flash",): "has values of another size than its keys: they are not computed",
    ("sarvam_moe",): "is new in transformers, and not computed yet",
    ("modernbert-decoder",): "has a layer of its own between its blocks and its head: it is not computed",
    ("reformer",): "attends within buckets of keys that are alike: that is not computed",
    ("xlnet",): "predicts tokens in any order, with positions of each pair of tokens: that is not computed",
    ("phimoe",): "chooses each expert by a softmax of its own (SparseMixer): it is not computed",
    ("bitnet",): "has ternary weights, and norms inside attention and feed-forward: they are not computed",
    OF_2023: "is Falcon in the format of its own code: use its present files, whose model_type is falcon",
}
