"""Which backend the chooser takes for a device, a dtype and a head size, and what it says where that is slower."""

from __future__ import annotations

import pytest
import torch

from gptserve.engine.attention import choose_backend
from gptserve.engine.attention.cpu import CpuAttention
from gptserve.engine.errors import InvalidConfigurationError

CPU = torch.device("cpu")

needs_kernel = pytest.mark.skipif(not CpuAttention.is_available(), reason="installed without a compiler")


@needs_kernel
@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_takes_the_kernel_where_it_can_compute(
    head_size: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_backend("auto", CPU, dtype, head_size).name == "cpu"
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "head_size"), [(torch.float16, 64), (torch.float32, 12), (torch.bfloat16, 4), (torch.float32, 65)]
)
def test_auto_warns_and_takes_the_reference_where_the_kernel_cannot(
    dtype: torch.dtype, head_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_backend("auto", CPU, dtype, head_size).name == "reference"
    (record,) = caplog.records
    assert f"{dtype} with {head_size}" in record.getMessage()
    with pytest.raises(InvalidConfigurationError, match=f"{dtype} with {head_size}"):
        choose_backend("cpu", CPU, dtype, head_size)


def test_auto_warns_when_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gptserve.engine.native.find_spec", lambda module: None)
    assert choose_backend("auto", CPU, torch.float32, 64).name == "reference"
    assert "its library is missing" in caplog.text


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
def test_reference_is_taken_without_a_word_where_it_is_named(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_backend("reference", device, torch.float32, 64).name == "reference"
    assert not caplog.records


def test_auto_warns_on_a_gpu_that_the_slow_reference_is_used(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16, 64).name == "reference"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'reference' is used on cuda" in record.getMessage()
    assert "only 'cpu' has a kernel" in record.getMessage()
    with pytest.raises(InvalidConfigurationError, match="the device is cuda"):
        choose_backend("cpu", torch.device("cuda"), torch.float32, 64)
