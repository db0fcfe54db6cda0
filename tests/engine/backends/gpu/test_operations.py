"""The kernels of a layer against torch, and which of them are chosen.

The tests marked `triton` run on a CUDA device (`make gpu`) or in Triton's interpreter, in the process that
tests/engine/backends/gpu/test_attention.py starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.operations import TritonOperations
from gptserve.engine.backends.gpu.selfcheck import operations as operations_choice
from gptserve.engine.backends.gpu.selfcheck.operations import agreeing_kernels, choose_operations
from gptserve.engine.backends.gpu.selfcheck.proofs import Proofs
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.activation import gated
from gptserve.engine.model.experts import Routing, stack
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.model.norm import Norm, normalize_by_torch
from gptserve.engine.model.operations import TORCH, Operations
from gptserve.engine.model.rotary import Rotation, rotary_table, rotate_
from gptserve.engine.runner import setup
from gptserve.weights.config import Activation, Experts, ModelConfig, Rotary, Router
from gptserve.weights.config import Norm as Kind
from gptserve.weights.families import load_config
from gptserve.weights.quantized.mxfp4 import MXFP4, unpack
from tests.engine.backends.gpu.test_attention import DEVICE, by_dtype, interpreted, slow
from tests.engine.runs import make_engine, make_request, ragged_prompts, run
from tests.engine.steps import make_metadata
from tests.parity.models import pack_experts, write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import paged_logits

NAMES = ("normalize", "add_normalize", "rotate_and_write", "gate", "experts")
LINEARS = ("ffn_up", "ffn_down")
OTHERS = (
    *("GPT-2", "Qwen3", "OLMo 2", "Gemma 3, past its window", "OLMo, clipped", "SmolLM3", "EXAONE 4, past its window"),
    *("GLM 4 of 2025", "Arcee", "StarCoder2, past its window", "StableLM, parallel, biases"),
    *("Qwen2 MoE", "GLM 4.5, in groups", "dots.llm1", "ERNIE 4.5 MoE", "MiniMax M2", "Hunyuan MoE"),
    *("CodeGen", "Falcon 40B", "Falcon RW", "Persimmon", "Ministral 3, YaRN"),
    *("Gemma 4 with experts", "Gemma 4, inputs of layers and shared keys", "Gemma 3n, past its window"),
    *("StableLM 2 12B", "Command R+", "Qwen3-VL with experts", "Apertus"),
)
WITH_EXPERTS = [name for name, (model_type, _) in SHAPES.items() if model_type == "gpt_oss"]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NUM_IN, NUM_OUT, NUM_EXPERTS = 40, 67, 5
IN_GROUPS = Experts(24, 3, Router("sigmoid", True, 4, 2, scale=2.5), num_shared=2, has_shared_gate=True)
CHANGES: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "no limit": lambda config: replace(config, ffn_bias=False, ffn_limit=None),
    "not gated": lambda config: replace(config, gated_ffn=False),
    "mxfp4": lambda config: config.change_layers(lambda layer: replace(layer, experts=Experts(4, 2))),
    "factors": lambda config: config.change_layers(
        lambda layer: replace(layer, experts=Experts(4, 2, Router(has_factors=True)))
    ),
    "groups": lambda config: config.change_layers(lambda layer: replace(layer, experts=IN_GROUPS)),
}
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with experts."""
    write_model(tmp_path, *SHAPES[WITH_EXPERTS[0]])
    return tmp_path


class Products:
    """Random experts, and rows of which each chose two: most the first, none the third."""

    def __init__(self, dtype: torch.dtype, num_in: int = NUM_IN) -> None:
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.weight, self.bias = numbers(NUM_EXPERTS, NUM_OUT, num_in) / 8, numbers(NUM_EXPERTS, NUM_OUT)
        self.scales: Tensor | None = None
        num_rows = 34 if dtype is torch.float32 else 68  # several tiles of the first expert
        self.chosen = [(0, 1 + 2 * (i % 2)) for i in range(num_rows)] + [(4, 0), (1, 4)]
        self.x, self.pairs = numbers(len(self.chosen), num_in), numbers(2 * len(self.chosen), num_in)

    def multiply(self, x: Tensor, rows: list[int], bias: bool, dtype: torch.dtype | None = None) -> Tensor:
        """Return what the kernel gives for these rows, or for pairs of these rows."""
        experts, pairs = torch.tensor([self.chosen[row] for row in rows]).flatten().sort(stable=True)
        routing = Routing(pairs, torch.searchsorted(experts, torch.arange(NUM_EXPERTS + 1), out_int32=True))
        its_bias = self.bias.to(DEVICE) if bias else None
        its_scales = None if self.scales is None else self.scales.to(DEVICE)
        on_device = Routing(*(indices.to(DEVICE) for indices in routing))
        multiply = TritonOperations().multiply
        return multiply(x.to(DEVICE), self.weight.to(DEVICE), its_bias, on_device, dtype, its_scales).cpu()


