from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers.info import load_tokenizer_info


def test_a_tokenizer_is_described_by_its_configuration(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "model_max_length": 10**30,
        "name_or_path": "/home/me/model",
        "vocab_file": "/home/me/vocab.json",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer_info(tmp_path) == {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": None,
        "model_max_length": 10**30,
    }


def test_a_tokenizer_without_a_configuration_has_a_class(tmp_path: Path) -> None:
    assert load_tokenizer_info(tmp_path) == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="must hold a JSON object"):
        load_tokenizer_info(tmp_path)
