"""vocab.json with merges.txt means what GPT2Tokenizer of transformers makes of it; other classes' files are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Tokenizer

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.tokenizers.vocabulary import AddedToken, load_vocabulary
from tests.weights.tiny_tokenizers import FAMILIES, byte_level

FRAGMENTS = st.sampled_from(
    ["</s>", "<s>", "<|endoftext|>", "<new>", "The cat", "'s", "  ", "\n", "日本", "\u0301", "12"]
)
TEXT = st.lists(FRAGMENTS | st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=8).map("".join)

AS_OBJECT = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"},
        {
            "add_eos_token": True,
            "add_bos_token": True,
            "bos_token": "<s>",
            "eos_token": {**AS_OBJECT, "content": "</s>"},
        },
        {
            "added_tokens_decoder": {"460": {"content": "<new>", "special": False}},
            "bos_token": None,
            "eos_token": "</s>",
        },
        {"bos_token": None, "add_bos_token": True, "additional_special_tokens": ["<s>"]},
    ],
    ids=["OPT", "both ends", "an added token", "nothing added"],
)
def test_older_files_have_the_ids_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    byte_level(special=("<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>")).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = Tokenizer.open(tmp_path), GPT2Tokenizer.from_pretrained(tmp_path)

    @given(TEXT)
    def check(text: str) -> None:
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.encode_prompt(text) == reference(text, split_special_tokens=True).input_ids
        special = reference(text, add_special_tokens=False, split_special_tokens=False).input_ids
        assert tokenizer.encode_with_special(text) == special

    check()


def test_both_layouts_give_the_same_vocabulary(one_file: Path, two_files: Path) -> None:
    one, two = load_vocabulary(one_file), load_vocabulary(two_files)
    assert (one.ids, one.merges, one.token_bytes) == (two.ids, two.merges, two.token_bytes)
    assert set(one.added) == set(two.added) == {AddedToken(0, "<|endoftext|>", True), AddedToken(1, "<|pad|>", True)}


def test_special_tokens_map_counts_for_files_that_list_no_added_tokens(two_files: Path, tmp_path: Path) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|pad|>"}}))
    assert Tokenizer.open(tmp_path).encode_prompt("")[0] == 1


def test_files_of_gpt1_are_refused_with_a_way_out(tmp_path: Path) -> None:
    FAMILIES["gpt1"]().model.save(str(tmp_path))
    with pytest.raises(
        TokenizerError, match=r"must be GPT-2's, got those of GPT-1; .*from_pretrained.*save_pretrained"
    ):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Qwen2Tokenizer"},
            "must be GPT-2's, got those of 'Qwen2Tokenizer'",
        ),
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space must be false, got True"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "y"}}},
            "id of an added token must be an integer of at least 0, got 'x'",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": 7}}, "must be a string or have content, got 7"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ("tokenizer_config.json", {"additional_special_tokens": "<s>"}, "additional_special_tokens a list"),
        ("tokenizer_config.json", {"bos_token": ["<s>"]}, r"must be a string or have content, got \['<s>'\]"),
        (
            "tokenizer_config.json",
            {"bos_token": "<none>", "add_bos_token": True},
            "bos_token must be in the vocabulary as add_bos_token is true, got '<none>'",
        ),
        ("added_tokens.json", {"<new>": 500}, "'<new>' of added_tokens.json must also be in tokenizer_config.json"),
    ],
)
def test_what_is_unclear_is_refused_by_name(
    name: str, content: Any, message: str, two_files: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        load_vocabulary(tmp_path)


def test_merges_that_are_not_utf8_are_refused(two_files: Path, tmp_path: Path) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\n\xff \xfe\n")
    with pytest.raises(TokenizerError, match=r"merges\.txt could not be read as UTF-8"):
        load_vocabulary(tmp_path)