@pytest.mark.slow
@interpreted
@by_dtype
def test_each_pair_is_multiplied_with_its_expert(dtype: torch.dtype) -> None:
    data, tolerance = Products(dtype), TOLERANCES[dtype]
    experts, rows = torch.tensor(data.chosen).flatten(), list(range(len(data.chosen)))
    weight, bias = data.weight[experts].float(), data.bias[experts].float()
    for x, its_rows in ((data.x, data.x.repeat_interleave(2, 0)), (data.pairs, data.pairs)):
        expected = (weight @ its_rows.float()[:, :, None])[:, :, 0]
        torch.testing.assert_close(
            data.multiply(x, rows, bias=False, dtype=torch.float32), expected, atol=1e-5, rtol=1e-5
        )
        out = data.multiply(x, rows, bias=True)
        assert out.dtype is dtype
        torch.testing.assert_close(out.float(), expected + bias, atol=tolerance, rtol=tolerance)


@interpreted
@by_dtype
def test_the_bits_of_a_row_do_not_depend_on_what_others_chose(dtype: torch.dtype) -> None:
    data = Products(dtype)
    num_rows = len(data.x)
    whole = data.multiply(data.x, list(range(num_rows)), bias=True).view(num_rows, 2, NUM_OUT)
    for rows in ([33], [num_rows - 1, 3, num_rows - 2], [20, 20]):
        assert torch.equal(data.multiply(data.x[rows], rows, bias=True).view(-1, 2, NUM_OUT), whole[rows])


