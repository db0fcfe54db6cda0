"""Tokenizer files are read, and what is broken or would change ids or texts is refused by name."""

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

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.tokenizers.vocabulary import load_vocabulary
from tests.weights.tiny_tokenizers import FAMILIES, change


def test_tokenizer_json_wins_over_the_older_layout(one_file: Path, two_files: Path, tmp_path: Path) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    shutil.copy(one_file / "tokenizer.json", tmp_path)
    assert load_vocabulary(tmp_path).file_name == str(tmp_path / "tokenizer.json")


def test_merges_written_as_strings_are_the_same(one_file: Path, tmp_path: Path) -> None:
    raw = json.loads((one_file / "tokenizer.json").read_text())
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert load_vocabulary(tmp_path).merges == load_vocabulary(one_file).merges


@pytest.mark.parametrize("files", [(), ("tokenizer.model",)])
def test_folder_without_a_tokenizer_is_refused_with_a_way_out(files: tuple[str, ...], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(TokenizerError, match=r"must hold tokenizer\.json, .* merges\.txt; .*save_pretrained"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("model", "type", to="WordPiece"), r"model\.type must be 'BPE' or 'Unigram', got 'WordPiece'"),
        (change("model", "dropout", to=0.1), r"model\.dropout must be None or 0, got 0\.1"),
        (change("model", "ignore_merges", to=1), r"model\.ignore_merges must be a bool, got 1"),
        (change("model", to=[]), r"model must be an object, got \[\]"),
        (change("model", "merges", to={}), r"model\.merges must be a list"),
        (change("model", "merges", 0, to="a b c"), "a merge must be two tokens, got 'a b c'"),
        (change("model", "merges", 0, to=[1, 2]), r"a merge must be two tokens, got \[1, 2\]"),
        (change("model", "vocab", "a", to="7"), "the id of 'a' must be an integer of at least 0, got '7'"),
        (change("model", "vocab", "a", to=-1), "the id of 'a' must be an integer of at least 0, got -1"),
        (change("model", "vocab", "a", to=0), "must have an id of its own, got 0"),
        (change("model", "type", to="Unigram"), r"model\.vocab must list pairs of a new token and a score, got \{"),
        (
            change("model", to={"type": "Unigram", "vocab": [["a", 0], ["a", 0]]}),
            r"new token and a score, got \['a', 0\]",
        ),
        (change("decoder", to=None), "decoder must be an object, got None"),
        (change("decoder", "type", to="WordPiece"), r"decoder must be ByteLevel, .* got \{'type': 'WordPiece'"),
        (change("decoder", to={"type": "Sequence"}), "decoder must be ByteLevel, .* got None"),
        (
            change("decoder", to={"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 2}]}),
            "Strip of one leading space, got",
        ),
        (change("added_tokens", to=3), "added_tokens must be a list, got 3"),
        (change("added_tokens", 0, to="x"), "an added token must be an object, got 'x'"),
        (change("added_tokens", 0, "id", to=None), "the id of an added token must be an integer"),
        (change("added_tokens", 0, "content", to=""), "an added token must have content"),
        (
            change("added_tokens", 0, "special", to="yes"),
            r"flags of added token '<\|endoftext\|>' must be bools, got 'yes'",
        ),
        (change("added_tokens", 0, "id", to=1), r"added token '<\|endoftext\|>' must come once and have id 0, got 1"),
        (change("added_tokens", 0, "content", to="<new>"), "added token '<new>' must come once and have id 460, got 0"),
        (change("added_tokens", 1, "content", to="<|endoftext|>"), "must come once and have id 0, got 1"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_broken_or_would_change_ids_is_refused_by_name(
    spoil: Callable[[Any], None], message: str, tokenizer_json: str, tmp_path: Path
) -> None:
    raw = json.loads(tokenizer_json)
    spoil(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.open(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", ["gpt2", "llama2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama3", "xglm"))]
)
def test_any_value_anywhere_is_read_or_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = FAMILIES[name]().to_str()

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        raw = json.loads(text)
        parts = [raw[key] for key in ("model", "pre_tokenizer", "decoder", "post_processor", "normalizer") if raw[key]]
        place = data.draw(st.sampled_from([raw, *parts, raw["added_tokens"][0]]))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
        with contextlib.suppress(TokenizerError):
            Tokenizer.open(tmp_path).encode_prompt("The cat")

    check()
    capfd.readouterr()  # the panics of `tokenizers`
