"""For every family, ids and texts are those of `transformers`, and the bytes of tokens add up to the text."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gptserve.server.text.output import Detokenizer
from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers.tiktoken_encoder import TiktokenEncoder
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.tokenizers.vocabulary import load_vocabulary
from tests.weights.tiny_tokenizers import BY_LIBRARY, FAMILIES

FRAGMENTS = st.sampled_from(
    [
        *("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|eot_id|>", "<s>", "</s>", "<unk>", "<tool_call>", "<0x41>"),
        *("<|extratoken_1|>", "<|extratoken_12|>", "cat", " The", "HELLO", "'s", "'ll", "'", "''re", "'S", "don't"),
        *("a" * 130, "ab" * 70, "anana", "ZZZ", "batab", "!?", "...", " .", "(", "|", "//\n", "1", "12345", " 7", "½"),
        *(" ", "  ", "   ", " " * 24, " " * 50, "\n", "\r\n", "\n\n ", "\t", "\x00", "\x1c", "\u0085", "\u00a0"),
        *("\u200b", "\u2028", "\u3000", "\ufeff", "\ufffd", "▁", "▁▁", "Ġ", "é", "e\u0301", "o\u0308\u0323"),
        *("\u1112\u1161\u11ab", "\u212b", "\u0661", "\u017f", "'\u017f", "İ", "ß", "ﬁ"),
        *("日本", "。", "، ", "👩\u200d👩\u200d👧", "🏴\u200d☠️", "\U00011de0"),
    ]
)  # fmt: skip
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXT = st.lists(FRAGMENTS | UNICODE, max_size=10).map("".join)
SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Family:
    """A tiny tokenizer of a family, and transformers' of the same folder."""

    name: str
    tokenizer: Tokenizer
    reference: PreTrainedTokenizerFast

    def plain(self, text: str) -> list[int]:
        return self.reference(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def decode(self, ids: list[int]) -> str:
        return self.reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def as_transformers(self, text: str) -> str:
        """Return our decoded text without what transformers drops at its ends."""
        if self.name in ("llama2", "mistral", "xglm"):
            return text.removeprefix(" ")
        return text.removesuffix(" ") if self.name == "gpt1" else text


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(tokenizer_object=FAMILIES[request.param]()).save_pretrained(folder)
    return Family(request.param, Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.mark.some(2)
@SETTINGS
@given(text=TEXT)
def test_plain_text_and_prompts_have_the_ids_of_transformers(family: Family, text: str) -> None:
    if family.name == "xglm":  # its pieces hold "</s>", which transformers cannot be asked to read as text
        assume(not any(token in text for token in ("<s>", "</s>", "<unk>", "<pad>")))
    ids = family.tokenizer.encode(text)
    assert ids == family.plain(text)
    assert family.tokenizer.encode_prompt(text) == family.reference(text, split_special_tokens=True).input_ids


@pytest.mark.some(2)
@SETTINGS
@given(text=TEXT)
def test_special_tokens_are_found_when_asked_for(family: Family, text: str) -> None:
    ids = family.tokenizer.encode_with_special(text)
    assert ids == family.reference(text, add_special_tokens=False, split_special_tokens=False).input_ids


@pytest.mark.some(2)
@SETTINGS
@given(text=TEXT)
def test_special_tokens_never_come_from_plain_text_and_no_token_holds_too_much(family: Family, text: str) -> None:
    unknown = {family.tokenizer.encode_with_special("<unk>")[0]} if family.name in ("xglm", "gpt1") else set()
    ids = family.tokenizer.encode(f"{text}<|endoftext|></s>{text}")
    assert set(ids).isdisjoint(family.tokenizer.special_ids - unknown)
    assert len(text.encode()) <= len(ids) * family.tokenizer.max_token_bytes


@pytest.mark.some(2)
@SETTINGS
@given(text=TEXT, start=TEXT)
def test_streamed_text_is_the_text_and_what_transformers_decodes(family: Family, start: str, text: str) -> None:
    prompt, ids = family.tokenizer.encode(start), family.tokenizer.encode(text)
    detokenizer = Detokenizer()
    streamed = "".join(detokenizer.decode(family.tokenizer.token_bytes(token)) for token in ids) + detokenizer.decode(
        b"", True
    )
    assert streamed == family.tokenizer.decode(ids)
    assert family.as_transformers(streamed) == family.decode(ids)
    assert family.as_transformers(family.tokenizer.decode(prompt) + streamed) == family.decode(prompt + ids)


def test_every_id_adds_its_bytes_to_the_text(family: Family) -> None:
    tokenizer, vocab = family.tokenizer, family.reference.get_vocab()
    (anchor,) = [vocab[text] for text in ("a</w>", "a") if text in vocab][:1]
    assert tokenizer.vocab_size == max(vocab.values()) + 1
    for token, token_id in vocab.items():
        if token.startswith("<0x"):
            assert tokenizer.token_bytes(token_id) == bytes([int(token[3:5], 16)])
        else:
            ids = [anchor, token_id, anchor]
            assert family.as_transformers(tokenizer.decode(ids)) == family.decode(ids)
    assert [tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size, 2**70)] == [b"", b"", b""]


@pytest.mark.some(5)
@SETTINGS
@given(data=st.data())
def test_any_ids_decode_as_in_transformers(family: Family, data: st.DataObject) -> None:
    """But for bytes that are no UTF-8 in sentencepiece-style vocabularies, where their U+FFFD cannot be streamed."""
    ids = data.draw(st.lists(st.integers(0, family.tokenizer.vocab_size - 1), max_size=20))
    if family.name in ("llama2", "mistral", "gemma"):
        ids = [token for token in ids if len(family.tokenizer.token_bytes(token)) != 1 or token < 3]
    if family.name == "xglm":
        ids = [family.tokenizer.encode("a")[-1], *ids]
    assert family.as_transformers(family.tokenizer.decode(ids)) == family.decode(ids)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\udc00\ud800"])
def test_lone_surrogate_is_refused(tokenizer: Tokenizer, text: str) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_with_special, tokenizer.encode_prompt):
        with pytest.raises(TokenizerError, match="text must be valid Unicode, got a lone surrogate"):
            encode(text)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama2"])
