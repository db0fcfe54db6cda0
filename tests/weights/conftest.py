"""A byte-level BPE trained on the spot, in both layouts a model folder may have it in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

import gptserve.weights.tokenizers.tokenizer
from tests.weights.tiny_tokenizers import byte_level


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    """The reference: `tokenizers`' own encoder, special tokens not looked for in text."""
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="session")
def one_file(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json."""
    folder = tmp_path_factory.mktemp("one_file")
    trained.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tokenizer(one_file: Path) -> gptserve.weights.tokenizers.tokenizer.Tokenizer:
    return gptserve.weights.tokenizers.tokenizer.Tokenizer.open(one_file)


@pytest.fixture(scope="session")
def two_files(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.json and merges.txt, its ids in another order than its merges."""
    folder = tmp_path_factory.mktemp("two_files")
    trained.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|pad|>"}))
    return folder


@pytest.fixture(scope="session")
def with_added_tokens(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json with added tokens that are not special; some begin with others."""
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.add_tokens([AddedToken(text) for text in ("<a>", "<a><b>", "  ", "   ", "cat")])
    folder = tmp_path_factory.mktemp("added")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tokenizer_json(one_file: Path) -> str:
    """The text of a good tokenizer.json, to be spoilt."""
    text = (one_file / "tokenizer.json").read_text()
    assert json.loads(text)["model"]["merges"]
    return text
