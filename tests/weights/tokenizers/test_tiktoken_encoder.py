"""tiktoken encodes the vocabularies it recognises with the ids of `tokenizers`, and no text slows or breaks it."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers.library_encoder import LibraryEncoder
from gptserve.weights.tokenizers.tiktoken_encoder import GPT2, SPACES, TiktokenEncoder, _any_of
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.tokenizers.vocabulary import byte_symbols, load_vocabulary
from tests.weights.tiny_tokenizers import BY_LIBRARY, FAMILIES, change

SPLITS = ("gpt2", "llama3", "qwen", "gpt_oss")  # one family for each pattern


def write(folder: Path, tokenizer: tokenizers.Tokenizer | str) -> Path:
    text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
    (folder / "tokenizer.json").write_text(text)
    return folder


@pytest.mark.some(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_tiktoken_encodes_the_families_of_its_own_kind(name: str, tmp_path: Path) -> None:
    encoder = TiktokenEncoder.recognise(load_vocabulary(write(tmp_path, FAMILIES[name]())))
    assert (encoder is None) == (name in BY_LIBRARY)


def test_the_embedded_model_is_encoded_by_tiktoken(storyteller: Path) -> None:
    assert TiktokenEncoder.recognise(load_vocabulary(storyteller)) is not None


PIECES = ["'s", "'LL", " The", "cat", "  ", "\n", "\r\n", "\t", " 12345", "!?", "//\n", "日本", "e\u0301", "\u3000"]
RANDOM_TEXTS = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*SPLITS, "storyteller"])
def test_random_texts_have_the_ids_of_tokenizers(name: str, storyteller: Path, tmp_path: Path) -> None:
    folder = storyteller if name == "storyteller" else write(tmp_path, FAMILIES[name]())
    encoder = TiktokenEncoder.recognise(load_vocabulary(folder))
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert encoder is not None

    @settings(max_examples=2 * settings().max_examples)
    @given(RANDOM_TEXTS.map("".join))
    def check(text: str) -> None:
        assert encoder.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids

    check()


LONG_TEXTS = {
    **{ascii(char): char * 100_000 for char in ("a", " ", "\n", "!", "1", "'", "\u0301", "\u3000")},
    "words": "banana" * 20_000,
    "spaces, then more": " ".join([" " * 50_000, "x" + " " * 50_000, "1" + "\n" * 50_000 + ".", " " * 50_000]),
    "mixed white space": " \n" * 50_000 + " x",
    "letters of two cases": "日" * 20_000 + "A" * 60_000 + "aA" * 20_000,
    "punctuation": "." * 50_000 + "  x" + "( " * 30_000 + "x" + "!/" * 20_000,
    "apostrophes": "'s'S'll" * 10_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_long_runs_have_the_ids_of_tokenizers(name: str, tmp_path: Path) -> None:
    """In linear time: where a step goes over the run for each of its characters, this takes minutes and times out."""
    reference = FAMILIES[name]()
    tokenizer = Tokenizer.open(write(tmp_path, reference))
    for label, text in LONG_TEXTS.items():
        assert tokenizer.encode(text) == reference.encode_batch_fast([text], add_special_tokens=False)[0].ids, label


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "gpt2" else pytest.mark.slow) for n in (*SPLITS, "gpt_bigcode", "bloom")],
)
def test_runs_of_a_million_spaces_are_encoded(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, FAMILIES[name]()))
    text = " " * 1_100_000 + "x" + "\t" * 1_100_000 + "1"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_strides_a_million_spaces_are_too_many(capfd: pytest.CaptureFixture[str]) -> None:
    """The control of the test above."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    bpe = tiktoken.Encoding("control", pat_str=GPT2 + SPACES, mergeable_ranks=ranks, special_tokens={})
    with pytest.raises(BaseException, match="StackOverflow"):
        bpe.encode_ordinary(" " * 1_100_000 + "x")
    capfd.readouterr()


PARTS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=9)
TEXTS = st.lists(st.text("abc", max_size=24), min_size=4, max_size=8)