def test_the_library_is_imported_only_where_it_is_needed(name: str, tmp_path: Path) -> None:
    FAMILIES[name]().save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys; from pathlib import Path; from gptserve.weights.tokenizers.tokenizer import Tokenizer\n"
        "Tokenizer.open(Path(sys.argv[1])).encode('text'); print('tokenizers' in sys.modules, 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=root, timeout=60
    )
    assert result.stdout.split() == [str(name in {"gpt_neox", *BY_LIBRARY}), "False"], result.stderr


def test_threads_do_not_disturb_one_another(family: Family) -> None:
    text = "The cat </s><|endoftext|> sat on 123 mats.\n" * 20
    calls = [family.tokenizer.encode, family.tokenizer.encode_with_special, family.tokenizer.encode_prompt] * 10
    expected = [call(text) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda call: call(text), calls)) == expected


def test_the_file_is_followed_where_transformers_has_rules_of_its_own(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=FAMILIES["llama2"]()).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    by_file, by_class = PreTrainedTokenizerFast.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    for text, is_equal in (("The cat", True), (" The cat", False)):
        expected = by_file(text).input_ids
        assert Tokenizer.open(tmp_path).encode_prompt(text) == expected
        assert (by_class(text).input_ids == expected) is is_equal


def write_with_vocab_size(storyteller: Path, folder: Path, vocab_size: int) -> Path:
    """Write storyteller's tokenizer beside the configuration of a model of this size."""
    config = json.loads((storyteller / "config.json").read_text())
    (folder / "tokenizer.json").write_text((storyteller / "tokenizer.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    return folder


def test_a_tokenizer_of_another_model_is_refused(storyteller: Path, tmp_path: Path) -> None:
    own = json.loads((storyteller / "tokenizer.json").read_text())["model"]["vocab"].values()
    assert max(own) + 1 < Tokenizer.open(storyteller).vocab_size

    with pytest.raises(TokenizerError) as refused:
        Tokenizer.of_model(write_with_vocab_size(storyteller, tmp_path, max(own)))

    assert str(refused.value) == (
        f"{tmp_path}: the tokenizer's ids must be below config.json's vocab_size {max(own)}, got {max(own)}: they "
        "belong to different models"
    )


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["gemma", "llama2", "qwen", "bloom", "gpt2"])
def test_a_model_may_lack_added_tokens(name: str, storyteller: Path, tmp_path: Path) -> None:
    reference = FAMILIES[name]()
    num_ids = reference.get_vocab_size()
    reference.add_special_tokens(["<image_soft_token>"])
    write_with_vocab_size(storyteller, tmp_path, num_ids)
    reference.save(str(tmp_path / "tokenizer.json"))

    tokenizer = Tokenizer.of_model(tmp_path)

    assert tokenizer.vocab_size == num_ids + 1
    assert tokenizer.encode_with_special("a<image_soft_token>")[-1] == num_ids
    assert num_ids not in tokenizer.encode("a<image_soft_token>")
    tokenizer.close()


def test_added_tokens_that_are_not_special_are_always_found(with_added_tokens: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(with_added_tokens / "tokenizer.json"))
    reference.encode_special_tokens = True
    tokenizer = Tokenizer.open(with_added_tokens)

    @SETTINGS
    @given(st.lists(st.sampled_from(["<a>", "<a><b>", "<b>", "  ", " ", "cat", "c", "<", "<|pad|>"])).map("".join))
    def check(text: str) -> None:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.slow
def test_the_fingerprint_changes_with_what_a_token_stands_for_and_with_nothing_else(storyteller: Path) -> None:
    vocabulary = load_vocabulary(storyteller)
    encoder = TiktokenEncoder.recognise(vocabulary)
    assert encoder is not None
    (first, data), (second, other) = list(vocabulary.token_bytes.items())[:2]
    exchanged = vocabulary.token_bytes | {first: other, second: data}
    backwards = dict(reversed(vocabulary.token_bytes.items()))
    fingerprint = Tokenizer.open(storyteller).fingerprint
    assert Tokenizer(replace(vocabulary, token_bytes=backwards, merges=[]), encoder, 1).fingerprint == fingerprint
    assert Tokenizer(replace(vocabulary, token_bytes=exchanged), encoder, 1).fingerprint != fingerprint
    assert Tokenizer(replace(vocabulary, added=()), encoder, 1).fingerprint != fingerprint, (
        "special tokens have no text"
    )