@slow
@interpreted
@by_dtype
@pytest.mark.parametrize("group", [8, 32])
def test_weights_in_mxfp4_give_the_bits_of_unpacked_ones(group: int, dtype: torch.dtype) -> None:
    """With inputs that fill no whole number of tiles."""
    data, generator = Products(dtype, num_in=64 + 3 * group), torch.Generator().manual_seed(1)
    rows = list(range(len(data.chosen)))
    shape = NUM_EXPERTS, NUM_OUT, 64 // group + 3
    blocks = torch.randint(256, (*shape, group // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
    data.weight = unpack(blocks, scales, dtype).mT.contiguous()
    inputs = ((data.x, False, None), (data.x, True, None), (data.pairs, True, torch.float32))
    expected = [data.multiply(x, rows, bias, out_dtype) for x, bias, out_dtype in inputs]
    data.weight, data.scales = blocks, scales
    for (x, bias, out_dtype), wanted in zip(inputs, expected, strict=True):
        assert torch.equal(data.multiply(x, rows, bias, out_dtype), wanted)
    data.scales = scales.roll(1, -1)
    assert not torch.equal(data.multiply(data.x, rows, bias=False), expected[0])


@interpreted
def test_every_code_is_read_with_every_scale() -> None:
    exponents = torch.arange(252, dtype=torch.uint8)  # beyond, 6 times the power is more than fp32 holds
    codes = torch.arange(16, dtype=torch.uint8)
    blocks, scales = (codes | (15 - codes) << 4).expand(1, 252, 1, 16).contiguous(), exponents.view(1, 252, 1)
    routing = Routing(torch.arange(32), torch.tensor([0, 32], dtype=torch.int32))
    on_device = Routing(*(indices.to(DEVICE) for indices in routing))
    rows = torch.eye(32, device=DEVICE)
    out = TritonOperations().multiply(rows, blocks.to(DEVICE), None, on_device, None, scales.to(DEVICE))
    assert torch.equal(out.cpu(), unpack(blocks, scales, torch.float32)[0])


@interpreted
@by_dtype
def test_parts_are_summed_by_weight_and_added_to_the_residual(dtype: torch.dtype) -> None:
    parts, weights = torch.randn(3 * 4, 1030), torch.rand(3, 4)
    residual, tolerance = torch.randn(3, 1030).to(dtype), TOLERANCES[dtype]
    expected = (parts.view(3, 4, 1030) * weights[:, :, None]).sum(1)
    for its_residual in (None, residual):
        on_device = None if its_residual is None else its_residual.to(DEVICE)
        out = TritonOperations().sum(parts.to(DEVICE), weights.to(DEVICE), on_device, dtype).cpu()
        wanted = expected if its_residual is None else expected + its_residual.float()
        assert out.dtype is dtype
        torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)


@interpreted
@by_dtype
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_of_rows_and_of_strided_heads_equal_those_of_torch(kind: Kind, dtype: torch.dtype) -> None:
    projection, residual = (torch.randn(3, 5, 70) * 3 + 1).to(dtype), torch.randn(3, 2, 70).to(dtype)
    weight, bias = torch.randn(70), torch.randn(70).to(dtype)
    both = (weight, None) if kind == "rmsnorm" else (weight.to(dtype), bias)
    of_each = torch.randn(2, 70).to(weight.dtype if kind == "rmsnorm" else dtype)
    for parameters in ((None, None), both, (of_each, None)):
        for added in (None, residual):
            expected = normalize_by_torch(projection[:, 1:3], Norm(kind, *parameters, 0.1), added)
            its_parameters = (None if x is None else x.to(DEVICE) for x in parameters)
            its_added = None if added is None else added.to(DEVICE)
            heads = projection.to(DEVICE)[:, 1:3]
            out = TritonOperations().normalize(heads, Norm(kind, *its_parameters, 0.1), its_added).cpu()
            torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@interpreted
@by_dtype
def test_a_sum_is_stored_as_torch_rounds_it_and_normalized(dtype: torch.dtype) -> None:
    x, term, weight = torch.randn(3, 70).to(dtype), torch.randn(3, 70).to(dtype), torch.randn(70)
    norm = Norm("rmsnorm", weight.to(DEVICE), None, 1e-5)
    total, out = TritonOperations().add_normalize(x.to(DEVICE), term.to(DEVICE), norm)
    tolerance = TOLERANCES[dtype]
    assert total.dtype is dtype
    torch.testing.assert_close(total.cpu(), x + term, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out, normalize_by_torch(total, norm), atol=tolerance, rtol=tolerance)


def rotate_and_write(heads_TXD: Tensor, rotation: Rotation, cache_2NGBD: Tensor, slots_T: Tensor) -> None:
    """Compute in torch what the kernel does."""
    (num_kv_heads, block_size), num_rows = cache_2NGBD.shape[2:4], int((slots_T >= 0).sum())
    rotate_(heads_TXD[:, :-num_kv_heads], rotation)
    metadata = make_metadata([num_rows], [num_rows], [[0] * num_rows], block_size)
    key_TGD, value_TGD = heads_TXD[:, -2 * num_kv_heads :].split_with_sizes((num_kv_heads, num_kv_heads), 1)
    ReferenceAttention().write(key_TGD, value_TGD, cache_2NGBD, replace(metadata, slots_T=slots_T))


@interpreted
@by_dtype
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "num_pairs"),
    [(4, 2, 24, 12), (3, 1, 20, 3), *(pytest.param(*sizes, marks=slow) for sizes in ((2, 2, 65, 32), (8, 1, 128, 64)))],
)
def test_rotated_heads_have_the_bits_of_torch(
    num_heads: int, num_kv_heads: int, head_size: int, num_pairs: int, dtype: torch.dtype
) -> None:
    """Queries in their place, keys and values in the cache; nothing is stored for a row of padding."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, num_heads + 2 * num_kv_heads, head_size, generator=generator).to(dtype)
    table = rotary_table(Rotary(tuple(0.9**i for i in range(num_pairs)), scale=1.2), 9, CPU)
    rotation, slots = table[torch.tensor([8, 0, 3, 5])].unbind(1), torch.tensor([9, 0, 4, -1])
    cache = torch.full((2, 3, num_kv_heads, 5, head_size), 7.0, dtype=dtype)
    kernel_heads, kernel_cache = heads.to(DEVICE, copy=True), cache.to(DEVICE, copy=True)
    its_rotation = tuple(x.to(DEVICE) for x in rotation)
    TritonOperations().rotate_and_write(kernel_heads, its_rotation, kernel_cache, slots.to(DEVICE))

    wide, wide_cache = (x.to(torch.float32, copy=True) for x in (heads, cache))
    rotate_and_write(wide, rotation, wide_cache, slots)
    rotate_and_write(heads, rotation, cache, slots)
    for out, exact, expected in ((kernel_heads, wide, heads), (kernel_cache, wide_cache, cache)):
        if dtype is torch.bfloat16 and DEVICE.type == "cpu":  # the interpreter cuts off what torch rounds
            assert torch.equal(exact.bfloat16(), expected)
            expected = (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16()
        rows = slice(num_heads) if out is kernel_heads else slice(None)
        assert torch.equal(out.cpu()[:, rows], expected[:, rows])
    assert (cache != 7.0).sum() == 2 * 3 * num_kv_heads * head_size


@interpreted
@by_dtype
@pytest.mark.parametrize("limit", [None, 2.0])
def test_gates_equal_those_of_torch(limit: float | None, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 140) * 3).to(dtype)
    x[0, 0], x[1, 100] = math.nan, math.nan
    for activation in get_args(Activation):
        expected = gated(x.float(), activation, limit).to(dtype)
        out = TritonOperations().gate(x.to(DEVICE), activation, limit).cpu()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance, equal_nan=True, msg=activation)


@interpreted
@slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/engine/backends/gpu/test_cuda.py has all families")
@pytest.mark.parametrize("name", [*WITH_EXPERTS, *OTHERS])
def test_a_model_has_the_logits_that_it_has_with_torch(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    prompts = ragged_prompts(2, 16, vocab_size=90)
    expected = torch.cat(paged_logits(tmp_path, prompts, ReferenceAttention()))
    kernels = TritonOperations().operations()
    logits = torch.cat(paged_logits(tmp_path, prompts, ReferenceAttention(), operations=kernels))
    assert (logits - expected).abs().max() < 1e-4 < 1e-2 < (logits - expected.roll(1, 0)).abs().max()


@slow
@interpreted
@by_dtype
@pytest.mark.parametrize("change", ["as published", *CHANGES])
def test_all_kernels_agree_with_torch(
    change: str, dtype: torch.dtype, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(folder)
    stored_types = [MXFP4] if change == "mxfp4" else []
    found = agreeing_kernels(CHANGES[change](config) if change in CHANGES else config, DEVICE, dtype, stored_types)
    assert found.build.startswith("triton 3")
    assert not caplog.records
    is_of_torch = {name for name in NAMES if getattr(found, name) == getattr(TORCH, name)}
    assert is_of_torch == ({"gate"} if change == "not gated" else set())
    assert found.keeps == frozenset(stored_types)


@interpreted
@slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/engine/backends/gpu/test_cuda.py has the engine")
def test_an_engine_with_experts_in_mxfp4_generates_the_tokens_of_one_that_unpacked_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit of their logprobs, if one kernel multiplies with both."""
    pack_experts(folder)
    requests = [
        make_request(str(i), prompt, seed=i, max_tokens=4, temperature=i % 2, logprobs=2)
        for i, prompt in enumerate(ragged_prompts(3, 10, vocab_size=90))
    ]
    multiply, dtypes = TritonOperations.multiply, set[torch.dtype]()

    def multiply_noting(self: TritonOperations, x: Tensor, weight_ENI: Tensor, *others: Any) -> Tensor:
        dtypes.add(weight_ENI.dtype)
        return multiply(self, x, weight_ENI, *others)

    found = []
    for is_packed in (True, False):
        kernels = TritonOperations()
        chosen = replace(TORCH, experts=kernels, mxfp4_experts=kernels if is_packed else None)
        with monkeypatch.context() as patch:
            patch.setattr(setup, "choose_operations", lambda *_, chosen=chosen: chosen)
            patch.setattr(TritonOperations, "multiply", multiply_noting)
            outputs = run(make_engine(folder), requests)
        assert dtypes == {torch.uint8 if is_packed else torch.float32}
        dtypes.clear()
        found.append({i: [(output.token_ids, output.logprobs) for output in its] for i, its in outputs.items()})
    assert found[0] == found[1]