def check_merges(tokens: list[str], merges: list[tuple[str, str]], texts: list[str], **model: Any) -> bool:
    """Compare the ids of the texts; return whether tiktoken takes these merges."""
    ids = {symbol: i for i, symbol in enumerate(dict.fromkeys([*byte_symbols(), *tokens]))}
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges, **model))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = tokenizers.decoders.ByteLevel()
    encoder = TiktokenEncoder.recognise(vocabulary_of(reference))
    for text in texts if encoder else ():
        assert encoder.encode(text) == reference.encode(text).ids
    return encoder is not None


def vocabulary_of(reference: tokenizers.Tokenizer) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return load_vocabulary(write(Path(folder), reference))


@settings(max_examples=3 * settings().max_examples)
@given(choices=PARTS, texts=TEXTS)
def test_merges_give_the_ids_of_tokenizers_or_are_left_to_it(choices: list[tuple[int, int]], texts: list[str]) -> None:
    """Random merges over three letters often make a token of other halves than training would."""
    parts, pairs = ["a", "b", "c"], []
    for left, right in choices:
        pairs.append((parts[left % len(parts)], parts[right % len(parts)]))
        parts.append("".join(pairs[-1]))
    check_merges(parts, list(dict.fromkeys(pairs)), texts)


@settings(max_examples=3 * settings().max_examples)
@given(tokens=st.lists(st.text("abc", min_size=2, max_size=5), max_size=14, unique=True), texts=TEXTS)
def test_any_vocabulary_with_every_split_listed_is_taken(tokens: list[str], texts: list[str]) -> None:
    """Also one that no training would make."""
    rank = {token: i for i, token in enumerate(["a", "b", "c", *tokens])}
    splits = [(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))]
    listed = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
    listed.sort(key=lambda pair: (rank["".join(pair)], rank[pair[0]], rank[pair[1]]))
    assert check_merges(tokens, listed, texts, ignore_merges=True)
    check_merges(tokens, listed[1:], texts, ignore_merges=True)  # an incomplete list is checked, too


def test_all_short_texts_agree_where_one_token_has_many_splits() -> None:
    tokens = ["ab", "ba", "aba", "bab", "aa", "aab", "abab", "babab"]
    rank = {token: i for i, token in enumerate(["a", "b", *tokens])}
    splits = [(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))]
    listed = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
    texts = ["".join(letters) for length in range(9) for letters in itertools.product("ab", repeat=length)]
    assert check_merges(tokens, listed, texts, ignore_merges=True)


def swap_merges(raw: Any) -> None:
    raw["model"]["merges"].sort(key=lambda pair: "".join(pair))


def swap_ids(raw: Any) -> None:
    """Give the tokens of the first and the last merge each other's ids."""
    vocab, merges = raw["model"]["vocab"], raw["model"]["merges"]
    first, last = "".join(merges[0]), "".join(merges[-1])
    vocab[first], vocab[last] = vocab[last], vocab[first]


