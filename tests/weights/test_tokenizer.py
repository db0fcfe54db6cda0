"""The ids are those of `tokenizers` and `transformers` for every text, or the tokenizer is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GPT2Tokenizer

import weights.tokenizer
from weights.errors import TokenizerError
from weights.tokenizer import LONG_WHITESPACE, Tokenizer
from weights.vocabulary import Vocabulary


def bytes_to_symbols() -> list[str]:
    """Return the characters GPT-2's tokenizer files write the 256 bytes with."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


FRAGMENTS = st.sampled_from(
    [
        *("<|endoftext|>", "<|pad|>", "<a>", "<b>", "cat", "'s", "'ll", "'", "''re", "'S", "a" * 130, "ab" * 70, "!?"),
        *(" ", "  ", "   ", "\n", "\r\n", "\t", "\x00", "\x1c", "\u0085", "\u00a0", "\u200b", "\u3000", "\ufffd"),
        *("e\u0301", "\u00bd", "\u0661", "\u017f", "日本", "👩\u200d👩\u200d👧"),
    ]
)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXT = st.lists(FRAGMENTS | UNICODE, max_size=10).map("".join)
SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reference_for(folder: Path) -> tokenizers.Tokenizer:
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.encode_special_tokens = True
    return reference


@SETTINGS
@given(text=TEXT)
def test_plain_text_has_the_ids_of_tokenizers(tokenizer: Tokenizer, trained: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == trained.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


@SETTINGS
@given(text=TEXT)
def test_vocab_and_merges_have_the_ids_of_transformers(
    two_files: Path, transformers_two_files: GPT2Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer.open(two_files)
    assert tokenizer.encode(text) == transformers_two_files(text, split_special_tokens=True).input_ids


@pytest.fixture(scope="module")
def transformers_two_files(two_files: Path) -> GPT2Tokenizer:
    return GPT2Tokenizer(vocab=str(two_files / "vocab.json"), merges=str(two_files / "merges.txt"))


@SETTINGS
@given(text=TEXT)
def test_special_tokens_are_found_when_asked_for(one_file: Path, text: str) -> None:
    reference = reference_for(one_file)
    reference.encode_special_tokens = False
    assert Tokenizer.open(one_file).encode_with_special(text) == reference.encode(text, add_special_tokens=False).ids


@SETTINGS
@given(text=TEXT)
def test_added_tokens_that_are_not_special_are_always_found(with_added_tokens: Path, text: str) -> None:
    reference = reference_for(with_added_tokens)
    tokenizer = Tokenizer.open(with_added_tokens)
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


@SETTINGS
@given(text=TEXT)
def test_special_tokens_never_come_from_plain_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(f"{text}<|endoftext|>{text}"))


@pytest.mark.parametrize("layout", ["one_file", "two_files"])
def test_every_id_stands_for_its_bytes(
    layout: str, trained: tokenizers.Tokenizer, request: pytest.FixtureRequest
) -> None:
    tokenizer = Tokenizer.open(request.getfixturevalue(layout))
    vocab = trained.get_vocab(with_added_tokens=True)
    assert tokenizer.vocab_size == max(vocab.values()) + 1
    for token_id in vocab.values():
        assert tokenizer.token_bytes(token_id).decode(errors="replace") == trained.decode(
            [token_id], skip_special_tokens=False
        )
    assert tokenizer.max_token_bytes == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert {tokenizer.token_bytes(i) for i in tokenizer.special_ids} == {b"<|endoftext|>", b"<|pad|>"}


@SETTINGS
@given(ids=st.lists(st.integers(0, 419), max_size=20))
def test_any_ids_decode_as_in_tokenizers(tokenizer: Tokenizer, trained: tokenizers.Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == trained.decode(ids, skip_special_tokens=False)


def test_unknown_ids_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size, 2**70)] == [b"", b"", b""]


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\udc00\ud800"])
def test_lone_surrogate_is_refused(tokenizer: Tokenizer, text: str) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_with_special):
        with pytest.raises(TokenizerError, match="text must be valid Unicode, got a lone surrogate"):
            encode(text)