def test_on_a_cpu_all_operations_are_those_of_torch(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_operations(load_config(folder), CPU, torch.float32, [MXFP4]) == TORCH
    assert not caplog.records


class Kernels(TritonOperations):
    """Stand-ins in torch, of which `wrong` is."""

    build, wrong = "triton 0", ""

    def __init__(self) -> None:
        pass

    def normalize(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return normalize_by_torch(x, norm, residual) + (self.wrong == "normalize")

    def add_normalize(self, x: Tensor, term: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x + term
        return total, normalize_by_torch(total, norm) + (self.wrong == "add_normalize")

    def rotate_and_write(self, heads_TXD: Tensor, rotation: Rotation, cache_2NGBD: Tensor, slots_T: Tensor) -> None:
        rotate_and_write(heads_TXD, rotation, cache_2NGBD, slots_T)
        cache_2NGBD += self.wrong == "rotate_and_write"

    def gate(self, x: Tensor, activation: Activation, limit: float | None) -> Tensor:
        return gated(x, activation, limit) + (self.wrong == "gate")

    def multiply(
        self,
        x: Tensor,
        weight_ENI: Tensor,
        bias_EN: Tensor | None,
        routing: Routing,
        out_dtype: Any = None,
        scales_ENG: Tensor | None = None,
    ) -> Tensor:
        if scales_ENG is not None:
            weight_ENI = unpack(weight_ENI, scales_ENG, x.dtype).mT + (self.wrong == "mxfp4_experts")
        counts = routing.starts_E1.diff()
        experts = torch.arange(len(counts)).repeat_interleave(counts)
        rows = x[routing.pairs_P // (len(routing.pairs_P) // len(x))]
        out = torch.empty(len(rows), weight_ENI.shape[1], dtype=out_dtype or x.dtype)
        product = (weight_ENI[experts] @ rows[:, :, None])[:, :, 0]
        out[routing.pairs_P] = (product if bias_EN is None else product + bias_EN[experts]).to(out.dtype)
        return out

    def sum(self, parts_PN: Tensor, weights_TK: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        total = (parts_PN.view(*weights_TK.shape, -1) * weights_TK[:, :, None]).sum(1) + (self.wrong == "experts")
        return total.to(dtype) if residual is None else residual + total.to(dtype)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", [*WITH_EXPERTS, *OTHERS, "GPT-1", "GPT-J"])
def test_a_model_that_hands_its_operations_on_computes_the_same(name: str, tmp_path: Path) -> None:
    """Where sums wait for the next norm and experts are grouped; the kernels themselves are tested above."""
    write_model(tmp_path, *SHAPES[name])
    prompts = ragged_prompts(3, 30, vocab_size=90)
    expected = torch.cat(paged_logits(tmp_path, prompts, ReferenceAttention()))
    logits = torch.cat(paged_logits(tmp_path, prompts, ReferenceAttention(), operations=Kernels().operations()))
    assert (logits - expected).abs().max() < 1e-4 < 1e-2 < (logits - expected.roll(1, 0)).abs().max()


def test_a_model_whose_experts_stay_in_mxfp4_computes_the_same(folder: Path) -> None:
    pack_experts(folder)
    prompts = ragged_prompts(3, 30, vocab_size=90)
    expected = torch.cat(paged_logits(folder, prompts, ReferenceAttention()))
    operations = Kernels().operations()
    assert operations.keeps == {MXFP4}
    logits = torch.cat(paged_logits(folder, prompts, ReferenceAttention(), operations=operations))
    assert (logits - expected).abs().max() < 1e-4 < 1e-2 < (logits - expected.roll(1, 0)).abs().max()


class Missing(TritonOperations):
    """As where Triton is not installed."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'triton'")


def test_torch_takes_the_place_of_kernels_that_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operations_choice, "TritonOperations", Missing)
    assert agreeing_kernels(load_config(folder), CPU, torch.float32) == TORCH
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    reason = "it failed with ModuleNotFoundError: No module named 'triton'"
    assert caplog.messages == [
        f"{name}: torch, which is slower, is used instead of a Triton kernel: {reason}" for name in NAMES
    ]


@pytest.mark.parametrize("wrong", NAMES)
def test_torch_takes_the_place_of_the_kernel_that_differs(
    wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operations_choice, "TritonOperations", type("", (Kernels,), {"wrong": wrong}))
    found = agreeing_kernels(load_config(folder), CPU, torch.float32)
    assert {name for name in NAMES if getattr(found, name) == getattr(TORCH, name)} == {wrong}
    assert found.build == " ".join(["triton 0", *(name for name in NAMES if name != wrong)])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = rf"{wrong}: torch, .+ instead of a Triton kernel: it differs from torch by \d\.\de[+-]\d\d"
    assert re.fullmatch(message, record.getMessage())


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [("", []), ("mxfp4_experts", ["mxfp4_experts"]), ("experts", ["experts", "mxfp4_experts"])],
)
def test_experts_in_mxfp4_are_unpacked_unless_their_kernel_agrees(
    wrong: str, failing: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack_experts(folder)
    monkeypatch.setattr(operations_choice, "TritonOperations", type("", (Kernels,), {"wrong": wrong}))
    found = agreeing_kernels(load_config(folder), CPU, torch.float32, [MXFP4])
    assert (MXFP4 in found.keeps) == (not failing)
    assert (found.experts is None) == ("experts" in failing)
    kept = [name for name in (*NAMES, "mxfp4_experts") if name not in failing]
    assert found.build == " ".join(["triton 0", *kept])
    assert [message.partition(":")[0] for message in caplog.messages] == failing
    if failing:
        message = "mxfp4_experts: unpacked weights, which take more memory, are used instead of a Triton kernel: "
        reason = "torch multiplies with the experts" if "experts" in failing else "it differs from torch by "
        assert caplog.messages[-1].startswith(message + reason)


def test_kernels_that_agree_are_taken_without_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operations_choice, "TritonOperations", Kernels)
    found = agreeing_kernels(load_config(folder), CPU, torch.float32)
    assert all(getattr(found, name) != getattr(TORCH, name) for name in NAMES)
    assert not caplog.records


def test_kernels_that_are_proved_are_not_compared_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, proofs = load_config(folder), Proofs(tmp_path / "proofs")

    def choose(dtype: torch.dtype, **changes: Any) -> Operations:
        return agreeing_kernels(replace(config, **changes), CPU, dtype, proofs=proofs)

    monkeypatch.setattr(operations_choice, "TritonOperations", Kernels)
    first = choose(torch.float32)
    monkeypatch.setattr(operations_choice, "TritonOperations", type("", (Kernels,), {"wrong": "gate"}))
    assert choose(torch.float32).build == first.build
    assert not caplog.records
    assert choose(torch.bfloat16).gate == TORCH.gate
    assert choose(torch.float32, norm_eps=0.5).gate == TORCH.gate
    assert len(caplog.records) == 2


def test_experts_are_taken_one_by_one_in_the_order_in_which_they_come() -> None:
    names = [
        f"b.experts.{e}.{n}.{kind}" for e in range(3) for n in ("ffn_up", "ffn_down") for kind in ("weight", "bias")
    ]
    source = StreamedTensors((name, torch.full((2, 2), float(i))) for i, name in enumerate(names))
    stacked = stack(source.take, "b", 3, has_bias=True)
    assert {name: tensor[:, 0, 0].tolist() for name, tensor in stacked.items()} == {
        "ffn_up.weight": [0.0, 4.0, 8.0],
        "ffn_up.bias": [1.0, 5.0, 9.0],
        "ffn_down.weight": [2.0, 6.0, 10.0],
        "ffn_down.bias": [3.0, 7.0, 11.0],
    }
    assert not source._waiting


def test_experts_in_mxfp4_have_their_scales_between_weight_and_bias() -> None:
    kinds = {"weight": torch.uint8, "scales": torch.uint8, "bias": torch.float32}
    parts = [(f"b.experts.{e}.{n}.{kind}", kinds[kind]) for e in range(2) for n in LINEARS for kind in kinds]
    source = StreamedTensors((name, torch.full((2,), i, dtype=dtype)) for i, (name, dtype) in enumerate(parts))
    stacked = stack(source.take, "b", 2, has_bias=True)
    firsts = {f"{n}.{kind}": 3 * i + j for i, n in enumerate(LINEARS) for j, kind in enumerate(kinds)}
    assert {name: tensor[:, 0].tolist() for name, tensor in stacked.items()} == {
        name: [first, first + 6] for name, first in firsts.items()
    }
