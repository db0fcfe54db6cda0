"""Tokenizer files: both layouts are read alike, and what would change ids is refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weights.errors import TokenizerError
from weights.tokenizer import Tokenizer
from weights.vocabulary import AddedToken, load_vocabulary


def test_both_layouts_give_the_same_vocabulary(one_file: Path, two_files: Path) -> None:
    one, two = load_vocabulary(one_file), load_vocabulary(two_files)
    assert (one.tokens, one.merges) == (two.tokens, two.merges)
    assert set(one.added) == set(two.added) == {AddedToken(0, "<|endoftext|>", True), AddedToken(1, "<|pad|>", True)}


def test_tokenizer_json_wins_over_the_older_layout(one_file: Path, two_files: Path, tmp_path: Path) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    shutil.copy(one_file / "tokenizer.json", tmp_path)
    assert load_vocabulary(tmp_path).file_name == str(tmp_path / "tokenizer.json")


def test_merges_written_as_strings_are_the_same(one_file: Path, tmp_path: Path) -> None:
    raw = json.loads((one_file / "tokenizer.json").read_text())
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert load_vocabulary(tmp_path).merges == load_vocabulary(one_file).merges


def test_configured_tokens_of_the_older_layout_are_read(two_files: Path, tmp_path: Path) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    entry = {"content": "<new>", "special": False, "lstrip": False, "normalized": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"500": entry}}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 500}))
    assert AddedToken(500, "<new>", False) in load_vocabulary(tmp_path).added
    assert Tokenizer.open(tmp_path).encode("a<new>")[-1] == 500


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"must hold tokenizer\.json, or vocab\.json and merges\.txt"):
        load_vocabulary(tmp_path)


def change(*keys: Any, to: Any) -> Callable[[Any], None]:
    def spoil(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = to

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("model", "type", to="Unigram"), r"model\.type must be 'BPE' in a GPT-2 tokenizer, got 'Unigram'"),
        (change("model", "dropout", to=0.1), r"model\.dropout must be None or 0 .* got 0\.1"),
        (change("model", "ignore_merges", to=True), r"model\.ignore_merges must be False .* got True"),
        (change("model", "byte_fallback", to=True), r"model\.byte_fallback must be False"),
        (change("model", "end_of_word_suffix", to="</w>"), r"model\.end_of_word_suffix .* got '</w>'"),
        (change("normalizer", to={"type": "NFC"}), r"normalizer must be None .* got \{'type': 'NFC'\}"),
        (change("pre_tokenizer", "type", to="Sequence"), r"pre_tokenizer\.type must be 'ByteLevel' .* got 'Sequence'"),
        (change("pre_tokenizer", "add_prefix_space", to=True), r"pre_tokenizer\.add_prefix_space must be False"),
        (change("pre_tokenizer", "use_regex", to=False), r"pre_tokenizer\.use_regex must be True"),
        (change("pre_tokenizer", to=None), "pre_tokenizer must be an object, got None"),
        (
            change("post_processor", to={"type": "TemplateProcessing"}),
            r"post_processor\.type must be None or 'ByteLevel'",
        ),
        (change("decoder", "type", to="WordPiece"), r"decoder\.type must be 'ByteLevel'"),
        (change("model", to=[]), r"model must be an object, got \[\]"),
        (change("model", "merges", to={}), r"model\.merges must be a list"),
        (change("model", "merges", 0, to="a b c"), "a merge must be two tokens, got"),
        (change("model", "merges", 0, to=[1, 2]), r"a merge must be two tokens, got \[1, 2\]"),
        (change("model", "vocab", "a", to="7"), "the id of 'a' must be an integer of at least 0, got '7'"),
        (change("model", "vocab", "a", to=-1), "the id of 'a' must be an integer of at least 0, got -1"),
        (change("model", "vocab", "a", to=0), "must have an id of its own, and one only, got 0"),
        (change("added_tokens", to=3), "added_tokens must be a list, got 3"),
        (change("added_tokens", 0, to="x"), "an added token must be an object, got 'x'"),
        (change("added_tokens", 0, "id", to=None), "the id of an added token must be an integer"),
        (change("added_tokens", 0, "content", to=""), "an added token must have content and special"),
        (change("added_tokens", 0, "id", to=1), "two added tokens share an id"),
        (
            change("added_tokens", 0, "lstrip", to=True),
            r"lstrip of added token '<\|endoftext\|>' must be false, got True",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_would_change_ids_is_refused_by_name(
    spoil: Callable[[Any], None], message: str, tokenizer_json: str, tmp_path: Path
) -> None:
    raw = json.loads(tokenizer_json)
    spoil(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space must be false, got True"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}, "id of an added token"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ("added_tokens.json", {"<new>": 500}, "'<new>' must also be in tokenizer_config.json"),
    ],
)
def test_older_layout_with_unclear_added_tokens_is_refused(
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject, tokenizer_json: str, tmp_path: Path) -> None:
    raw = json.loads(tokenizer_json)
    place = data.draw(
        st.sampled_from([raw, raw["model"], raw["pre_tokenizer"], raw["decoder"], raw["added_tokens"][0]])
    )
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with contextlib.suppress(TokenizerError):
        Tokenizer.open(tmp_path)
