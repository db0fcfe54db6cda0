"""Pickled checkpoints become folders that load; hostile ones and incomplete ones end in one sentence and no folder."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.convert import convert
from gptserve.weights.errors import InvalidCheckpointError, InvalidConfigError, ModelNotFoundError
from gptserve.weights.families import load_config
from tests.conftest import MakeGPT2

ARGUMENTS = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "vocab_size": 10, "dropout": 0.0}


def nanogpt_state(bias: bool) -> dict[str, torch.Tensor]:
    """What nanoGPT's GPT has, its head tied to the embedding."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = {"transformer.wte.weight": random(10, 8), "transformer.wpe.weight": random(16, 8)}
    shapes: dict[str, tuple[int, ...]] = {"ln_1": (8,), "attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "ln_2": (8,)}
    shapes |= {"mlp.c_fc": (32, 8), "mlp.c_proj": (8, 32)}
    for layer in range(2):
        for name, shape in shapes.items():
            state[f"transformer.h.{layer}.{name}.weight"] = random(*shape)
            if bias:
                state[f"transformer.h.{layer}.{name}.bias"] = random(shape[0])
    state["transformer.ln_f.weight"] = random(8)
    if bias:
        state["transformer.ln_f.bias"] = random(8)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "bias"),
    [
        ("_orig_mod.", False),
        pytest.param("", True, marks=pytest.mark.slow),
        pytest.param("module.", True, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_nanogpt_becomes_a_model_that_loads(tmp_path: Path, prefix: str, bias: bool) -> None:
    state = {prefix + name: tensor for name, tensor in nanogpt_state(bias).items()}
    saved = {"model": state, "model_args": {**ARGUMENTS, "bias": bias}, "iter_num": 7, "config": {"out_dir": "out"}}
    torch.save(saved, tmp_path / "ckpt.pt")

    convert(tmp_path / "ckpt.pt", tmp_path / "model")

    config = load_config(tmp_path / "model")
    tensors = dict(Checkpoint(tmp_path / "model", config).stream(dtype=torch.float32, device="cpu"))
    assert (config.model_type, config.max_position, config.qkv_bias) == ("nanogpt", 16, bias)
    assert torch.equal(tensors["blocks.1.qkv.weight"], state[f"{prefix}transformer.h.1.attn.c_attn.weight"])
    assert ("blocks.1.qkv.bias" in tensors) is bias


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_folder_of_pickles_becomes_what_it_was_saved_from(
    make_gpt2: MakeGPT2, tmp_path: Path, num_files: int
) -> None:
    original = make_gpt2()
    tensors = load_file(original / "model.safetensors")
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(original / "config.json", source)
    (source / "pytorch_model.bin.index.json").write_text("{}")
    for i in range(num_files):
        part = {name: tensors[name] for name in list(tensors)[i::num_files]}
        name = f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin" if num_files > 1 else "pytorch_model.bin"
        torch.save(part, source / name)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "merges.txt").write_text("#version: 0.2\n")
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")

    convert(source, tmp_path / "target", tokenizer)

    config = load_config(tmp_path / "target")
    assert Checkpoint(tmp_path / "target", config).digest == Checkpoint(original, config).digest
    files = {path.name for path in (tmp_path / "target").iterdir()}
    assert {"config.json", "merges.txt"} <= files
    copied = tmp_path / "target" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ tools }}"
    assert "pytorch_model.bin.index.json" not in files


class Hostile:
    """Unpickled freely, it would make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_a_pickle_that_would_run_code_does_not_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(InvalidCheckpointError, match=r"evil\.pt could not be converted: "):
        convert(tmp_path / "evil.pt", tmp_path / "model")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "model").exists()
    pickle.loads((tmp_path / "evil.pt").read_bytes())  # the trap works
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["missing", *(pytest.param(f, marks=pytest.mark.slow) for f in ("misshapen", "mistyped"))]
)
def test_weights_that_would_not_load_are_told_and_leave_nothing(fault: str, tmp_path: Path) -> None:
    state = nanogpt_state(bias=False)
    if fault == "missing":
        del state["transformer.h.1.ln_2.weight"]
    elif fault == "misshapen":
        state["transformer.h.1.ln_2.weight"] = torch.ones(9)
    else:
        state["transformer.h.1.ln_2.weight"] = torch.ones(8, dtype=torch.float64)
    torch.save({"model": state, "model_args": ARGUMENTS}, tmp_path / "ckpt.pt")
    with pytest.raises(InvalidCheckpointError, match=f"1 {fault} .*h\\.1\\.ln_2\\.weight"):
        convert(tmp_path / "ckpt.pt", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_file_without_a_configuration_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"wte.weight": torch.zeros(2, 2)}, tmp_path / "weights.pt")
    with pytest.raises(InvalidConfigError, match=r"^config\.json is missing in "):
        convert(tmp_path / "weights.pt", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_target_that_exists_is_never_touched(tmp_path: Path) -> None:
    torch.save({"model": {}, "model_args": ARGUMENTS}, tmp_path / "ckpt.pt")
    (tmp_path / "model").mkdir()
    with pytest.raises(InvalidCheckpointError, match=r"must not exist yet$"):
        convert(tmp_path / "ckpt.pt", tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_a_source_without_pickles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"must be a torch file or a folder with one, such as pytorch_model"):
        convert(tmp_path / "nowhere", tmp_path / "model")


@pytest.mark.slow
def test_model_arguments_become_the_configuration(tmp_path: Path) -> None:
    torch.save({"model": nanogpt_state(bias=False), "model_args": ARGUMENTS}, tmp_path / "ckpt.pt")
    convert(tmp_path / "ckpt.pt", tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written == {"model_type": "nanogpt"} | {name: ARGUMENTS[name] for name in ARGUMENTS if name != "dropout"}
