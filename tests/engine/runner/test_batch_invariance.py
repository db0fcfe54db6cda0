"""The self-test of batch invariance passes where rows are independent, and sees each way in which they may not be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.model.linear import Affine, DenseLinear, Linear
from gptserve.engine.runner import batch_invariance
from gptserve.engine.runner import products as products_module
from gptserve.engine.runner.batch_invariance import (
    CALL_ROWS,
    PROBED_ROWS,
    Products,
    check_model,
    choose_products,
    first_difference,
    gpu_counts,
    set_up_device,
)
from gptserve.engine.runner.memory import linear_shapes
from gptserve.engine.runner.products import Linears, make_linear
from gptserve.weights.families import load_config
from tests.engine.backends.cpu import onednn
from tests.engine.runs import make_config, make_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIMIT_S = 60
SHAPES = [(768, 2304), (3072, 768), (768, 768), (2048, 8192), (1024, 256)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_the_cpu_rows_are_independent(dtype: torch.dtype) -> None:
    assert first_difference(SHAPES, PROBED_ROWS, CPU, dtype) is None


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without a compiler."""
    monkeypatch.setattr(native, "is_available", lambda: False)


@onednn.needs_bf16
@pytest.mark.usefixtures("without_native")
def test_whatever_the_cpu_onednns_rows_are_independent_in_bf16() -> None:
    assert first_difference(SHAPES, PROBED_ROWS, CPU, torch.bfloat16) is None


@pytest.mark.usefixtures("without_native")
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
def test_calls_of_any_number_of_rows_would_depend_on_it_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.backends.cpu.linear._AMX_ROWS", 1000)
    assert first_difference(SHAPES, PROBED_ROWS, CPU, torch.bfloat16) is not None


