"""The tokenizer's training and the packing of rows."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.storyteller.recipe.chat import Message, conversation
from gptserve.weights.storyteller.recipe.data import (
    CHAT_TEMPLATE,
    END_ID,
    END_OF_TEXT,
    TURN_END,
    Packer,
    Token,
    add_chat_tokens,
    encoded_conversation,
    encoded_conversations,
    encoded_prompt,
    encoded_stories,
    of_like_length,
    save_tokenizer,
    train_tokenizer,
)
from gptserve.weights.storyteller.recipe.generator import stories, story


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(vocab_size=600, num_stories=200)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    grown = Tokenizer.from_str(tokenizer.to_str())
    add_chat_tokens(grown)
    return grown


def ids(row: list[Token]) -> list[int]:
    return [token for token, _ in row]


def learned(tokenizer: Tokenizer, row: list[Token], least: float = 1) -> str:
    """Return the text of the tokens of some weight."""
    return str(tokenizer.decode([token for token, weight in row if weight >= least], skip_special_tokens=False))


def numbered(lengths: list[int]) -> itertools.cycle[list[Token]]:
    stories = [[number + 1] * (length - 1) + [END_ID] for number, length in enumerate(lengths)]
    return itertools.cycle([[(token, 1.0) for token in story] for story in stories])


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
    for found, row in zip(stories("train", 300), encoded_stories(tokenizer), strict=False):
        assert ids(row).index(END_ID) == len(row) - 1
        assert tokenizer.decode(ids(row)[:-1]) == found.text
        assert {weight for _, weight in row} == {1}


def test_rows_hold_whole_stories_and_fit() -> None:
    lengths = [5, 9, 14, 7, 30, 12]
    packer = Packer(numbered(lengths), seed=3, pool_size=8)
    for row in packer.rows(200, length=40):
        assert len(row) <= 40
        assert ids(row)[-1] == END_ID
        for number, run in itertools.groupby(ids(row)):
            if number != END_ID:
                assert len(list(run)) == lengths[number - 1] - 1


def test_packing_wastes_little(tokenizer: Tokenizer) -> None:
    rows = Packer(encoded_stories(tokenizer), seed=1).rows(100, length=1024)
    assert sum(map(len, rows)) > 0.85 * 100 * 1024


def test_some_rows_begin_with_end_of_text_and_some_do_not() -> None:
    rows = Packer(numbered([10]), seed=1, pool_size=4).rows(100, length=40)
    assert 20 < sum(ids(row)[0] == END_ID for row in rows) < 80


def test_same_seed_packs_the_same_rows() -> None:
    first, second = (Packer(numbered([5, 9, 14]), seed=7, pool_size=4).rows(20, length=40) for _ in range(2))
    assert first == second


def test_a_conversation_is_written_as_the_template_does(chat_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    for index in range(30):
        messages = conversation("train", index)
        dicts = [{"role": message.role, "content": message.content} for message in messages]
        text = template.render(dicts, {}, add_generation_prompt=False)
        assert ids(encoded_conversation(chat_tokenizer, messages)) == [*chat_tokenizer.encode(text).ids, END_ID]
        prompt = template.render(dicts[:-1], {})
        assert encoded_prompt(chat_tokenizer, messages[:-1]) == chat_tokenizer.encode(prompt).ids


def test_answers_and_their_ends_are_learned_and_nothing_else(chat_tokenizer: Tokenizer) -> None:
    system, request, answer = Message("system", "Be polite."), Message("user", "a fox"), Message("assistant", "Once.")
    row = encoded_conversation(chat_tokenizer, [system, request, answer])
    assert learned(chat_tokenizer, row) == f"Once.{TURN_END}"


def test_the_end_of_an_answer_that_was_cut_off_is_not_learned(chat_tokenizer: Tokenizer) -> None:
    row = encoded_conversation(chat_tokenizer, [Message("assistant", "Once upon", is_whole=False)])
    assert learned(chat_tokenizer, row) == "Once upon"


def test_what_the_request_decides_weighs_more(chat_tokenizer: Tokenizer) -> None:
    text = "Once a fox named Mia had a kite."
    spans = [(text.index(word), text.index(word) + len(word), heavy) for word, heavy in (("fox", 30), ("Mia had", 5))]
    row = encoded_conversation(chat_tokenizer, [Message("user", "Mia, a fox"), Message("assistant", text, spans)])
    assert learned(chat_tokenizer, row, 30) == " fox"
    assert learned(chat_tokenizer, row, 5) == " fox Mia had"
    assert learned(chat_tokenizer, row) == f"{text}{TURN_END}"


def test_conversations_that_are_too_long_are_left_out(chat_tokenizer: Tokenizer) -> None:
    rows = list(itertools.islice(encoded_conversations(chat_tokenizer, longest=300, kind="talk"), 40))
    assert max(map(len, rows)) <= 300
    assert all(row[-1] == (END_ID, 0) for row in rows)


def test_batches_hold_every_row_once_beside_others_of_about_its_length() -> None:
    rng = random.Random(1)
    rows = [[(number, 1.0)] * rng.randint(20, 400) for number in range(512)]
    batches = list(itertools.islice(of_like_length(itertools.cycle(rows), size=2000, seed=1), 60))
    seen = [row[0] for batch in batches for row in batch]
    assert len(set(seen[:500])) == 500
    assert all(len(batch) > 1 and len(batch) * max(map(len, batch)) <= 2000 for batch in batches)
    assert sum(map(len, itertools.chain(*batches))) > 0.9 * sum(len(batch) * max(map(len, batch)) for batch in batches)