LONG_TEXTS = {
    **{ascii(char): char * 200_000 for char in ("a", " ", "\n", "!", "1", "'", "\u0301")},
    "words": "banana" * 40_000,
    "spaces then a letter": " " * 200_000 + "x",
    "spaces within text": (" " * 200_000 + "cat") * 3,
    "newlines then a letter": "\n" * 200_000 + "x",
    "mixed white space": " \n" * 100_000 + " x",
    "wide spaces": "\u3000" * 200_000 + "\u3000x",
    "runs just too short to be cut": (" " * (LONG_WHITESPACE - 1) + "x") * 12,
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_long_runs_have_the_ids_of_tokenizers(tokenizer: Tokenizer, trained: tokenizers.Tokenizer, text: str) -> None:
    """In linear time: where a step goes over the run for each of its characters, this takes minutes and times out."""
    assert tokenizer.encode(text) == trained.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", [" " * 1_500_000 + "x", "\r\n" * 750_000 + "x" + "\t" * 1_500_000 + "\u00a0"])
def test_runs_of_a_million_spaces_are_encoded(
    one_file: Path, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.open(one_file)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # The control: without the cut the splitter panics, and the panic ends as an error of ours.
    monkeypatch.setattr(weights.tokenizer, "LONG_WHITESPACE", 10_000_000)
    with pytest.raises(TokenizerError, match="cannot be split"):
        Tokenizer.open(one_file).encode(text)
    capfd.readouterr()


@settings(max_examples=400, deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=9),
    texts=st.lists(st.text("abc", max_size=24), min_size=4, max_size=8),
)
def test_merges_give_the_ids_of_tokenizers_or_are_refused(choices: list[tuple[int, int]], texts: list[str]) -> None:
    """Random merges over three letters, unlike trained ones, often join what an earlier one joins otherwise."""
    parts, pairs = ["a", "b", "c"], []
    for left, right in choices:
        pairs.append((parts[left % len(parts)], parts[right % len(parts)]))
        parts.append("".join(pairs[-1]))
    alphabet = dict(zip(bytes_to_symbols(), range(256), strict=True))
    ids = dict.fromkeys([*alphabet, *parts], 0)
    ids |= {symbol: i for i, symbol in enumerate(reversed(ids))}
    tokens = {bytes(alphabet[char] for char in symbol): token_id for symbol, token_id in ids.items()}
    merges = tuple((left.encode(), right.encode()) for left, right in pairs)
    try:
        tokenizer = Tokenizer(Vocabulary("test", tokens, merges, ()))
    except TokenizerError:
        return
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=pairs))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text).ids


@pytest.mark.parametrize(
    ("merges", "reason"),
    [
        ([["x", "yz"]], "a part that no merge makes"),
        ([["x", "y"], ["x", "y"]], "the same token twice"),
        ([["y", "z"], ["x", "y"], ["xy", "z"]], "y and z are joined first"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_merges_that_tiktoken_would_read_otherwise_are_refused(
    tmp_path: Path, tokenizer_json: str, merges: list[list[str]], reason: str
) -> None:
    raw = json.loads(tokenizer_json)
    raw["model"]["merges"] = merges
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(
        TokenizerError, match="must make a new token of two that the merges before it leave side by side"
    ):
        Tokenizer.open(tmp_path)


def test_vocabulary_without_a_byte_is_refused(tmp_path: Path, tokenizer_json: str) -> None:
    raw = json.loads(tokenizer_json)
    del raw["model"]["vocab"]["Q"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match="the vocabulary must have the token b'Q'"):
        Tokenizer.open(tmp_path)


def test_special_token_that_text_could_give_is_refused(tmp_path: Path, two_files: Path) -> None:
    shutil.copytree(two_files, tmp_path, dirs_exist_ok=True)
    exclamation = json.loads((two_files / "vocab.json").read_text())["!"]
    config = {"added_tokens_decoder": {str(exclamation): {"content": "!", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="special token '!' must not be one that plain text can give"):
        Tokenizer.open(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(storyteller: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text((storyteller / name).read_text())
    num_ids = Tokenizer.of_model(tmp_path).vocab_size
    config = json.loads((storyteller / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": num_ids - 1}))
    with pytest.raises(TokenizerError, match=f"must be below config.json's vocab_size {num_ids - 1}, got"):
        Tokenizer.of_model(tmp_path)
