"""The arithmetic of bench/int8_quality.py: rounding against numpy, divergences with known values, and what it tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import int8_quality
from bench.int8_quality import Comparison, Recipe, SimulatedLinear, cut, divergence, fake_quantized
from gptserve.engine.backends.cpu.int8 import DenseInt8Linear


def weights(num_out: int, num_in: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group", [32, 64, 0])
def test_weights_are_rounded_to_multiples_of_a_scale_in_fp16_for_each_group(group: int) -> None:
    values = weights(5, 100) * torch.logspace(-3, 2, 100)
    found = fake_quantized(values, group).numpy()
    for row, its in zip(values.numpy(), found, strict=True):
        for start in range(0, 100, group or 100):
            piece = row[start : start + (group or 100)]
            scale = np.float32(np.float16(np.abs(piece).max() / np.float32(127)))
            expected = np.clip(np.rint(piece / scale), -127, 127) * scale
            np.testing.assert_array_equal(its[start : start + len(piece)], expected)


def test_q8_0_divides_by_the_scale_before_it_is_rounded_as_ggml_does() -> None:
    values = weights(4, 64)
    blocks = values.view(4, 2, 32).numpy()
    exact = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    expected = np.rint(blocks / exact) * exact.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(fake_quantized(values, 32, "q8_0").numpy(), expected.reshape(4, 64))


def test_scales_of_the_least_error_have_less_error_in_every_group() -> None:
    values = weights(40, 128)
    errors = {
        e: (fake_quantized(values, 32, e) - values).view(40, 4, 32).square().sum(-1) for e in ("largest", "squares")
    }
    assert (errors["squares"] <= errors["largest"]).all()
    assert errors["squares"].sum() < 0.99 * errors["largest"].sum()


@pytest.mark.parametrize("error", ["largest", "squares", "q8_0"])
def test_zeros_and_whole_multiples_come_back(error: int8_quality.Error) -> None:
    multiples = torch.arange(-127.0, 129.0).clamp(max=127).view(4, 64) / 4
    multiples[:, ::32] = 127 / 4
    assert torch.equal(fake_quantized(multiples, 32, error), multiples)
    assert torch.equal(fake_quantized(torch.zeros(2, 48), 32, error), torch.zeros(2, 48))


def test_groups_of_32_with_remainders_are_todays_product() -> None:
    weight, x, bias = weights(300, 96), weights(7, 96, 1), weights(1, 300, 2)[0]
    x[:, 5] *= 30
    today = DenseInt8Linear(weight, bias, "relu")(x)
    simulated = SimulatedLinear(Recipe.parse("g32.remainders"), weight, bias, "relu")(x)
    other = SimulatedLinear(Recipe.parse("g32"), weight, bias, "relu")(x)
    exact = (x @ weight.T + bias).relu()
    errors = [(found - exact).abs().mean().item() for found in (today, simulated, other)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert errors[2] > 2 * errors[1]


def test_rows_that_are_wide_leave_the_errors_of_weights() -> None:
    weight, x = weights(8, 64), weights(3, 64, 1)
    found = SimulatedLinear(Recipe.parse("g32.wide"), weight, None, None)(x)
    assert torch.equal(found, x @ fake_quantized(weight, 32).T)


def test_the_divergence_of_equal_logits_is_zero_and_that_of_two_coins_is_known() -> None:
    logits = weights(6, 50)
    logprobs = logits.log_softmax(1)
    assert divergence(logprobs, (logits + 3).log_softmax(1)).abs().max() < 1e-6  # a constant changes no probability
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert divergence(p.log(), q.log()).item() == pytest.approx(expected, rel=1e-6)


def test_figures_compare_with_the_reference() -> None:
    logits, targets = weights(4, 10), torch.tensor([1, 2, 3, 4])
    reference = Comparison([])
    logprobs = reference.add(logits, targets)
    same, other = Comparison([logprobs]), Comparison([logprobs])
    same.add(logits + 1, targets)
    other.add(-logits, targets)
    figures = same.figures(reference)
    assert figures["perplexity"] == pytest.approx(np.exp(-logprobs[range(4), targets].mean().item()))
    assert figures["change"] == pytest.approx(0, abs=1e-6)
    assert figures["greedy"] == 1
    assert abs(figures["kl"]) < 1e-6
    assert other.figures(reference)["kl"] > 0.1
    assert other.figures(reference)["greedy"] == 0


@pytest.mark.parametrize("side", ["int4", "g", "g32.square", "gx.wide", ""])
def test_a_side_that_is_none_is_refused(side: str) -> None:
    words = ".remainders, .squares, .wide"
    with pytest.raises(ValueError, match=r"^a side must be ") as raised:
        Recipe.parse(side)
    assert str(raised.value) == f"a side must be bf16, int8, q8_0 or gN with any of {words}, got {side!r}"


def test_windows_are_spread_over_the_text_and_a_short_text_is_refused() -> None:
    assert cut(range(100), 10, 3) == [list(range(start, start + 10)) for start in (0, 45, 90)]
    with pytest.raises(ValueError, match=r"^the text must have 3 windows of 10 tokens, got 29 tokens$"):
        cut(range(29), 10, 3)


def test_it_tells_each_side_beside_fp32_and_the_logits_of_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(int8_quality.__file__).parents[1] / "weights" / "storyteller"
    text, tokens, output = tmp_path / "text.txt", tmp_path / "tokens.json", tmp_path / "out.json"
    text.write_text("Once upon a time there was a fox who liked to read. " * 12, encoding="utf-8")
    arguments = [str(folder), str(text), "--window", "32", "--windows", "2", "--output", str(output)]

    def tell(*more: str) -> list[dict[str, float]]:
        monkeypatch.setattr(sys, "argv", ["int8_quality", *arguments, *more])
        int8_quality.main()
        told: dict[str, list[dict[str, float]]] = json.loads(output.read_text(encoding="utf-8"))
        return told["rows"]

    rows = tell("--sides", "bf16", "int8", "q8_0", "g64.remainders", "--tokens-to", str(tokens))
    assert [row["side"] for row in rows] == ["fp32", "bf16", "int8", "q8_0", "g64.remainders"]
    assert [row["positions"] for row in rows] == [62] * 5
    assert rows[0]["kl"] == 0
    assert all(0 < row["kl"] < 0.01 for row in rows[1:])
    assert len({row["kl"] for row in rows}) == 5

    assert [len(ids) for ids in json.loads(tokens.read_text(encoding="utf-8"))] == [32, 32]
    np.save(tmp_path / "flat.npy", np.zeros((2, 31, 2030), np.float32))
    rows = tell("--sides", "--logits", f"flat={tmp_path / 'flat.npy'}")
    assert [row["side"] for row in rows] == ["fp32", "flat"]
    assert rows[1]["perplexity"] == pytest.approx(2030)
