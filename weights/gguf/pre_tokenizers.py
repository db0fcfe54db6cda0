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
_HAN_OF_CODER = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
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
_OF_CODER = tuple(map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OF_CODER)))
_OF_FALCON = ({"type": "Punctuation", "behavior": "Contiguous"}, _GPT2, {**_DIGITS, "individual_digits": False})

SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "granite-docling"), _OF_GPT2),
    **dict.fromkeys(("mpt", "olmo"), _OF_NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _OF_DIGITS),
    "command-r": Splitting((_DIGITS, _GPT2), normalizer=_NFC),
    "falcon": Splitting((*_OF_FALCON, _split("[0-9][0-9][0-9]"))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting((_split(_LLAMA3), _BYTES))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _OF_DEEPSEEK3),
    "deepseek-coder": Splitting((*_OF_CODER, _DIGITS, _BYTES)),
    "seed-coder": Splitting((_split(_SEED), _BYTES)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), Splitting((_split(_QWEN2), _BYTES))),
    "tekken": Splitting((_split(_TEKKEN), _BYTES), ignores_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Splitting((_split(_GPT4O), _BYTES))),
    "bloom": Splitting((_split(_BLOOM), _BYTES)),
}
