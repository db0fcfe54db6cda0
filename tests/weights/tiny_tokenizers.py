"""A tiny tokenizer of every family, trained on the spot: with the steps and flags of its published tokenizer.json.

Where tests outside this folder need a tokenizer of a family, too, they take it from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "The cat sat on the mat, and they'll say it's 1000 years old; we're sure I'd've known.",
    "    def f(x):\n        return x  # two\n\n\n\tand\ttabs\r\n",
    "héllo wörld, ünïcödé Ελληνικά кириллица 日本語 한국어 🙂🙃👩\u200d👩\u200d👧 ½ ⅷ ١٢٣",
    "aaaaaaaa bbbb abababab banana bandana HELLO Hello CamelCase don't DON'T 1234567 12 345",
    "e\u0301 o\u0308 ... !!! ?? (x) [y] <|z|> / // \\ 。、，",  # noqa: RUF001
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NANOCHAT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001
SPECIAL = ("<|endoftext|>", "<|pad|>")


def byte_level(
    *splitters: pre_tokenizers.PreTokenizer, special: tuple[str, ...] = SPECIAL, nfc: bool = False, size: int = 460
) -> Tokenizer:
    """Train a byte-level BPE with these steps before the bytes (none: GPT-2's)."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    uses_regex = not any(isinstance(splitter, pre_tokenizers.Split) for splitter in splitters)
    steps = [*splitters, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=uses_regex)]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer, special=list(special), vocab_size=size, initial_alphabet=alphabet)
    return tokenizer


def words(texts: list[str]) -> Tokenizer:
    """Return a byte-level tokenizer of these tokens alone, without merges."""
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(tokenizer: Tokenizer, trainer: Callable[..., trainers.Trainer], special: list[str], **options: Any) -> None:
    tokens = [AddedToken(text, special=True, normalized=False) for text in special]
    tokenizer.train_from_iterator(CORPUS * 3, trainer(special_tokens=tokens, show_progress=False, **options))


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """Return the tokenizer that its changed tokenizer.json describes."""
    raw = json.loads(tokenizer.to_str())
    change(raw)
    return Tokenizer.from_str(json.dumps(raw))


def from_tiktoken(pattern: str, special: tuple[str, ...], odd_tokens: tuple[str, ...]) -> Tokenizer:
    """Return what transformers' TikTokenConverter makes: every split of a token is a merge, whole pieces come first.

    `odd_tokens` are tokens such as Llama 3 has, that merging their bytes does not lead to.
    """

    def convert(raw: dict[str, Any]) -> None:
        trained = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
        trained[300:300] = [token for token in odd_tokens if token not in trained]
        ids = {token: i for i, token in enumerate(trained)}
        merges = []
        for token in trained:
            splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            splits = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
            merges += sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        raw["model"] |= {"vocab": ids, "merges": merges, "ignore_merges": True}

    tokenizer = changed(byte_level(split(pattern), special=()), convert)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def with_template(tokenizer: Tokenizer, single: str) -> Tokenizer:
    """Return the tokenizer with a template such as "<s> $A"."""
    names = [name for name in single.split() if name != "$A"]
    template = processors.TemplateProcessing(
        single=single, special_tokens=[(name, tokenizer.token_to_id(name)) for name in names]
    )
    if tokenizer.post_processor is not None:
        template = processors.Sequence([tokenizer.post_processor, template])
    tokenizer.post_processor = template
    return tokenizer


def with_runs_of_spaces(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with added tokens as GPT-NeoX and Phi have them: not special, looked for when normalized."""
    tokenizer.add_tokens([AddedToken(" " * length, normalized=True) for length in range(24, 1, -1)])
    return tokenizer


def sentencepiece(normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    """Train a BPE of characters in which bytes stand in for the characters it lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    train(tokenizer, trainers.BpeTrainer, special=["<unk>", "<s>", "</s>"], vocab_size=250, limit_alphabet=60)

    def insert_bytes(raw: dict[str, Any]) -> None:
        trained = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
        tokens = [*trained[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *trained[3:]]
        raw["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}

    tokenizer = changed(tokenizer, insert_bytes)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def llama2() -> Tokenizer:
    replaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = sentencepiece(replaced, None)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return with_template(tokenizer, "<s> $A")


def mistral() -> Tokenizer:
    tokenizer = sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    tokenizer.decoder = llama2().decoder
    return with_template(tokenizer, "<s> $A")


def gemma() -> Tokenizer:
    splitter = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return with_template(sentencepiece(normalizers.Replace(" ", "▁"), splitter), "<s> $A")


def xglm() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    train(tokenizer, trainers.UnigramTrainer, special=special, vocab_size=150, unk_token="<unk>")
    return with_template(tokenizer, "</s> $A")


def gpt1() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    train(tokenizer, trainers.BpeTrainer, special=["<unk>"], vocab_size=300, end_of_word_suffix="</w>")
    return tokenizer


def gptj() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(f"<|extratoken_{i}|>") for i in (1, 2, 12)])
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = byte_level(split(QWEN), nfc=True, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return tokenizer


def llama3() -> Tokenizer:
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    return with_template(
        from_tiktoken(LLAMA3, special, ("anana", "Ġbatab", "ZZ", "ZZZ", "QQQ")), "<|begin_of_text|> $A"
    )


FAMILIES: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt1": gpt1,
    "gpt2": byte_level,
    "gptj": gptj,
    "opt": lambda: with_template(byte_level(special=("<s>", "<pad>", "</s>", "<unk>")), "</s> $A"),
    "gpt_neox": lambda: with_runs_of_spaces(byte_level(nfc=True, special=("<|endoftext|>", "<|padding|>"))),
    "gpt_bigcode": lambda: byte_level(
        pre_tokenizers.Digits(individual_digits=True), special=("<|endoftext|>", "<fim>")
    ),
    "phi": lambda: with_runs_of_spaces(byte_level()),
    "bloom": lambda: byte_level(split(BLOOM), special=("<unk>", "<s>", "</s>", "<pad>")),
    "llama3": llama3,
    "qwen": qwen,
    "gpt_oss": lambda: from_tiktoken(
        O200K, ("<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>"), ("QQQ", "QQ")
    ),
    "nanochat": lambda: from_tiktoken(NANOCHAT, ("<|bos|>", "<|user_start|>", "<|user_end|>"), ()),
    "llama2": llama2,
    "mistral": mistral,
    "tekken": lambda: with_template(from_tiktoken(TEKKEN, ("<unk>", "<s>", "</s>"), ()), "<s> $A"),
    "gemma": gemma,
    "xglm": xglm,
}
BY_LIBRARY = {"gpt1", "llama2", "mistral", "gemma", "xglm", "gpt_bigcode", "bloom"}


def change(*keys: Any, to: Any) -> Callable[[Any], None]:
    def spoil(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = to

    return spoil
