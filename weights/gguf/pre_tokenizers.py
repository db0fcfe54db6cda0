"""How texts are split before byte-level BPE, by the names that llama.cpp gives the ways in `tokenizer.ggml.pre`.

Source: llama.cpp's src/llama-vocab.cpp, and for what that leaves out the tokenizer.json of the models themselves. A
name that is not here is refused: another way of splitting gives other tokens. Torch-free. tokenizer.py reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]

_BYTES: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2: Step = {**_BYTES, "use_regex": True}
_DIGITS: Step = {"type": "Digits", "individual_digits": True}

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{}}"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("{}", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED.replace("{}", _ENDINGS + "?") + r"|\p{N}{1,3}" + _CASED_REST
_SEED = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_HAN = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_THREES_FROM_BEHIND = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_HAN_OF_CODER = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    r"\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    r"\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    r"\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}"
    r"\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""Those of DeepSeek LLM, whose list is that of an older Unicode."""
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES_OF_JAIS = "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"
_PHRASES = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|[.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + r"])]+"


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True, slots=True)
class Splitting:
    """The steps of tokenizer.json that come before BPE.

    ignores_merges: a piece that is a token as a whole becomes that token. begins: whether a prompt begins with BOS if
    the file does not say.
    """

    steps: tuple[Step, ...]
    ignores_merges: bool = False
    begins: bool = False
    normalizer: Step | None = None

    def pre_tokenizer(self) -> Step:
        """Return the step of tokenizer.json."""
        return self.steps[0] if len(self.steps) == 1 else {"type": "Sequence", "pretokenizers": list(self.steps)}


_NFC: Step = {"type": "NFC"}
_OF_GPT2 = Splitting((_GPT2,))
_OF_NEOX = Splitting((_GPT2,), normalizer=_NFC)
_OF_DIGITS = Splitting((_DIGITS, _GPT2))
_OF_LLAMA3 = Splitting((_split(_LLAMA3), _BYTES), ignores_merges=True, begins=True)
_OF_QWEN2 = Splitting((_split(_QWEN2), _BYTES), normalizer=_NFC)
_OF_DEEPSEEK3 = Splitting((_split(r"\p{N}{1,3}"), _split(_HAN), _split(_DEEPSEEK), _BYTES))
_OF_GPT4O = (_split(_GPT4O), _BYTES)
_OF_BLOOM = Splitting((_split(_BLOOM), _BYTES))
_MARKS = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_OF_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_OF_CODER,
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
_OF_CODER = tuple(map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OF_CODER)))
_OF_FALCON = ({"type": "Punctuation", "behavior": "Contiguous"}, _GPT2, {**_DIGITS, "individual_digits": False})

SPLITTINGS: Mapping[str, Splitting] = {
    "default": Splitting((*map(_split, _DEFAULT), _BYTES)),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "exaone4", "granite-docling", "a.x-4.0", "jais", "mellum", "trillion"), _OF_GPT2
    ),
    **dict.fromkeys(("mpt", "olmo"), _OF_NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "mellum2", "minerva-7b"), _OF_DIGITS),
    "command-r": Splitting((_DIGITS, _GPT2), normalizer=_NFC),
    "falcon": Splitting((*_OF_FALCON, _split("[0-9][0-9][0-9]"))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Splitting((_split(_LLAMA3), _BYTES))),
    **dict.fromkeys(("glm4", "glm5"), Splitting((_split(_LLAMA3), _BYTES), ignores_merges=True)),
    "minicpm5": Splitting((_split(r"\p{N}{1,3}"), _split(_LLAMA3.replace("{1,3}", "+")), _BYTES), ignores_merges=True),
    "jais-2": Splitting((_split(_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _SPACES_OF_JAIS), _BYTES)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _OF_DEEPSEEK3),
    "afmoe": Splitting((_split(_THREES_FROM_BEHIND), _split(_ASIAN), _split(_DEEPSEEK), _BYTES)),
    "laguna": Splitting((_split(r"\n+"), _split(_QWEN2), _BYTES)),
    "deepseek-llm": Splitting((*map(_split, _OF_LLM), _DIGITS, _BYTES)),
    "deepseek-coder": Splitting((*_OF_CODER, _DIGITS, _BYTES)),
    "seed-coder": Splitting((_split(_SEED), _BYTES)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), _OF_QWEN2),
    "qwen35": Splitting((_split(_MARKS), _BYTES), normalizer=_NFC),
    **dict.fromkeys(
        ("stablelm2", "hunyuan", "grok-2", "kormo", "megrez", "solar-open"), Splitting((_split(_QWEN2), _BYTES))
    ),
    "ufakzeka": Splitting((_split(_QWEN2.removeprefix(_ENDINGS + "|")), _BYTES)),
    "exaone-moe": Splitting((_split(_PHRASES), _BYTES)),
    "tekken": Splitting((_split(_TEKKEN), _BYTES), ignores_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"), Splitting(_OF_GPT4O)),
    **dict.fromkeys(
        ("cohere2moe", "tiny_aya"), Splitting((_split(r"\d{1,3}(?=(?:\d{3})*\b)"), *_OF_GPT4O), normalizer=_NFC)
    ),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _OF_BLOOM),
    "viking": Splitting((_split(_BLOOM), _DIGITS, _BYTES)),
}
