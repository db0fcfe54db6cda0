"""What int8 costs: the storyteller's perplexity, and greedy tokens where some channels are far larger than the rest."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.int8_quality import AS_SERVED, measure
from bench.quantization import write_with_outliers
from gptserve.engine.backends.cpu import native
from gptserve.engine.engine import Engine
from gptserve.engine.runner import input_squares
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
INT8: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8"}
NUM_STORIES = [8, pytest.param(100, marks=pytest.mark.slow)]


def scores(engine: Engine, num_stories: int) -> tuple[float, list[int]]:
    """Return the loss of held-out stories, in nats a token, and the greedy token at each of their positions."""
    tokenizer = Tokenizer.open(STORYTELLER)
    prompts = [tokenizer.encode(story.text) for story in stories("held_out", num_stories)]
    requests = [make_request(str(i), ids, max_tokens=1, prompt_logprobs=1) for i, ids in enumerate(prompts)]
    entries = [
        entry
        for outputs in run(engine, requests).values()
        for entry in outputs[0].prompt_logprobs or ()
        if entry is not None
    ]
    loss = -sum(entry.logprob for entry in entries) / len(entries)
    return loss, [entry.top[0][0] for entry in entries]


def share_of_equals(found: list[int], expected: list[int]) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_stories", NUM_STORIES)
def test_the_perplexity_is_at_most_one_percent_worse(num_stories: int) -> None:
    bf16, _ = scores(make_engine(STORYTELLER, dtype="bfloat16"), num_stories)
    int8, _ = scores(make_engine(STORYTELLER, **INT8), num_stories)
    print(f"perplexity: bf16 {math.exp(bf16):.4f}, int8 {math.exp(int8):.4f}")  # noqa: T201 - shown by pytest -rP
    assert math.exp(int8 - bf16) < 1.01
    assert int8 != bf16


def copied_storyteller(folder: Path) -> dict[str, torch.Tensor]:
    """Copy the storyteller and return its weights in fp32."""
    shutil.copytree(STORYTELLER, folder, ignore=shutil.ignore_patterns("recipe", "*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "gpt2"
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def with_outlier_channels(folder: Path) -> Path:
    """Write the storyteller with one of its 192 channels twenty times as large behind each norm of a block.

    The weights that multiply it are as much smaller, so in exact numbers the model computes what it did.
    """
    tensors = copied_storyteller(folder)
    for name in list(tensors):
        for norm, linear in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            if name.endswith(f"{norm}.weight"):
                channel = tensors[name].abs().argmax()
                tensors[name][channel] *= 20
                tensors[name.replace(".weight", ".bias")][channel] *= 20
                tensors[name.replace(norm, linear)][channel] /= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_outliers_in_the_stream(folder: Path) -> Path:
    """Write the storyteller with one of its 192 channels twenty times as large in the residual stream.

    All that writes to the stream makes it so: the embeddings, attention and feed-forwards, as in GPT-2. The weights
    that read it are as much smaller. A norm divides by the size of a row, which is larger now; its weights make up for
    the mean of that, so the model still tells stories, though not as well.
    """
    tensors = copied_storyteller(folder)
    sizes = tensors["transformer.wte.weight"].square().mean(0)
    channel = sizes.argsort()[len(sizes) // 2]
    for name, tensor in tensors.items():
        if name.endswith(("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")):
            tensor[..., channel] *= 20
        elif name.endswith(("c_attn.weight", "c_fc.weight")):
            tensor[channel] /= 20
        elif name.endswith(("ln_1.bias", "ln_2.bias")):
            tensor[channel] *= 20
        elif name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
            tensor *= math.sqrt(1 + (20**2 - 1) / len(sizes))
    tensors["transformer.ln_f.weight"][channel] /= 20**2  # the head has the weights of the embedding
    tensors["transformer.ln_f.bias"][channel] /= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num_stories", NUM_STORIES)
def test_outlier_channels_change_few_greedy_tokens(num_stories: int, tmp_path: Path) -> None:
    folder = with_outlier_channels(tmp_path / "model")
    plain = scores(make_engine(STORYTELLER), num_stories)[1]
    exact = scores(make_engine(folder), num_stories)[1]
    assert share_of_equals(exact, plain) > 0.999
    bf16 = share_of_equals(scores(make_engine(folder, dtype="bfloat16"), num_stories)[1], exact)
    int8 = share_of_equals(scores(make_engine(folder, **INT8), num_stories)[1], exact)
    print(f"greedy tokens equal to fp32's: bf16 {bf16:.4f}, int8 {int8:.4f}")  # noqa: T201 - shown by pytest -rP
    assert int8 >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("num_stories", NUM_STORIES)
def test_outliers_in_the_residual_stream_change_few_greedy_tokens(num_stories: int, tmp_path: Path) -> None:
    folder = with_outliers_in_the_stream(tmp_path / "model")
    loss, exact = scores(make_engine(folder), num_stories)
    assert loss < 1.5, "it still tells stories"
    bf16 = share_of_equals(scores(make_engine(folder, dtype="bfloat16"), num_stories)[1], exact)
    int8 = share_of_equals(scores(make_engine(folder, **INT8), num_stories)[1], exact)
    print(f"in the stream, greedy tokens equal to fp32's: bf16 {bf16:.4f}, int8 {int8:.4f}")  # noqa: T201 - shown by -rP
    assert int8 >= 0.97


@pytest.mark.slow
def test_with_outliers_in_the_stream_of_gpt_2s_shape_it_is_nearer_to_fp32_than_q8_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights with four channels twenty times as large as the rest: far more than a trained model has."""
    write_with_outliers(tmp_path)
    prompts = torch.randint(50257, (6, 256), generator=torch.Generator().manual_seed(1)).tolist()
    monkeypatch.setitem(AS_SERVED, "int8 in fp32", {"dtype": "float32", "quantization": "int8"})
    reference, logprobs = measure(tmp_path, "fp32", prompts, ())
    int8, q8_0 = (
        measure(tmp_path, side, prompts, logprobs)[0].figures(reference)["kl"] for side in ("int8 in fp32", "q8_0")
    )
    print(f"KL from fp32: int8 {int8:.4f}, Q8_0 {q8_0:.4f}")  # noqa: T201 - for `pytest -s`
    assert 0 < int8 < 0.85 * q8_0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "gpt-oss" in name else pytest.mark.slow) for name in SHAPES]
)
def test_any_family_computes_in_int8_and_alone_as_in_a_batch(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    requests = [make_request(str(i), ids, max_tokens=6, logprobs=2) for i, ids in enumerate(ragged_prompts(5, 20))]
    results = []
    for options in ({"max_num_seqs": 5}, {"max_num_seqs": 1, "max_num_batched_tokens": 3}, {"quantization": None}):
        outputs = run(make_engine(tmp_path, **{"quantization": "int8", **options}), requests)
        results.append([(token_ids(o), [entry for output in o for entry in output.logprobs]) for o in outputs.values()])
    batched, alone, exact = results
    assert batched == alone
    assert batched != exact
    pairs = zip(batched, exact, strict=True)
    errors = [abs(its[0].top[0][1] - expected[0].top[0][1]) for (_, its), (_, expected) in pairs]
    assert median(errors) < 0.2, errors
    assert max(errors) < 0.8, errors  # of a random router a row may choose other experts


def test_without_the_kernel_the_numbers_are_the_same_and_a_warning_says_that_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, *SHAPES["Llama"])
    requests = [make_request("r", [1, 2, 3, 4], max_tokens=6, logprobs=2)]
    # Attention of torch rounds otherwise, so the squares that a trial finds, and a few codes, would differ.
    monkeypatch.setattr(input_squares, "mean_squares", lambda x: torch.linspace(0.1, 1.0, x.shape[1]).square())
    fast = run(make_engine(tmp_path, quantization="int8"), requests)["r"]
    monkeypatch.setattr(native, "is_available", lambda: False)
    engine = make_engine(tmp_path, quantization="int8")
    assert token_ids(run(engine, requests)["r"]) == token_ids(fast)
    assert engine.info.product == "torch_coded"
    assert "products in int8 are slow; int8 saves memory only" in caplog.text
