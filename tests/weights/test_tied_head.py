"""A head that the files have beside a tied embedding: where it may lie, and what is refused of it.

tests/parity/test_tied_heads.py compares every family's with transformers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptserve.engine.info import EngineInfo
from gptserve.engine.runner.memory import weight_bytes
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.families import load_config
from tests.engine.runs import make_engine, make_request, run, token_ids
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a head of its own, whose config.json says so."""
    folder = tmp_path_factory.mktemp("untied")
    write_model(folder, "llama", SHAPES["Llama"][1])
    return folder


@pytest.fixture
def wrongly_tied(untied: Path, tmp_path: Path) -> Path:
    """The same files, whose config.json ties the head to the embedding."""
    return write(tmp_path / "tied", untied, load_file(untied / "model.safetensors"))


def write(folder: Path, untied: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "float32"}, id="fp32"),
        pytest.param({"dtype": "bfloat16"}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, id="int8"),
        pytest.param({"dtype": "float32", "tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_an_engine_computes_what_it_does_if_config_json_says_so(
    settings: dict[str, object], untied: Path, wrongly_tied: Path, tmp_path: Path
) -> None:
    tensors = load_file(untied / "model.safetensors")
    tied = write(tmp_path / "really tied", untied, {name: tensors[name] for name in tensors if name != HEAD})

    (expected, told), (found, its_info), (others, other_info) = (
        greedy(folder, settings) for folder in (untied, wrongly_tied, tied)
    )

    assert found == expected != others
    assert its_info == told
    assert its_info.fingerprint != other_info.fingerprint


def greedy(folder: Path, settings: dict[str, object]) -> tuple[list[int], EngineInfo]:
    engine = make_engine(folder, **settings)
    request = make_request("r", [3, 1, 4, 1, 5], temperature=0.0, max_tokens=24)
    return token_ids(run(engine, [request])["r"]), engine.info


def test_the_head_counts_as_memory_and_in_the_digest(untied: Path, wrongly_tied: Path) -> None:
    found, expected = (Checkpoint(folder, load_config(folder)) for folder in (wrongly_tied, untied))

    assert load_config(wrongly_tied).tied_head
    assert found.config == load_config(untied)
    assert (found.digest, found.num_bytes) == (expected.digest, expected.num_bytes)
    assert found.num_bytes == sum(weight_bytes(found.config, 4).values())


@pytest.mark.parametrize("is_equal", [True, False])
def test_head_and_embedding_may_lie_in_two_shards(untied: Path, tmp_path: Path, is_equal: bool) -> None:
    tensors = load_file(untied / "model.safetensors")
    if is_equal:
        tensors[HEAD] = tensors[EMBED].clone()
    folder = write(tmp_path / "shards", untied, tensors)
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": [name for name in tensors if name != HEAD], "b.safetensors": [HEAD]}
    for file_name, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file_name)
    weight_map = {name: file_name for file_name, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    checkpoint = Checkpoint(folder, load_config(folder))

    assert checkpoint.config.tied_head is is_equal
    streamed = dict(checkpoint.stream(dtype=torch.float32, device="cpu"))
    assert ("head.weight" in streamed) is not is_equal
    assert is_equal or torch.equal(streamed["head.weight"], tensors[HEAD])


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (torch.ones(95, 64), "1 misshapen (lm_head.weight is [95, 64], expected [96, 64])"),
        (
            torch.ones(96, 64, dtype=torch.int8),
            "1 mistyped (lm_head.weight is I8, expected one of BF16, F16, F32)",
        ),
    ],
)
def test_a_head_of_another_shape_or_type_is_refused(untied: Path, tmp_path: Path, head: Tensor, fault: str) -> None:
    folder = write(tmp_path / "spoilt", untied, load_file(untied / "model.safetensors") | {HEAD: head})

    reason = f"the tensors in {folder} do not fit its config.json: {fault}"
    with pytest.raises(InvalidCheckpointError, match=f"^{re.escape(reason)}$"):
        Checkpoint(folder, load_config(folder))
