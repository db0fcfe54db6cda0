"""A tokenizer's own rules run in workers, to the same ids; those of the families that are served run in the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers import worker_encoder
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.tokenizers.vocabulary import Vocabulary, load_vocabulary
from gptserve.weights.tokenizers.worker_encoder import is_known
from gptserve.weights.workers import Limits
from tests.weights.tiny_tokenizers import BLOOM, FAMILIES, LLAMA3, NANOCHAT, O200K, QWEN, TEKKEN

ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
LONG = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}
NAMED = {"type": "Split", "pattern": {"Regex": "[ab]+|c"}, "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}
TIME, MEMORY = "it took more than 1 s of CPU time", "it needed more than 256 MiB of memory"
Describe = Callable[..., Vocabulary]
Open = Callable[..., Tokenizer]


@pytest.fixture
def described(tmp_path: Path) -> Describe:
    """Describe a family's tokenizer with other values of its tokenizer.json."""

    def make(name: str, **changes: object) -> Vocabulary:
        raw = json.loads(FAMILIES[name]().to_str()) | changes
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
        return load_vocabulary(tmp_path)

    return make


@pytest.fixture
def opened(described: Describe, tmp_path: Path) -> Iterator[Open]:
    """Open it."""
    made = []

    def make(name: str, **changes: object) -> Tokenizer:
        described(name, **changes)
        made.append(Tokenizer.open(tmp_path))
        return made[-1]

    yield make
    for tokenizer in made:
        tokenizer.close()


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Limits(cpu_s=1, memory_bytes=2**28, open_memory_bytes=2**28, reply_bytes=2**16)
    monkeypatch.setattr(worker_encoder, "LIMITS", low)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_that_are_served_need_no_worker_unless_a_character_becomes_many(
    described: Describe, name: str
) -> None:
    assert is_known(described(name)) == (name != "xglm")


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+")


@pytest.mark.parametrize("regexes", [
    (GPT2,), (LLAMA3,), (QWEN,), (O200K,), (TEKKEN,), (NANOCHAT,), (NANOCHAT.replace("1,2", "1,3"),), (BLOOM,),
    DEEPSEEK_CODER, (r"[\p{P}\$\+<=>\^~\|`]+", "[0-9][0-9][0-9]", r"\p{N}{1,3}"),
])  # fmt: skip
def test_published_regexes_need_no_worker(described: Describe, regexes: tuple[str, ...]) -> None:
    steps = [{**NAMED, "pattern": {"Regex": regex}} for regex in regexes]
    assert is_known(described("gpt2", pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, BYTES]}))


@pytest.mark.parametrize("regex", [
    r"\s+$", r"\s+\S", "(a+)+$", "a*b", "a+b+", "a+?b", "a{1,99999}", "(?=a+b)", "[a]+|[a]+b", "[[a]b]+", "[a&&b]+",
    "", "[]a]+", ".*", "^a+", r"[\c][a]+", LLAMA3 + "|(a+)+$", "a?a?a?a+",
])  # fmt: skip
def test_any_other_regex_needs_one(described: Describe, regex: str) -> None:
    assert not is_known(described("gpt2", pre_tokenizer={**NAMED, "pattern": {"Regex": regex}}))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": NAMED},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [NAMED, DIGITS]}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 17}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS] * 17}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [
            {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 9000, "tokens": ["<s>"] * 9000}}}},
    ],
)  # fmt: skip
def test_rules_of_its_own_give_the_ids_of_the_library(opened: Open, changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = opened("llama2", **changes)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Aab bAá 12</s>c"
    assert tokenizer.has_workers
    assert tokenizer.encode_with_special(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_with_special(text, template=True) == library.encode(text).ids
    library.encode_special_tokens = True
    assert tokenizer.encode("Aab bAá 12") == library.encode("Aab bAá 12", add_special_tokens=False).ids
    assert tokenizer.encode_prompt("Aab bAá 12") == library.encode("Aab bAá 12").ids
    assert tokenizer.decode(tokenizer.encode("ab")).strip() == "ab"


def test_a_unigram_model_with_long_pieces_has_workers(described: Describe) -> None:
    model = json.loads(FAMILIES["xglm"]().to_str())["model"]
    for length in (256, 257):
        longer = {**model, "vocab": [*model["vocab"], ["a" * length, -9.0]]}
        assert is_known(described("xglm", normalizer=None, model=longer)) == (length == 256)


@pytest.mark.some(1)
@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    ("changes", "text", "cause"),
    [
        ({"pre_tokenizer": ENDLESS}, "a" * 40 + "b", "text has no tokens: "),
        pytest.param(
            {"pre_tokenizer": ENDLESS},
            ("a" * 21 + "b ") * 1000,
            f"{TIME}|text has no tokens: ",
            marks=pytest.mark.slow,
        ),
        ({"normalizer": LONG}, "a" * 2000, MEMORY),
        pytest.param(
            {"normalizer": {"type": "Sequence", "normalizers": [LONG] * 20}}, "a", MEMORY, marks=pytest.mark.slow
        ),
        pytest.param({"normalizer": {"type": "NFKC"}}, "\ufdfa" * 300_000, MEMORY, marks=pytest.mark.slow),
        ({"normalizer": {"type": "Lowercase"}}, "ab" * 50_000, "it made more than 0 MiB"),
    ],
)  # fmt: skip
def test_a_text_that_passes_a_limit_is_refused_and_the_next_is_not(
    opened: Open, changes: dict[str, Any], text: str, cause: str
) -> None:
    tokenizer = opened("llama2", **changes)
    with pytest.raises(TokenizerError, match=rf"^text cannot be encoded: ({cause})"):
        tokenizer.encode(text)
    assert tokenizer.encode("b")


def test_a_tokenizer_that_does_not_open_is_refused(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = rf"^{tmp_path}/tokenizer\.json: the tokenizer does not open: "
    with pytest.raises(TokenizerError, match=refusal + "the library tokenizers cannot read it: "):
        opened("llama2", normalizer={"type": "Nonsense"})
    monkeypatch.setattr(worker_encoder, "LIMITS", Limits(open_memory_bytes=2**25))
    with pytest.raises(TokenizerError, match=refusal + "it needed more than 32 MiB of memory$"):
        opened("llama2", normalizer={**LONG, "content": "a" * 40_000_000})


def test_closing_ends_the_workers(opened: Open) -> None:
    before = set(psutil.Process().children())
    tokenizer = opened("llama2", normalizer={"type": "Lowercase"})
    own = set(psutil.Process().children()) - before
    assert own
    tokenizer.close()
    assert not own & set(psutil.Process().children())
    with pytest.raises(TokenizerError, match="the server is shutting down"):
        tokenizer.encode("a")
