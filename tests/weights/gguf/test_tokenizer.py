"""Tokenizers in GGUF: the ids of the tokenizer.json that they were made from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.weights.gguf.written import write_tokenizer
from tests.weights.tiny_tokenizers import (
    BLOOM,
    CORPUS,
    FAMILIES,
    LLAMA3,
    O200K,
    QWEN,
    byte_level,
    change,
    changed,
    split,
)

SEED = QWEN.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def falcon() -> Library:
    tokenizer = byte_level()
    first = pre_tokenizers.Punctuation(behavior="contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False)
    last = pre_tokenizers.Digits(individual_digits=False), split("[0-9][0-9][0-9]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, *last])
    return tokenizer


def deepseek_coder() -> Library:
    patterns = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
    return byte_level(*map(split, patterns), DIGITS)


def deepseek_llm() -> Library:
    """Return a tokenizer whose words are cased letters as Unicode 11 had them; the texts have no others."""
    patterns = (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    )
    return byte_level(*map(split, patterns), DIGITS)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEFAULT = tuple(map(split, (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}")))
QWEN35 = QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
JAIS2 = LLAMA3.replace(
    r"\s+(?!\S)|\s+",
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}",
)
K_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
MINICPM5 = (split(r"\p{N}{1,3}"), split(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")))
THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
NUMBERS = r"\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{3}|\p{N}+"
ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
KINDS: dict[str, tuple[Callable[[], Library], str | None]] = {
    "gpt2": (FAMILIES["gpt2"], "gpt-2"),
    "gpt_bigcode": (FAMILIES["gpt_bigcode"], "starcoder"),
    "bloom": (FAMILIES["bloom"], "bloom"),
    "llama3": (FAMILIES["llama3"], "llama-bpe"),
    "qwen": (FAMILIES["qwen"], "qwen2"),
    "tekken": (FAMILIES["tekken"], "tekken"),
    "llama2": (FAMILIES["llama2"], None),
    "gemma": (FAMILIES["gemma"], None),
    "gemma 4": (FAMILIES["gemma"], "gemma4"),
    "gpt_neox": (FAMILIES["gpt_neox"], "olmo"),
    "cohere": (lambda: byte_level(DIGITS, nfc=True), "command-r"),
    "falcon": (falcon, "falcon"),
    "glm": (lambda: byte_level(split(LLAMA3)), "glm4"),
    "hunyuan": (lambda: byte_level(split(QWEN)), "hunyuan"),
    "gpt_oss": (lambda: byte_level(split(O200K)), "gpt-4o"),
    "seed": (lambda: byte_level(split(SEED)), "seed-coder"),
    "deepseek v3": (
        lambda: byte_level(split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(DEEPSEEK)),
        "deepseek-v3",
    ),
    "deepseek coder": (deepseek_coder, "deepseek-coder"),
    "deepseek llm": (deepseek_llm, "deepseek-llm"),
    "no name": (lambda: byte_level(*DEFAULT), ""),
    "default": (lambda: byte_level(*DEFAULT), "default"),
    "qwen3.5": (lambda: byte_level(split(QWEN35), nfc=True), "qwen35"),
    "jais 2": (lambda: byte_level(split(JAIS2)), "jais-2"),
    "k-exaone": (lambda: byte_level(split(K_EXAONE)), "exaone-moe"),
    "exaone": (lambda: byte_level(DIGITS), "exaone"),
    "minicpm5": (lambda: changed(byte_level(*MINICPM5), change("model", "ignore_merges", to=True)), "minicpm5"),
    "tiny aya": (lambda: byte_level(split(THREES), split(O200K), nfc=True), "tiny_aya"),
    "afmoe": (lambda: byte_level(split(NUMBERS), split(ASIAN), split(DEEPSEEK)), "afmoe"),
    "laguna": (lambda: byte_level(split(r"[^\n]+|[\n]+"), split(QWEN)), "laguna"),
    "viking": (lambda: byte_level(split(BLOOM), DIGITS), "viking"),
    "ufakzeka": (lambda: byte_level(split(QWEN.partition("|[")[2].join(("[", "")))), "ufakzeka"),
}
NUM_TEXTS = 300


@pytest.mark.some(2)
@pytest.mark.parametrize("name", KINDS)
def test_the_ids_are_those_of_the_original(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make, pre = KINDS[name]
    original = make()
    (tmp_path / "original").mkdir()
    original.save(str(tmp_path / "original" / "tokenizer.json"))
    write_tokenizer(original, tmp_path / "file.gguf", pre=pre)
    expected = Tokenizer.open(tmp_path / "original")
    found = Tokenizer.open(resolve_model(str(tmp_path / "file.gguf")))
    assert found.special_ids == expected.special_ids
    draw, joined = random.Random(0), " ".join(CORPUS)
    texts = [joined[(at := draw.randrange(len(joined))) : at + draw.randrange(60)] for _ in range(NUM_TEXTS)]
    texts += ["", " ", "\n\n", "  a  b", "<s>hi</s>", *CORPUS]
    for text in texts:
        assert found.encode_prompt(text) == expected.encode_prompt(text)
        assert found.encode_with_special(text) == expected.encode_with_special(text)
        ids = expected.encode(text)
        assert [found.token_bytes(token_id) for token_id in ids] == [expected.token_bytes(token_id) for token_id in ids]


def test_a_file_without_a_name_of_its_splitting_is_read_as_llama_cpp_does_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tokenizer(byte_level(), tmp_path / "file.gguf", pre="")
    resolve_model(str(tmp_path / "file.gguf"))
    assert [message.partition(";")[0] for message in caplog.messages] == [
        f"{tmp_path / 'file.gguf'} has no tokenizer.ggml.pre"
    ]
