"""Tokenizers in GGUF: the ids of the tokenizer.json that they were made from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.weights.gguf.written import write_tokenizer
from tests.weights.tiny_tokenizers import CORPUS, FAMILIES

KINDS = {
    "gpt2": "gpt-2",
    "gpt_bigcode": "starcoder",
    "bloom": "bloom",
    "llama3": "llama-bpe",
    "qwen": "qwen2",
    "tekken": "tekken",
    "llama2": None,
    "gemma": None,
}
NUM_TEXTS = 300


@pytest.mark.parametrize("name", KINDS)
def test_the_ids_are_those_of_the_original(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = FAMILIES[name]()
    (tmp_path / "original").mkdir()
    original.save(str(tmp_path / "original" / "tokenizer.json"))
    write_tokenizer(original, tmp_path / "file.gguf", pre=KINDS[name])
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