def merge_another_character(raw: Any) -> None:
    """Add a merge of characters that stand for no byte: its token looks like the bytes of a text."""
    for token in ("日", "本", "日本"):
        raw["model"]["vocab"][token] = len(raw["model"]["vocab"])
    raw["model"]["merges"].append(["日", "本"])


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.some(8)
@pytest.mark.parametrize(
    "spoil",
    [
        swap_merges,
        swap_ids,
        merge_another_character,
        change("model", "ignore_merges", to=True),
        change("model", "byte_fallback", to=True),
        change("model", "continuing_subword_prefix", to="##"),
        change("model", "end_of_word_suffix", to="</w>"),
        lambda raw: raw["model"].update(continuing_subword_prefix="", end_of_word_suffix="</w>"),
        change("normalizer", to={"type": "NFKC"}),
        change("pre_tokenizer", "add_prefix_space", to=True),
        change("pre_tokenizer", "use_regex", to=False),
        change("pre_tokenizer", to=None),
        change(
            "pre_tokenizer", to={"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}
        ),
        change("pre_tokenizer", to={"type": "Sequence", "pretokenizers": []}),
        change("post_processor", to={"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2]}),
        change("post_processor", to={**TEMPLATE, "single": []}),
        change("post_processor", to={**TEMPLATE, "single": [SEQUENCE, SEQUENCE]}),
        change("post_processor", to={**TEMPLATE, "single": [SEQUENCE, {"SpecialToken": {"id": "?"}}]}),
        change("post_processor", to={**TEMPLATE, "single": [{"SpecialToken": {"id": "?"}}, SEQUENCE]}),
        change("decoder", to={"type": "BPEDecoder", "suffix": "</w>"}),
        change("added_tokens", 0, "lstrip", to=True),
        change("added_tokens", 0, "single_word", to=True),
    ],
)
def test_any_other_vocabulary_is_left_to_the_library(
    spoil: Callable[[Any], None], tokenizer_json: str, tmp_path: Path
) -> None:
    raw = json.loads(tokenizer_json)
    assert TiktokenEncoder.recognise(load_vocabulary(write(tmp_path, json.dumps(raw)))) is not None
    spoil(raw)
    assert TiktokenEncoder.recognise(load_vocabulary(write(tmp_path, json.dumps(raw)))) is None


@pytest.mark.parametrize("symbol", ["Q", byte_symbols()[0xC0]])
def test_vocabulary_without_one_of_the_bytes_is_left_to_the_library(
    symbol: str, tokenizer_json: str, tmp_path: Path
) -> None:
    raw = json.loads(tokenizer_json)
    vocab = raw["model"]["vocab"]
    gap = vocab.pop(symbol)
    raw["model"]["vocab"] = {token: i - (i > gap) for token, i in vocab.items()}
    reference = tokenizers.Tokenizer.from_str(json.dumps(raw))
    assert TiktokenEncoder.recognise(load_vocabulary(write(tmp_path, json.dumps(raw)))) is None
    text = "naïve 日本 Q"
    assert Tokenizer.open(tmp_path).encode(text) == reference.encode(text).ids


def test_special_token_that_text_could_give_is_left_to_the_library(tokenizer_json: str, tmp_path: Path) -> None:
    raw = json.loads(tokenizer_json)
    raw["added_tokens"].append({**raw["added_tokens"][0], "content": "!", "id": raw["model"]["vocab"]["!"]})
    assert TiktokenEncoder.recognise(load_vocabulary(write(tmp_path, json.dumps(raw)))) is None


class PanicException(BaseException):
    """What pyo3 makes of a panic in Rust."""


class Panicking:
    def encode_ordinary(self, text: str) -> list[int]:
        raise PanicException("index out of bounds")


def test_a_text_on_which_the_library_panics_is_refused(tokenizer: Tokenizer) -> None:
    encoder = copy.copy(tokenizer._encoder)
    encoder._bpe = Panicking()  # type: ignore
    with pytest.raises(TokenizerError, match=r"^text has no tokens: 'index out of bounds'$"):
        encoder.encode("The cat")


def test_of_added_tokens_the_leftmost_is_found_and_of_those_the_longest() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        texts = {"".join(draw.choices("ab|.", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 8))}
        text = "".join(draw.choices("ab|.", k=60))
        found = re.findall(_any_of(list(texts)), text)
        assert found == re.findall("|".join(map(re.escape, sorted(texts, key=len, reverse=True))), text)


@pytest.mark.parametrize(
    "added",
    [
        [f"<{number}>" for number in range(10_001)],
        ["<" + "a" * 100 + ">"],
    ],
    ids=["many", "long"],
)
def test_added_tokens_beyond_all_published_are_found_by_the_library(
    tokenizer_json: str, tmp_path: Path, added: list[str]
) -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer_json)
    library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    assert isinstance(tokenizer._encoder, LibraryEncoder)
    assert tokenizer.encode("The " + added[-1]) == library.encode("The " + added[-1]).ids


def test_tokens_that_take_long_to_recognise_are_left_to_the_library(tokenizer_json: str, tmp_path: Path) -> None:
    raw = json.loads(tokenizer_json)
    token, vocab = "a", raw["model"]["vocab"]
    for _ in range(16):
        raw["model"]["merges"].append([token, token])
        token *= 2
        vocab.setdefault(token, len(vocab))
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.open(tmp_path)
    assert isinstance(tokenizer._encoder, LibraryEncoder)
    assert tokenizer.encode(token) == [vocab[token]]
