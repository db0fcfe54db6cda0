"""Whatever a model folder holds, a start ends in service or in one sentence, within 30 s of CPU time and 1.5 GiB."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import PreTrainedTokenizerFast

from gptserve.weights.errors import WeightsError
from gptserve.weights.workers import Workers
from tests.parity.models import write_model
from tests.weights.damaged_files import DAMAGED, open_weights, words
from tests.weights.gguf.raw import File
from tests.weights.tiny_tokenizers import FAMILIES

if TYPE_CHECKING:  # many megabytes, which the tests make when they run
    from tests.weights.hostile_folders import Harm

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ eos_token }}"
DAMAGED_WORDS = Path(__file__).with_name("damaged_files.json")
BATCH, NUM_BATCHES = 10, 24
"""Folders that one test opens: a test for each would double what they take."""


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}),
    "llama2": (
        "llama",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"intermediate_size": 24, "max_position_embeddings": 128},
    ),
}
"""From the name of a tiny tokenizer to a family and its sizes."""


@pytest.fixture(scope="module")
def goods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with all files that a model may have, and a tokenizer of tiktoken's kind and one of another."""
    made = {}
    for name, (family, sizes) in MODELS.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        library = FAMILIES[name]()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=TEMPLATE)
        write_model(folder, family, {**sizes, "vocab_size": library.get_vocab_size()})
        tokenizer.save_pretrained(folder)
        (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
        (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 0}')
        assert (folder / "chat_template.jinja").is_file()
    return made


@pytest.fixture(scope="module")
def good(goods: dict[str, Path]) -> Path:
    return goods["gpt2"]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    from tests.weights.hostile_folders import make_workers

    workers = make_workers()
    yield workers
    workers.close()


def outcome(workers: Workers, good: Path, folder: Path, harm: Harm) -> str:
    """Return what came of a folder. Raises ForeignCodeError for an exception that is no refusal, or a passed limit."""
    shutil.copytree(good, folder)
    harm(folder)
    told = str(workers.call(folder=str(folder)))
    shutil.rmtree(folder)
    assert told.startswith(("refused: ", "served: ")), told
    assert "\n" not in told
    assert len(told) < 2000
    return told


def check(workers: Workers, good: Path, tmp_path: Path, harms: dict[str, Harm]) -> dict[str, str]:
    """Return what came of each folder, after all have been opened."""
    told, faults = {}, {}
    for number, (name, harm) in enumerate(harms.items()):
        try:
            told[name] = outcome(workers, good, tmp_path / str(number), harm)
        except Exception as fault:
            faults[name] = repr(fault)
    assert faults == {}
    return told


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama2", marks=pytest.mark.slow)])
def test_a_good_folder_is_served(workers: Workers, goods: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert outcome(workers, goods[name], tmp_path / "copy", lambda folder: None).startswith("served: ")


@pytest.mark.slow
def test_there_are_many_hostile_folders() -> None:
    from tests.weights.hostile_folders import by_hand

    assert BATCH * (NUM_BATCHES - 1) < len(dict(by_hand())) <= BATCH * NUM_BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, BATCH * NUM_BATCHES, BATCH))
def test_a_hostile_folder_is_refused_or_served(workers: Workers, good: Path, tmp_path: Path, first: int) -> None:
    from tests.weights.hostile_folders import by_hand

    check(workers, good, tmp_path, dict(list(dict(by_hand()).items())[first : first + BATCH]))


def test_a_damaged_file_is_refused_in_these_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = {}
    for number, (name, damage) in enumerate(DAMAGED.items()):
        (tmp_path / str(number)).mkdir()
        path = damage(tmp_path / str(number))
        try:
            open_weights(path)
        except WeightsError as fault:
            told[name] = words(str(fault), path)
    assert told == json.loads(DAMAGED_WORDS.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_there_are_many_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(DAMAGED) >= 90
    (tmp_path / "model.gguf").write_bytes(File().data())
    open_weights(tmp_path / "model.gguf")  # the file without damage


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_mutated_folder_is_refused_or_served(
    workers: Workers, goods: dict[str, Path], tmp_path: Path, name: str
) -> None:
    from tests.weights.hostile_folders import mutated

    told = check(workers, goods[name], tmp_path, dict(map(mutated, range(20))))
    assert {text.partition(":")[0] for text in told.values()} == {"refused", "served"}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 200))
@pytest.mark.parametrize("name", MODELS)
def test_many_mutated_folders_are_refused_or_served(
    workers: Workers, goods: dict[str, Path], tmp_path: Path, name: str, first: int
) -> None:
    from tests.weights.hostile_folders import mutated

    check(workers, goods[name], tmp_path, dict(map(mutated, range(first, first + 200))))
