"""The architectures of llama.cpp whose files are not read, each with the reason. Torch-free. architectures.py asks."""

from __future__ import annotations

from collections.abc import Mapping

from gptserve.weights.refused import WHY_REFUSED

MODEL_TYPES = {
    "arwkv7": "rwkv",
    "bailingmoe3": "bailing_hybrid",
    "deepseek2": "deepseek_v2",
    "deepseek2_ocr": "deepseek_ocr2",
    "deepseek32": "deepseek_v32",
    "deepseek4": "deepseek_v4",
    "dots3note": "dots3_note",
    "glm_dsa": "glm_moe_dsa",
    "jina_bert_v2": "bert",
    "jina_bert_v3": "bert",
    "kimi_k3": "kimi_linear",
    "mimo2": "mimo_v2_flash",
    "minimax_01": "minimax",
    "minimax_m3": "minimax_m3_vl",
    "modern_bert": "modernbert",
    "neo_bert": "bert",
    "nomic_bert_moe": "nomic_bert",
    "paddleocr": "paddleocr_vl",
    "plamo2": "mamba",
    "plm": "deepseek_v2",
    "qwen4exp": "qwen4_exp",
    "rwkv6": "rwkv",
    "rwkv6qwen2": "rwkv",
    "rwkv7": "rwkv",
    "step35": "beam",
    "t5encoder": "t5",
}
"""What is refused as a model_type is, by its name with underscores; the others have that of their model_type."""
OF_OWN_CODE = (
    *("arctic", "baichuan", "bailingmoe", "bailingmoe2", "codeshell", "deci", "deepseek", "graniteswitch", "grok"),
    *("grovemoe", "jais", "maincoder", "maple", "nanbeige", "openelm", "orion", "pangu_embedded", "plamo", "plamo3"),
    *("qwen", "refact", "smallthinker", "spark2_5", "talkie"),
)
OWN_REASONS: Mapping[tuple[str, ...], str] = {
    ("clip", "cogvlm"): "is how a model sees, whose text is in another file",
    ("gptj",): "is a name to which llama.cpp has no model: use the model's folder of safetensors",
    OF_OWN_CODE: "is of a model that transformers only computes with the code of its makers, which is never run",
    ("gemma_embedding", "llama_embed"): "reads text in both directions, and cannot continue it",
    ("dream", "llada", "llada_moe", "rnd1"): "fills in the tokens of a text in any order (diffusion)",
    ("dflash", "eagle3"): "drafts for another model, whose states it reads",
    ("pockettts", "qwen3tts", "wavtokenizer_dec"): "makes sound of text",
}
"""By names with underscores."""
_REASONS: Mapping[str, str] = {
    name: why for reasons in (WHY_REFUSED, OWN_REASONS) for names, why in reasons.items() for name in names
}


def why_refused(architecture: str) -> str | None:
    """Return what follows "it"; None for a name that is not llama.cpp's."""
    name = architecture.replace("-", "_")
    return _REASONS.get(MODEL_TYPES.get(name, name))
