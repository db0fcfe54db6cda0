"""The id of the end of text is that of transformers, wherever a folder names it; an answer ends there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from gptserve.engine.request import FinishReason
from gptserve.weights import json_file
from gptserve.weights.errors import TokenizerError
from gptserve.weights.families import load_config
from gptserve.weights.special_tokens import eos_token_id
from tests.engine.runs import make_engine, make_request, run
from tests.weights.tiny_tokenizers import FAMILIES

END, PAD = "<|endoftext|>", "<|pad|>"
DECODER = {"added_tokens_decoder": {"1": {"content": PAD, "special": True}, "0": {"content": END, "special": True}}}
MAP = "special_tokens_map.json"


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(params=["added tokens at once", "added tokens far behind"])
def folder(request: pytest.FixtureRequest, one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "added tokens far behind":
        monkeypatch.setattr(json_file, "HEAD_BYTES", 99)
    shutil.copy(one_file / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"eos_token": None}}, None),
        ({"tokenizer_config.json": {"eos_token": PAD}}, 1),
        ({"tokenizer_config.json": {"eos_token": {"content": PAD, "__type": "AddedToken"}}}, 1),
        ({"tokenizer_config.json": {"eos_token": END, **DECODER}}, 0),
        ({"tokenizer_config.json": {"eos_token": END}, MAP: {"eos_token": PAD}}, 1),
        ({"tokenizer_config.json": {"eos_token": END, **DECODER}, MAP: {"eos_token": PAD}}, 0),
        ({"tokenizer_config.json": {}, MAP: {"eos_token": {"content": PAD, "lstrip": False}}}, 1),
    ],
)
def test_the_id_is_that_of_transformers(folder: Path, files: dict[str, Any], expected: int | None) -> None:
    from transformers import PreTrainedTokenizerFast

    write(folder, files)
    assert PreTrainedTokenizerFast.from_pretrained(folder).eos_token_id == expected
    assert eos_token_id(folder) == expected


@pytest.mark.parametrize("family", ["llama2", "gemma", "xglm"])
def test_a_token_of_the_vocabulary_need_not_be_among_the_added_ones(tmp_path: Path, family: str) -> None:
    described = json.loads(FAMILIES[family]().to_str())
    write(tmp_path, {"tokenizer.json": {**described, "added_tokens": []}, "tokenizer_config.json": {"eos_token": "he"}})
    assert eos_token_id(tmp_path) == LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("he")


def test_the_older_files_end_with_gpt2s_token_unless_they_say_another(two_files: Path, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    for config, token in (({}, END), ({"eos_token": PAD}, PAD)):
        shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
        write(tmp_path, {"tokenizer_config.json": config})
        expected = GPT2Tokenizer.from_pretrained(tmp_path).eos_token_id
        assert eos_token_id(tmp_path) == expected == json.loads((tmp_path / "vocab.json").read_text())[token]


def test_a_token_that_the_model_lacks_ends_nothing(folder: Path) -> None:
    assert eos_token_id(write(folder, {"tokenizer_config.json": {"eos_token": "<|no such|>"}})) is None


def test_a_folder_without_a_tokenizer_has_no_id(tmp_path: Path) -> None:
    assert eos_token_id(tmp_path) is None
    assert eos_token_id(write(tmp_path, {"tokenizer_config.json": {"eos_token": END}})) is None


@pytest.mark.parametrize("value", [5, ["x"], {"content": 3}, {"text": "x"}])
def test_an_end_that_is_no_token_is_refused(folder: Path, value: object) -> None:
    write(folder, {"tokenizer_config.json": {"eos_token": value}})
    reason = f"{folder}: eos_token must be a string or have content, got {value!r}"
    with pytest.raises(TokenizerError, match=f"^{re.escape(reason)}$"):
        eos_token_id(folder)


@pytest.fixture
def unnamed(storyteller: Path, tmp_path: Path) -> Path:
    """Storyteller, whose end of text only tokenizer_config.json names."""
    shutil.copytree(storyteller, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("recipe", "*.py"))
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    return write(tmp_path, {"config.json": {**config, "eos_token_id": None}})


def test_an_answer_ends_where_only_the_tokenizer_says_so(unnamed: Path) -> None:
    engine = make_engine(unnamed)
    assert engine.info.eos_token_ids == (0,)

    outputs = run(engine, [make_request("r", [0], temperature=0.0, max_tokens=600, ignore_eos=False)])["r"]

    assert outputs[-1].finish_reason is FinishReason.STOP


def test_the_end_of_the_tokenizer_comes_beside_those_of_the_other_files(unnamed: Path) -> None:
    config = json.loads((unnamed / "config.json").read_text())
    for given, expected in ((7, (7, 0)), ([7, 0], (7, 0)), (0, (0,))):
        write(unnamed, {"config.json": {**config, "eos_token_id": given}})
        assert load_config(unnamed).eos_token_ids == expected
    tokenizer = json.loads((unnamed / "tokenizer_config.json").read_text())
    beyond = {"added_tokens_decoder": {"2030": {"content": END}}}
    write(unnamed, {"tokenizer_config.json": tokenizer | beyond})
    assert load_config(unnamed).eos_token_ids == (0,)
