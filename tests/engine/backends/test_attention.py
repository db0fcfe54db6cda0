"""Which backend the chooser takes for a device, a dtype and a head size, and what it says where that is slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.gpu import attention as triton_paged
from gptserve.engine.backends.gpu.selfcheck import attention as attention_check
from gptserve.engine.backends.gpu.selfcheck import proofs as proofs_module
from gptserve.engine.backends.gpu.selfcheck.proofs import NO_PROOFS, Proofs
from gptserve.engine.config import AttentionBackendName, EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.attention import AttentionBackend, AttentionSpec
from gptserve.engine.runner.attention_choice import choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


needs_kernel = pytest.mark.skipif(not CpuAttention.is_available(), reason="installed without a compiler")


def choose(
    name: AttentionBackendName, device: torch.device, dtype: torch.dtype, head_size: int, **options: Any
) -> AttentionBackend:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=head_size, scale=0.25)
    return choose_backend(EngineConfig(Path(), attention_backend=name, **options), device, dtype, [spec], 64)


@needs_kernel
@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_takes_the_kernel_where_it_can_compute(
    head_size: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("auto", CPU, dtype, head_size).name == "cpu"
    assert not caplog.records


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_gpu_has_no_cache_in_int8(name: AttentionBackendName) -> None:
    with pytest.raises(InvalidConfigurationError) as refused:
        choose(name, CUDA, torch.bfloat16, 64, kv_cache_dtype="int8")
    assert str(refused.value) == "kv_cache_dtype 'int8' is computed on a CPU only, got device 'cuda'"


@pytest.mark.parametrize(
    ("dtype", "head_size"), [(torch.float16, 64), (torch.float32, 12), (torch.bfloat16, 4), (torch.float32, 65)]
)
def test_auto_warns_and_takes_the_reference_where_the_kernel_cannot(
    dtype: torch.dtype, head_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("auto", CPU, dtype, head_size).name == "reference"
    (record,) = caplog.records
    assert f"{dtype} with {head_size}" in record.getMessage()
    with pytest.raises(InvalidConfigurationError, match=f"{dtype} with {head_size}"):
        choose("cpu", CPU, dtype, head_size)


def test_auto_warns_when_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert choose("auto", CPU, torch.float32, 64).name == "reference"
    assert "its library is missing" in caplog.text


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
def test_reference_is_taken_without_a_word_where_it_is_named(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("reference", device, torch.float32, 64).name == "reference"
    assert not caplog.records


def test_a_backend_of_another_device_is_refused() -> None:
    with pytest.raises(InvalidConfigurationError, match="attention_backend 'cpu' cannot be used: the device is cuda"):
        choose("cpu", CUDA, torch.float32, 64)
    with pytest.raises(InvalidConfigurationError, match="attention_backend 'triton' cannot be used: the device is cpu"):
        choose("triton", CPU, torch.float32, 64)


@pytest.mark.parametrize(
    ("is_installed", "error", "difference", "reason"),
    [
        (False, None, None, "Triton is not installed"),
        (True, OSError("no compiler"), None, "it failed with OSError: no compiler"),
        (True, None, "it differs from 'reference' by 1", "it differs from 'reference' by 1"),
    ],
)
def test_on_a_gpu_the_reference_takes_the_place_of_a_kernel_that_is_missing_fails_or_differs(
    is_installed: bool,
    error: Exception | None,
    difference: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put_triton(monkeypatch, is_installed, error, difference)
    assert choose("auto", CUDA, torch.float32, 16).name == "reference"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"attention: 'reference', which is slower, is used instead of 'triton': {reason}"
    with pytest.raises(InvalidConfigurationError, match=f"^attention_backend 'triton' cannot be used: {reason}$"):
        choose("triton", CUDA, torch.float32, 16)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_on_a_gpu_a_kernel_that_agrees_is_taken_without_a_word(
    name: AttentionBackendName, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_triton(monkeypatch, is_installed=True)
    for exact in (True, False):
        backend = choose(name, CUDA, torch.bfloat16, 64, batch_invariant=exact)
        assert backend.name == "triton"
        assert vars(backend) == {"exact": exact, "is_compared_exactly": exact}
    assert not caplog.records


def test_on_a_gpu_a_kernel_is_compared_until_it_is_proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(difference: str | None, dtype: torch.dtype = torch.bfloat16, head_size: int = 64, **options: Any) -> str:
        put_triton(monkeypatch, is_installed=True, difference=difference, proofs=Proofs(tmp_path))
        return choose("auto", CUDA, dtype, head_size, **options).name

    assert found("it differs") == "reference"
    assert found(None) == "triton"
    assert found("it differs") == "triton"
    assert found("it differs", dtype=torch.float16) == "reference"
    assert found("it differs", head_size=128) == "reference"
    assert found("it differs", batch_invariant=True) == "reference"


def put_triton(
    monkeypatch: pytest.MonkeyPatch,
    is_installed: bool,
    error: Exception | None = None,
    difference: str | None = None,
    proofs: Proofs = NO_PROOFS,
) -> None:
    """Replace the kernels and their comparison, neither of which runs without a GPU."""

    class FakeTriton:
        name = "triton"

        @staticmethod
        def is_available() -> bool:
            return is_installed

        def __init__(self, *, exact: bool) -> None:
            if error is not None:
                raise error
            self.exact = exact

    def compare(backend: FakeTriton, *_: object, exact: bool) -> str | None:
        vars(backend).update(is_compared_exactly=exact)
        return difference

    monkeypatch.setattr(triton_paged, "TritonAttention", FakeTriton)
    monkeypatch.setattr(attention_check, "disagreement", compare)
    monkeypatch.setattr(proofs_module, "proofs_of", lambda device: proofs)
