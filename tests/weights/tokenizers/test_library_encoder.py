"""What `tokenizers` cannot read is refused by name, and plain text never gives a special token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers import library_encoder
from gptserve.weights.tokenizers.library_encoder import describe
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.tokenizers.vocabulary import load_vocabulary
from tests.weights.tiny_tokenizers import CORPUS, FAMILIES, change


def description(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(FAMILIES[name]().to_str())
    return raw


def opened(raw: dict[str, Any], folder: Path) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return Tokenizer.open(folder)


def test_merges_do_not_put_a_special_token_together(tmp_path: Path) -> None:
    raw = description("llama2")
    vocab = raw["model"]["vocab"]
    with_merge(raw)
    library = tokenizers.Tokenizer.from_str(json.dumps(raw))
    library.encode_special_tokens = True
    assert vocab["</s>"] in library.encode("x</s>").ids  # the control: left alone, the library does it
    tokenizer = opened(raw, tmp_path)
    assert vocab["</s>"] not in tokenizer.encode("x</s>")
    assert tokenizer.decode(tokenizer.encode("x</s>")) == " x</s>"
    assert tokenizer.encode_with_special("x</s>")[-1] == vocab["</s>"]


def test_a_whole_piece_is_no_special_token(tokenizer_json: str, tmp_path: Path) -> None:
    raw = json.loads(tokenizer_json)
    raw["model"]["ignore_merges"] = True
    exclamation = raw["model"]["vocab"]["!"]
    raw["added_tokens"].append({**raw["added_tokens"][0], "content": "!", "id": exclamation})
    library = tokenizers.Tokenizer.from_str(json.dumps(raw))
    library.encode_special_tokens = True
    assert library.encode("!").ids == [exclamation]  # the control
    tokenizer = opened(raw, tmp_path)
    assert exclamation not in tokenizer.encode("a!")
    assert tokenizer.encode_with_special("a!")[-1] == exclamation


def test_unigram_pieces_do_not_make_a_special_token(tmp_path: Path) -> None:
    raw = description("xglm")
    library = tokenizers.Tokenizer.from_str(json.dumps(raw))
    library.encode_special_tokens = True
    assert library.token_to_id("</s>") in library.encode("x</s>", add_special_tokens=False).ids  # the control
    tokenizer = opened(raw, tmp_path)
    assert library.token_to_id("</s>") not in tokenizer.encode("x</s>")
    assert tokenizer.encode_with_special("x</s>")[-1] == library.token_to_id("</s>")
    assert tokenizer.encode_prompt("x")[0] == library.token_to_id("</s>")


TEXTS = (*CORPUS, "", " ", "a</s>b<s> <unk>", "<|endoftext|> x<fim>y", "</ s></", "\u2581\u2581x\u0000\u00e9<0x0A>")


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma", "bloom", "gpt_bigcode"])
def test_one_model_gives_the_tokens_of_two(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = description(name)

    def told(num_opened: int) -> list[list[int]]:
        opened_before.clear()
        tokenizer = opened(raw, tmp_path)
        assert len(opened_before) == num_opened
        ways = tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_with_special
        return [way(text) for text in TEXTS for way in (*ways, *ways[::-1])]

    opened_before: list[str] = []
    open_library = library_encoder._open
    monkeypatch.setattr(library_encoder, "_open", lambda text: opened_before.append(text) or open_library(text))
    by_one = told(1)
    monkeypatch.setattr(library_encoder, "_never_makes_special", lambda _: False)
    assert by_one == told(2)
    assert len({tuple(ids) for ids in by_one}) > 2 * len(CORPUS), "special tokens are found by one way alone"


def with_merge(raw: dict[str, Any]) -> None:
    vocab = raw["model"]["vocab"]
    for token in ("<", "/", "s", ">", "</", "s>"):
        vocab.setdefault(token, len(vocab))
    raw["model"]["merges"] += [["<", "/"], ["s", ">"], ["</", "s>"]]


def with_special(text: str, **flags: bool) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        token_id = raw["model"]["vocab"].setdefault(text, len(raw["model"]["vocab"]))
        raw["added_tokens"].append({**raw["added_tokens"][0], "content": text, "id": token_id, **flags})

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        with_merge,
        with_special("c"),
        with_special("<0x0A>"),
        with_special("<tool>", special=False),
        change("model", "ignore_merges", to=True),
        change("model", "end_of_word_suffix", to="</s>"),
        change("model", "continuing_subword_prefix", to="<"),
    ],
)
def test_a_model_that_may_make_an_added_token_is_opened_twice(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    raw = description("llama2")
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert describe(load_vocabulary(tmp_path))[1] is None
    spoil(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert describe(load_vocabulary(tmp_path))[1] is not None


@pytest.mark.parametrize(("text", "written"), [("c", "c"), ("<0x01>", "\x01")])
def test_a_special_token_of_one_symbol_is_never_made(text: str, written: str, tmp_path: Path) -> None:
    raw = description("llama2")
    with_special(text)(raw)
    library = tokenizers.Tokenizer.from_str(json.dumps(raw))
    library.encode_special_tokens = True
    special = library.token_to_id(text)
    assert special in library.encode(f"x{written}").ids  # the control
    assert special not in opened(raw, tmp_path).encode(f"x{written}")


def test_byte_level_bpe_out_of_tiktokens_reach_has_the_ids_of_tokenizers(tokenizer_json: str, tmp_path: Path) -> None:
    raw = json.loads(tokenizer_json)
    raw["pre_tokenizer"]["add_prefix_space"] = True
    reference = tokenizers.Tokenizer.from_str(json.dumps(raw))
    tokenizer = opened(raw, tmp_path)
    for text in ("The cat", " The cat", "", "日本\n\n 12"):
        assert tokenizer.encode(text) == reference.encode(text).ids


def test_truncation_and_padding_of_the_file_are_left_out(tmp_path: Path) -> None:
    raw = description("gpt1")
    library = tokenizers.Tokenizer.from_str(json.dumps(raw))
    library.enable_truncation(3)
    library.enable_padding(length=5)
    assert len(opened(json.loads(library.to_str()), tmp_path).encode("one two three four five six seven")) > 5


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("llama2", change("normalizer", to={"type": "Nonsense"}), "the library tokenizers cannot read it: "),
        ("llama2", change("model", "merges", to=[["no", "such"]]), "the library tokenizers cannot read it: .*vocab"),
        ("llama2", change("post_processor", to=7), "the library tokenizers cannot read it: "),
        ("xglm", change("pre_tokenizer", to=None), "pre_tokenizer of a Unigram model must be Metaspace, got None"),
        ("xglm", change("model", "unk_id", to=10**6), "the library tokenizers cannot read it: "),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    name: str, spoil: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    raw = description(name)
    spoil(raw)
    with pytest.raises(TokenizerError, match=message):
        opened(raw, tmp_path)


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    raw = description("xglm")
    raw["model"]["unk_id"] = None
    with pytest.raises(TokenizerError, match=r"text has no tokens: .*unk_id"):
        opened(raw, tmp_path).encode("\U00010000")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "is_bounded"),
    [("llama2", True), ("mistral", True), ("gemma", True), ("bloom", True), ("gpt_bigcode", True), ("xglm", False)],
)
def test_a_bound_is_given_where_no_text_is_dropped(name: str, is_bounded: bool, tmp_path: Path) -> None:
    tokenizer = opened(description(name), tmp_path)
    assert (tokenizer.max_token_bytes < 1000) == is_bounded
    assert len(tokenizer.encode("▁" * 3000)) * tokenizer.max_token_bytes >= 9000


class PanicException(BaseException):
    """What pyo3 makes of a panic in Rust."""


class Failing:
    def __init__(self, fault: BaseException) -> None:
        self.fault = fault

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
        raise self.fault


@pytest.mark.parametrize("fault", [PanicException("index out of bounds"), ValueError("index out of bounds")])
def test_a_text_on_which_the_library_panics_is_refused(tmp_path: Path, fault: BaseException) -> None:
    tokenizer = opened(description("llama2"), tmp_path)
    tokenizer._encoder._plain = Failing(fault)  # type: ignore[attr-defined]
    with pytest.raises(TokenizerError, match=r"^text has no tokens: 'index out of bounds'$"):
        tokenizer.encode("The cat")


def test_what_ends_the_process_is_no_refusal(tmp_path: Path) -> None:
    tokenizer = opened(description("llama2"), tmp_path)
    tokenizer._encoder._plain = Failing(KeyboardInterrupt())  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("The cat")
