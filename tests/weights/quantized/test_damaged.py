"""A damaged folder of quantized weights is refused in one sentence, which names what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.errors import InvalidCheckpointError, WeightsError
from gptserve.weights.families import load_config
from tests.parity.models import write_model
from tests.weights.quantized.damaged import DAMAGED, READ
from tests.weights.quantized.formats import FORMATS, LLAMA
from tests.weights.quantized.packers import write_quantized
from tests.weights.quantized.test_quantized import stream

WORDS = Path(__file__).with_name("damaged.json")


def words(message: str, folder: Path) -> str:
    """Return a message without what depends on the place or is safetensors' own."""
    message = message.replace(str(folder), "FOLDER")
    return re.sub("(is not a readable safetensors file: ).*", r"\1...", message)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a format, without damage."""
    done, plain = dict[str, Path](), tmp_path_factory.mktemp("plain")
    write_model(plain, "llama", LLAMA)

    def give(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("model") / "quantized"
            shutil.copytree(plain, done[name])
            write_quantized(done[name], FORMATS[name].section, FORMATS[name].of)
        return done[name]

    return give


def test_a_damaged_folder_is_refused_in_these_words(whole: Callable[[str], Path], tmp_path: Path) -> None:
    told = {}
    for name, (form, damage) in DAMAGED.items():
        folder = Path(shutil.copytree(whole(form), tmp_path / "model"))
        damage(folder)
        try:
            stream(folder)
        except WeightsError as fault:
            told[name] = words(str(fault), folder)
        shutil.rmtree(folder)
    assert told == json.loads(WORDS.read_text(encoding="utf-8"))
    assert len(told) == len(DAMAGED) >= 100


@pytest.mark.parametrize("name", ["gptq: scales that are no numbers", "awq: an infinite scale"])
def test_scales_of_codes_are_finite(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    form, damage = DAMAGED[name]
    folder = Path(shutil.copytree(whole(form), tmp_path / "model"))
    damage(folder)
    checkpoint = Checkpoint(folder, load_config(folder))
    damaged = "blocks.0.ffn_down.weight"
    assert damaged in checkpoint.code_formats
    with pytest.raises(InvalidCheckpointError) as caught:
        list(checkpoint.stream(dtype=torch.float32, device="cpu", coded=checkpoint.code_formats))
    assert str(caught.value) == json.loads(WORDS.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", READ)
def test_a_folder_that_only_looks_damaged_is_read(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    form, change = READ[name]
    folder = Path(shutil.copytree(whole(form), tmp_path / "model"))
    change(folder)
    assert stream(folder).keys() == stream(whole(form)).keys()
