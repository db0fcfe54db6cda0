"""What the runner chooses where the configuration leaves it open, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.info import EngineInfo
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.runner import hardware, runner
from gptserve.engine.runner.kv_cache import cache_memory_bytes
from gptserve.engine.runner.memory import kv_bytes_per_token
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families import load_config
from tests.conftest import MakeGPT2
from tests.engine.backends.cpu import onednn
from tests.engine.runs import make_engine, make_request, run, token_ids


def info(folder: Path, **options: Any) -> EngineInfo:
    return make_engine(folder, **options).info


def test_auto_dtype_is_bf16_exactly_where_the_cpu_multiplies_it_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_dir=Path(), dtype="auto")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for has_instruction, is_built, dtype in (
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda supported=has_instruction: supported)
        monkeypatch.setattr(native, "is_available", lambda is_built=is_built: is_built)
        assert hardware.choose_dtype(config, torch.device("cpu")) is dtype


def test_bf16_is_refused_where_neither_our_own_products_nor_onednns_compute_it(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN has it with AVX-512 only."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    if native.is_available():
        assert info(tiny_gpt2, dtype="bfloat16").dtype == "bfloat16"
    monkeypatch.setattr(native, "is_available", lambda: False)
    with pytest.raises(InvalidConfigurationError, match=r"^dtype 'bfloat16' is not supported by this CPU"):
        make_engine(tiny_gpt2, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not supported on the CPU; use 'bfloat16' or 'float32'"),
        ({"max_model_len": 129}, "max_model_len must be at most the model's context of 128 tokens, got 129"),
    ],
)
def test_a_setting_this_model_or_device_cannot_take_is_refused(
    tiny_gpt2: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigurationError) as caught:
        make_engine(tiny_gpt2, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"num_blocks": 10**12}, f"num_blocks {10**12}"), ({"kv_cache_bytes": 2**60}, "kv_cache_bytes")],
)
def test_a_cache_larger_than_the_memory_is_refused_with_both_numbers(
    tiny_gpt2: Path, options: dict[str, Any], asked: str
) -> None:
    with pytest.raises(
        InvalidConfigurationError, match=rf"^{asked} asks for [\d,]+ bytes of KV cache, but only [\d,]+ bytes "
    ):
        make_engine(tiny_gpt2, **options)


def test_a_context_that_does_not_fit_is_shortened_and_served_to_its_end(
    tiny_gpt2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = make_engine(tiny_gpt2, num_blocks=3)
    assert engine.info.max_model_len == 48
    assert "max_model_len is 48 tokens instead of the model's context of 128, because num_blocks is 3" in caplog.text
    assert len(token_ids(run(engine, [make_request("r", [1, 2], max_tokens=46, ignore_eos=True)])["r"])) == 46
    with pytest.raises(InvalidConfigurationError, match="too small for one sequence of max_model_len 128"):
        make_engine(tiny_gpt2, num_blocks=3, max_model_len=128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(tiny_gpt2: Path) -> None:
    with pytest.raises(InvalidConfigurationError, match="device is 'cuda', but torch sees no CUDA device"):
        make_engine(tiny_gpt2, device="cuda")


def test_a_doubtful_key_is_warned_of_or_refused_if_strict(
    tiny_gpt2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_gpt2, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    info(tmp_path, strict_config=True)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"residual_multiplier": 1.0}))

    info(tmp_path)

    assert [text for text in caplog.messages if "sets `residual_multiplier` to 1.0" in text]
    with pytest.raises(UnsupportedModelError, match=r"sets `residual_multiplier` to 1\.0, which"):
        make_engine(tmp_path, strict_config=True)


def test_the_context_may_be_shortened(tiny_gpt2: Path) -> None:
    assert info(tiny_gpt2, max_model_len=50).max_model_len == 50
    assert info(tiny_gpt2).max_model_len == 128


def test_the_fingerprint_changes_with_whatever_changes_numbers(tiny_gpt2: Path, make_gpt2: MakeGPT2) -> None:
    same = {info(tiny_gpt2).fingerprint, info(tiny_gpt2, max_num_seqs=2, block_size=8).fingerprint}
    others = {
        info(tiny_gpt2, dtype="bfloat16").fingerprint,
        info(tiny_gpt2, kv_cache_dtype="int8").fingerprint,
        info(make_gpt2(initializer_range=0.21)).fingerprint,
    }
    assert len(same) == 1
    assert len(same | others) == 4


def test_the_fingerprint_changes_with_the_shape_and_not_with_what_ends_a_text(tiny_gpt2: Path, tmp_path: Path) -> None:
    seen = []
    for change in ({}, {"eos_token_id": 7}, {"layer_norm_epsilon": 0.1}, {"n_head": 2}, {"scale_attn_weights": False}):
        config = json.loads((tiny_gpt2 / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes((tiny_gpt2 / "model.safetensors").read_bytes())
        seen.append(info(tmp_path).fingerprint)
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


def test_the_size_of_the_cache_is_told(tiny_gpt2: Path) -> None:
    told = info(tiny_gpt2, num_blocks=20)
    assert told.kv_cache_bytes == 20 * told.block_size * kv_bytes_per_token(load_config(tiny_gpt2), 4)
    assert told.kv_cache_dtype == "float32"


def test_a_cache_in_int8_of_the_same_bytes_has_more_blocks(tiny_gpt2: Path) -> None:
    model, wide = load_config(tiny_gpt2), info(tiny_gpt2, kv_cache_bytes=2**20)
    codes = info(tiny_gpt2, kv_cache_bytes=2**20, kv_cache_dtype="int8")
    assert wide.num_blocks == 2**20 // (wide.block_size * kv_bytes_per_token(model, 4))
    assert codes.num_blocks == 2**20 // (codes.block_size * kv_bytes_per_token(model, 1)) > 2 * wide.num_blocks
    assert codes.kv_cache_dtype == "int8"


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """torch as a machine of 64 cores starts it, in a container that may use 2 of them."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
        torch.set_num_threads(64)
        yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(("asked", "max_threads"), [(None, 2), (1, 1), (3, 3)])
