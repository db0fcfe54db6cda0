"""What sentence-transformers' files say, and in which words others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.pooling import Pooling, TextVector, load_default_prompt, load_text_vector

MODELS = "sentence_transformers.models"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{MODELS}.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{MODELS}.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{MODELS}.Normalize"}
FLAGS = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}


def write(folder: Path, modules: object, pooling: dict[str, Any] | None = None) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {**FLAGS, "pooling_mode_lasttoken": True}))
    return folder


def test_without_files_it_is_the_last_state_normalised(tmp_path: Path) -> None:
    assert load_text_vector(tmp_path) == TextVector("last", normalizes=True)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({**FLAGS, "word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({**FLAGS, "pooling_mode_mean_tokens": True}, "mean"),
        ({**FLAGS, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_pooling_is_that_of_the_file(tmp_path: Path, config: dict[str, Any], pooling: Pooling) -> None:
    write(tmp_path, [TRANSFORMER, POOLING], config)
    assert load_text_vector(tmp_path) == TextVector(pooling, normalizes=False)
    write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], config)
    assert load_text_vector(tmp_path) == TextVector(pooling, normalizes=True)


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([TRANSFORMER], None, "modules.json must list a Pooling, got none"),
        ([TRANSFORMER, POOLING, {"type": "x.Dense", "path": "2_Dense"}], None, "got .Dense. in .2_Dense."),
        ([TRANSFORMER, POOLING], {**FLAGS, "pooling_mode_max_tokens": True}, r"out of last.*got ..max.."),
        ([TRANSFORMER, POOLING], FLAGS, r"1_Pooling/config.json must set one pooling .*got \[\]"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mean", "include_prompt": False}, "include_prompt must be true"),
    ],
)
def test_other_modules_are_refused(tmp_path: Path, modules: object, pooling: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_text_vector(write(tmp_path, modules, pooling))


@pytest.mark.parametrize("where", ["../1_Pooling", "/etc", "..", "a/b", 7])
def test_a_module_lies_in_the_folder(tmp_path: Path, where: object) -> None:
    with pytest.raises(InvalidConfigError, match="each module must have a type and the name of a folder"):
        load_text_vector(write(tmp_path, [TRANSFORMER, {**POOLING, "path": where}]))


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(InvalidConfigError, match=r"modules\.json"):
        load_text_vector(tmp_path)


def test_texts_that_would_become_chats_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [TRANSFORMER, POOLING])
    config = tmp_path / "sentence_bert_config.json"
    config.write_text(json.dumps({"max_seq_length": 32, "modality_config": {"text": {}}}))
    assert load_text_vector(tmp_path) == TextVector("last", normalizes=False)
    config.write_text(json.dumps({"modality_config": {"text": {}, "message": {"format": "flat"}}}))
    with pytest.raises(UnsupportedModelError) as refused:
        load_text_vector(tmp_path)
    rule = "modality_config must not have message, by which texts become chats; without it they stay as they are"
    assert str(refused.value) == f"sentence_bert_config.json: {rule}, got ['text', 'message']"


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        ({}, None),
        ({"prompts": {"query": "Q: "}, "default_prompt_name": None}, None),
        ({"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}, "Q: "),
        ({"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "document"}, None),
    ],
)
def test_a_default_prompt_is_read(tmp_path: Path, config: dict[str, Any], prompt: str | None) -> None:
    assert load_default_prompt(tmp_path) is None
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert load_default_prompt(tmp_path) == prompt


@pytest.mark.parametrize("prompts", [None, {}, {"query": 1}])
def test_a_default_prompt_must_be_there(tmp_path: Path, prompts: object) -> None:
    config = {"prompts": prompts, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfigError) as refused:
        load_default_prompt(tmp_path)
    rule = "default_prompt_name must name one of prompts, got 'query'"
    assert str(refused.value) == f"config_sentence_transformers.json: {rule}"
