"""The tokenizer's training and the packing of rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gptserve.weights.storyteller.recipe.data import (
    END_ID,
    END_OF_TEXT,
    Packer,
    encoded_stories,
    save_tokenizer,
    train_tokenizer,
)
from gptserve.weights.storyteller.recipe.generator import stories, story


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(vocab_size=600, num_stories=200)


def numbered(lengths: list[int]) -> itertools.cycle[list[int]]:
    return itertools.cycle([[number + 1] * (length - 1) + [END_ID] for number, length in enumerate(lengths)])


def test_end_of_text_is_the_only_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id(END_OF_TEXT) == END_ID
    assert [token.content for token in tokenizer.get_added_tokens_decoder().values()] == [END_OF_TEXT]
    assert tokenizer.get_vocab_size() == 600


def test_training_twice_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(vocab_size=600, num_stories=200).to_str() == tokenizer.to_str()


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in (story("held_out", 0).text, "naïve 日本語 🙂 \t\r\n  x", "'s 'T 12"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_saved_files_agree(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, context_length=64)
    text = story("held_out", 1).text
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == tokenizer.encode(text).ids
    assert not list(tmp_path.glob("*.partial"))


def test_encoded_stories_are_the_training_split_in_order(tokenizer: Tokenizer) -> None:
    for found, ids in zip(stories("train", 300), encoded_stories(tokenizer), strict=False):
        assert ids[-1] == END_ID
        assert END_ID not in ids[:-1]
        assert tokenizer.decode(ids[:-1]) == found.text


def test_rows_hold_whole_stories_and_fit() -> None:
    lengths = [5, 9, 14, 7, 30, 12]
    packer = Packer(numbered(lengths), seed=3, pool_size=8)
    for row in packer.rows(200, length=40):
        assert len(row) <= 40
        assert row[-1] == END_ID
        for number, run in itertools.groupby(row):
            if number != END_ID:
                assert len(list(run)) == lengths[number - 1] - 1


def test_packing_wastes_little(tokenizer: Tokenizer) -> None:
    rows = Packer(encoded_stories(tokenizer), seed=1).rows(100, length=1024)
    assert sum(map(len, rows)) > 0.85 * 100 * 1024


def test_some_rows_begin_with_end_of_text_and_some_do_not() -> None:
    rows = Packer(numbered([10]), seed=1, pool_size=4).rows(100, length=40)
    assert 20 < sum(row[0] == END_ID for row in rows) < 80


def test_same_seed_packs_the_same_rows() -> None:
    first, second = (Packer(numbered([5, 9, 14]), seed=7, pool_size=4).rows(20, length=40) for _ in range(2))
    assert first == second