def test_threads_are_as_many_as_cpus_may_be_used_unless_told(
    tiny_gpt2: Path, asked: int | None, max_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        make_engine(tiny_gpt2, num_threads=asked)
    assert f"threads: at most {max_threads} a step, on 2 usable CPUs" in caplog.text
    assert torch.get_num_threads() == max_threads


@pytest.mark.usefixtures("torch_threads")
def test_attention_scratch_of_all_threads_is_kept_free(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def asking(config: EngineConfig, device: torch.device, scratch_bytes: int) -> tuple[int, int]:
        asked.append(scratch_bytes)
        return cache_memory_bytes(config, device, scratch_bytes)

    monkeypatch.setattr("gptserve.engine.runner.step_memory.cache_memory_bytes", asking)
    for num_threads in (1, 2):
        make_engine(tiny_gpt2, num_threads=num_threads)
    assert asked[1] == 2 * asked[0]
    assert (asked[0] > 0) == CpuAttention.is_available()


@pytest.mark.usefixtures("torch_threads")
def test_a_step_leaves_torch_its_threads(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2, num_threads=2)
    run(engine, [make_request("r", [1, 2], max_tokens=3)])
    assert torch.get_num_threads() == 2


@pytest.mark.some(1)
@pytest.mark.usefixtures("torch_threads")
@pytest.mark.skipif(not native.is_available(), reason="the library is not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("is_built", "threads"), [(True, (1, 2)), (False, (2, 1))])
def test_either_torch_or_the_team_has_threads(
    tiny_gpt2: Path, dtype: str, is_built: bool, threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_built:
        if dtype == "bfloat16" and not onednn.has_bf16:
            pytest.skip("oneDNN has no bf16 for this CPU")
        monkeypatch.setattr(native, "is_available", lambda: False)
    seen, compute = set(), Decoder.step

    def computing(*arguments: Any) -> Any:
        seen.add((torch.get_num_threads(), native.num_threads()))
        return compute(*arguments)

    monkeypatch.setattr("gptserve.engine.runner.runner.num_step_threads", lambda work, **limits: 2)
    monkeypatch.setattr(Decoder, "step", computing)
    engine = make_engine(tiny_gpt2, num_threads=2, dtype=dtype, attention_backend="reference")  # torch has a part
    seen.clear()
    run(engine, [make_request("r", [1, 2], max_tokens=3)])
    assert seen == {threads}


@pytest.mark.usefixtures("torch_threads")
def test_the_host_of_a_gpu_computes_on_one_thread_of_torch(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes a step: what the host does for a GPU is small."""
    engine = make_engine(tiny_gpt2, num_threads=2, attention_backend="reference")
    seen, compute = set(), Decoder.step

    def computing(*arguments: Any) -> Any:
        seen.add(torch.get_num_threads())
        return compute(*arguments)

    monkeypatch.setattr(Decoder, "step", computing)
    monkeypatch.setattr(engine._runner, "_is_cpu", False)
    monkeypatch.setattr(engine._runner, "_in_team", False)
    run(engine, [make_request("r", [1, 2], max_tokens=3)])
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_without_the_kernel_auto_warns_and_the_kernel_by_name_is_refused(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuAttention, "is_available", staticmethod(lambda: False))
    with caplog.at_level(logging.WARNING):
        assert info(tiny_gpt2).attention_backend == "reference"
    assert "missing or stale" in caplog.text
    with pytest.raises(InvalidConfigurationError, match="attention_backend 'cpu' cannot be used: its library"):
        make_engine(tiny_gpt2, attention_backend="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine on which torch sees no GPU")
def test_a_gpu_that_torch_does_not_see_is_told(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "version")
    for driver, device, num_warnings in ((False, "auto", 0), (True, "cpu", 0), (True, "auto", 1)):
        if driver:
            (tmp_path / "version").touch()
        assert hardware.choose_device(EngineConfig(model_dir=tiny_gpt2, device=device)).type == "cpu"
        assert len(caplog.messages) == num_warnings
    assert caplog.messages == [
        "device: 'cpu', which is slower, is used instead of 'cuda': this machine has NVIDIA's driver, but "
        f"torch {torch.__version__} sees no CUDA device"
    ]


def test_without_the_library_and_onednn_the_loss_of_exactness_is_told(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert make_engine(tiny_gpt2).info.batch_invariant
    assert "oneDNN" not in caplog.text
    assert "batch_invariant=yes" in caplog.text
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(native, "is_available", lambda: False)
    with caplog.at_level(logging.DEBUG):
        engine = make_engine(tiny_gpt2)
    assert "there is neither the compiled library nor torch's oneDNN" in caplog.text
    assert "batch_invariant=no" in caplog.text
    assert not engine.info.batch_invariant
    assert len(token_ids(run(engine, [make_request("r", [1, 2], max_tokens=3)])["r"])) == 3


def test_a_head_size_the_kernel_cannot_compute_takes_the_reference(make_gpt2: MakeGPT2) -> None:
    assert info(make_gpt2(n_embd=12, n_head=1)).attention_backend == "reference"


def test_progress_ends_at_the_whole_models_bytes(tiny_gpt2: Path) -> None:
    from gptserve.engine.runner.runner import ModelRunner

    seen: list[tuple[int, int]] = []
    ModelRunner(EngineConfig(model_dir=tiny_gpt2, kv_cache_bytes=2**24), lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (seen[-1][1], (tiny_gpt2 / "model.safetensors").stat().st_size - header_bytes(tiny_gpt2))


def header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def test_a_step_that_computes_a_part_of_a_prompt_is_awaited(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[torch.device]()
    monkeypatch.setattr(runner, "begin_wait", lambda device: lambda: waits.append(device))
    # No program computes it, as on a GPU.
    engine = make_engine(tiny_gpt2, max_num_batched_tokens=8, max_num_seqs=2, attention_backend="reference")
    run(engine, [make_request("a", range(20), max_tokens=1)])
    assert waits == [torch.device("cpu")] * 2, "8 tokens, 8 more, and 4 with the one that comes after them"