def test_a_product_whose_rows_depend_on_their_number_is_seen(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linear = type(make_linear(Affine(torch.randn(32, 64))))
    compute = linear.__call__

    def depending(self: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return compute(self, x, residual) * (1.0 if len(x) != 33 else 1.01)

    assert first_difference([(64, 32)], PROBED_ROWS, CPU, torch.float32) is None
    assert make_engine(tiny_gpt2, batch_invariant=True).info.batch_invariant
    monkeypatch.setattr(linear, "__call__", depending)
    found = "a row of a product (64 inputs, 32 outputs) has other bits among 33 rows than among 256"
    assert first_difference([(64, 32)], PROBED_ROWS, CPU, torch.float32) == found
    caplog.clear()
    assert not make_engine(tiny_gpt2).info.batch_invariant
    assert caplog.messages[0].startswith("linear: the bits of answers depend on the batch: a row of a product (")
    with pytest.raises(InvalidConfigurationError, match=r"^batch_invariant cannot be kept: a row of .* among 33 rows"):
        make_engine(tiny_gpt2, batch_invariant=True)


def test_what_a_cpu_is_asked_for_does_not_change_its_numbers(tiny_gpt2: Path) -> None:
    asked, plain = make_engine(tiny_gpt2, batch_invariant=True).info, make_engine(tiny_gpt2).info
    assert asked == plain
    assert plain.batch_invariant


class Calls:
    """Stands in for the products of a GPU, computed on a CPU: `multiply` gets x [rows, in] and the weight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.rows = set[int]()

        def noting(linear: DenseLinear, x: Tensor) -> Tensor:
            self.rows.add(len(x))
            y = multiply(x, linear._weight)
            return y if linear._bias is None else y + linear._bias

        monkeypatch.setattr(DenseLinear, "_multiply", noting)
        monkeypatch.setattr(batch_invariance, "product_of", lambda *_: "torch")
        monkeypatch.setattr(
            batch_invariance,
            "make_linear",
            lambda affine, _, options: DenseLinear(affine.weight, affine.bias, call_rows=options.call_rows),
        )
        monkeypatch.setattr(torch, "Generator", lambda device: GENERATOR(CPU))
        randn = torch.randn
        monkeypatch.setattr(torch, "randn", lambda *sizes, device=CPU, **options: randn(*sizes, **options))


GENERATOR = torch.Generator
BACKEND = ReferenceAttention()
BACKEND.name = "triton"


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([weight @ row.clone() for row in x])


def by_number(x: Tensor, weight: Tensor) -> Tensor:
    """Sums in another order in a small call, as a kernel that splits the sum among more programs does."""
    return exact(x, weight) if len(x) >= CALL_ROWS else exact(x[:, :9], weight[:, :9]) + exact(x[:, 9:], weight[:, 9:])


def by_place(x: Tensor, weight: Tensor) -> Tensor:
    """Sums in another order in all rows after the first eight, whatever their number."""
    return torch.cat([exact(x[:8], weight), exact(x[8:].flip(1), weight.flip(1))])


def chosen_on_gpu(folder: Path, backend: Any = BACKEND, **options: Any) -> Products:
    config = make_config(folder, **{"device": "cuda", "batch_invariant": True, "max_num_seqs": 4, **options})
    return choose_products(config, replace(load_config(folder), vocab_size=9), CUDA, torch.float32, backend, 1)


def test_independent_products_of_a_gpu_are_called_with_the_rows_there_are(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, exact)
    assert chosen_on_gpu(tiny_gpt2, max_num_batched_tokens=300) == Products(are_invariant=True)
    near = {1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512}
    assert calls.rows == near | {160}
    assert gpu_counts(256, 8192)[-9:] == [1025, 1536, 2048, 2049, 3072, 4096, 4097, 6144, 8192]
    assert chosen_on_gpu(tiny_gpt2, tensor_parallel_size=2) == Products(are_invariant=True)


def test_products_of_a_gpu_that_depend_on_the_number_of_rows_get_calls_of_one_size(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls(monkeypatch, by_number)
    shapes = linear_shapes(replace(load_config(tiny_gpt2), vocab_size=9))
    assert chosen_on_gpu(tiny_gpt2) == Products(are_invariant=True, call_rows=dict.fromkeys(shapes, CALL_ROWS))
    (message,) = caplog.messages
    why = r"a row of a product \(\d+ inputs, \d+ outputs\) has other bits among 1 rows than among 512"
    text = "linear: calls of 64 rows, which are slower, are used instead of larger for 5 of 5 shapes"
    assert re.fullmatch(f"{text}: {why}", message)
    calls.rows.clear()
    linear, x = DenseLinear(torch.randn(5, 16), torch.randn(5), call_rows=CALL_ROWS), torch.randn(150, 16)
    assert torch.equal(linear(x)[148:], linear(x[148:]))
    assert calls.rows == {CALL_ROWS}


def test_only_the_shapes_that_need_it_get_calls_of_one_size(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An H200 was seen to compute one row of a head by another kernel than more rows."""
    calls = Calls(monkeypatch, lambda x, weight: (by_number if len(weight) == 9 else exact)(x, weight))
    model = replace(load_config(tiny_gpt2), vocab_size=9)
    head = model.hidden_size, 9
    products = chosen_on_gpu(tiny_gpt2)
    assert products == Products(are_invariant=True, call_rows={head: CALL_ROWS})
    assert f"larger for 1 of {len(linear_shapes(model))} shapes: a row of a product ({head[0]} inputs" in caplog.text
    monkeypatch.setattr(products_module, "product_of", lambda *_: "torch")
    linears, x = Linears(call_rows=products.call_rows), torch.randn(70, head[0])
    for num_out, rows in ((9, CALL_ROWS), (7, len(x))):
        linear = linears.make("head", Affine(torch.randn(num_out, head[0])))
        calls.rows.clear()
        assert linear(x).shape == (70, num_out)
        assert calls.rows == {rows}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, r"a row of a product \(\d+ inputs, \d+ outputs\) has other bits among 1 rows than among 512"),
        (
            {"backend": ReferenceAttention()},
            "attention is 'reference', whose sums on a GPU depend on the lengths of sequences",
        ),
    ],
)
def test_a_gpu_whose_rows_depend_on_the_batch_even_so_is_refused(
    options: dict[str, Any], found: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Calls(monkeypatch, by_place)
    with pytest.raises(InvalidConfigurationError, match=f"^batch_invariant cannot be kept: {found}$"):
        chosen_on_gpu(tiny_gpt2, **options)


def test_products_that_fail_on_a_gpu_are_told(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("requires the cuBLASLt backend")

    Calls(monkeypatch, fail)
    with pytest.raises(InvalidConfigurationError, match=r"kept: products failed with requires the cuBLASLt backend$"):
        chosen_on_gpu(tiny_gpt2)


def test_a_gpu_promises_nothing_unasked_and_may_split_sums(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_on_gpu(tiny_gpt2, batch_invariant=False) == Products(are_invariant=False)
    monkeypatch.setattr(batch_invariance, "putenv", lambda name, value: pytest.fail(name))
    set_up_device(make_config(tiny_gpt2, device="cuda"), CUDA)
    set_up_device(make_config(tiny_gpt2, batch_invariant=True), CPU)


@pytest.mark.slow
def test_a_gpu_multiplies_fp32_as_fp32_though_the_environment_asks_for_tf32(tiny_gpt2: Path) -> None:
    """In a process of its own, as torch reads the variable once."""
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from gptserve.engine.config import EngineConfig\n"
        "from gptserve.engine.runner.batch_invariance import set_up_device\n"
        "before = torch.backends.cuda.matmul.allow_tf32\n"
        "set_up_device(EngineConfig(Path(sys.argv[1]), device='cuda'), torch.device('cuda'))\n"
        "print(before, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())\n"
    )
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    command = [sys.executable, "-W", "error", "-c", code, tiny_gpt2]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    assert told.stdout.split() == ["True", "False", "highest"]


def test_cublas_is_told_to_split_no_sums(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, told = torch.backends.cuda.matmul, dict[str, str]()
    before = (
        (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k),
        (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction_split_k),
    )
    monkeypatch.setattr(batch_invariance, "putenv", told.__setitem__)

    def prefer(name: str) -> None:
        warnings.warn("torch.backends.cuda.preferred_blas_library is an experimental feature. If", stacklevel=1)
        told.update(library=name)

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    try:
        set_up_device(make_config(tiny_gpt2, device="cuda", batch_invariant=True), CUDA)
        assert told == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1", "library": "cublaslt"}
        for dtype in ("bf16", "fp16"):
            name = f"allow_{dtype}_reduced_precision_reduction"
            assert (getattr(matmul, name), getattr(matmul, name + "_split_k")) == (False, False)
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize(
    ("depends", "found"),
    [
        (lambda arrays, rows: len(arrays.kv_lens) == 3, "a sequence has other logits beside 2 others than alone"),
        (lambda arrays, rows: len(arrays.kv_lens) == 5, "a sequence has other logits beside 4 others than alone"),
        (
            lambda arrays, rows: len(arrays.token_ids) == 1,
            "a token has other logits in a step of its own than in that of",
        ),
        (lambda arrays, rows: rows.stop - rows.start == 1, "a sequence has other logits beside 1 others than alone"),
    ],
)
def test_a_loaded_model_of_which_a_step_has_other_bits_is_refused(
    depends: Callable[[StepArrays, slice], bool], found: str, tiny_gpt2: Path
) -> None:
    runner = make_engine(tiny_gpt2)._runner
    config = make_config(tiny_gpt2, batch_invariant=True, max_num_seqs=5)
    sizes = config, runner.info.vocab_size, runner.info.num_blocks, runner.info.max_model_len

    def logits_of(arrays: StepArrays, rows: slice) -> Tensor:
        return runner._logits_of(arrays, rows)

    def depending(arrays: StepArrays, rows: slice) -> Tensor:
        return logits_of(arrays, rows) * (1.01 if depends(arrays, rows) else 1.0)

    check_model(logits_of, *sizes)
    with pytest.raises(InvalidConfigurationError, match=f"^batch_invariant cannot be kept: {found}"):
        check_model(depending, *sizes)


@pytest.mark.parametrize(
    "options", [{"block_size": 1}, {"max_num_seqs": 1, "max_num_batched_tokens": 3}, {"num_blocks": 1}]
)
def test_a_model_is_compared_in_the_smallest_steps_too(tiny_gpt2: Path, options: dict[str, Any]) -> None:
    engine = make_engine(tiny_gpt2, **options)
    runner, config, steps = engine._runner, make_config(tiny_gpt2, **options), list[StepArrays]()

    def logits_of(arrays: StepArrays, rows: slice) -> Tensor:
        steps.append(arrays)
        return runner._logits_of(arrays, rows)

    check_model(logits_of, config, runner.info.vocab_size, runner.info.num_blocks, runner.info.max_model_len)
    assert max(len(arrays.token_ids) for arrays in steps) <= config.max_num_batched_tokens


def test_the_head_of_a_gpu_gives_fp32() -> None:
    """On torch's meta device, which has shapes and types alone; the product itself exists on CUDA only."""
    weight, x = (torch.empty(rows, 8, dtype=torch.bfloat16, device="meta") for rows in (20, 3))
    for bias in (None, weight[:, 0]):
        wide = DenseLinear(weight, bias, out_dtype=torch.float32)(x)
        assert (wide.shape, wide.dtype) == ((3, 20), torch.float32)
        assert DenseLinear(weight, bias)(x).dtype is torch.bfloat16
