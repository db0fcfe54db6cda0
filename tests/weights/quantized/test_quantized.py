"""Folders of quantized weights stream the floats that they mean, bit for bit; others are refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.errors import InvalidCheckpointError, InvalidConfigError, UnsupportedModelError, WeightsError
from gptserve.weights.families import load_config
from gptserve.weights.inventory import stored_parts
from gptserve.weights.quantized.stored_type import PLAIN
from gptserve.weights.sharding import WHOLE, Share
from tests.parity.models import write_model
from tests.weights.quantized.formats import AWQ, E4M3, FORMATS, FP8, INT4, LLAMA, compressed, gptq, group, write
from tests.weights.quantized.packers import write_quantized


def stream(folder: Path, dtype: torch.dtype = torch.float32, share: Share = WHOLE) -> dict[str, Tensor]:
    return dict(Checkpoint(folder, load_config(folder), share).stream(dtype=dtype, device="cpu"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Give the folder of a format, and that with its floats."""
    done: dict[tuple[str, str], tuple[Path, Path]] = {}

    def give(name: str, model_type: str = "llama") -> tuple[Path, Path]:
        if (name, model_type) not in done:
            folder = tmp_path_factory.mktemp("model") / "quantized"
            done[name, model_type] = folder, write(folder, FORMATS[name], model_type)
        return done[name, model_type]

    return give


def all_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_streams_the_floats_that_it_means(
    name: str, dtype: torch.dtype, written: Callable[..., tuple[Path, Path]]
) -> None:
    folder, plain = written(name)
    found, expected = stream(folder, dtype), stream(plain, dtype)
    assert all_equal(found, expected)
    down = "blocks.1.ffn_down.weight"
    assert not all_equal(found, expected | {down: expected[down].roll(1, 0)})


@pytest.mark.some(4)
@pytest.mark.parametrize("share", [Share(0, 2), Share(1, 2)], ids=str)
@pytest.mark.parametrize("name", ["gptq with act-order", "awq", "fp8", "packed, asymmetric", "packed and floats"])
def test_a_rank_has_its_rows_and_columns(name: str, share: Share, written: Callable[..., tuple[Path, Path]]) -> None:
    folder, plain = written(name)
    assert all_equal(stream(folder, share=share), stream(plain, share=share))


@pytest.mark.some(3)
@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "packed, asymmetric"])
def test_fused_interleaved_and_transposed_projections(
    name: str, model_type: str, written: Callable[..., tuple[Path, Path]]
) -> None:
    """A quantized linear is [out, in], also where plain files have [in, out]."""
    folder, plain = written(name, model_type)
    assert all_equal(stream(folder), stream(plain))


@pytest.mark.parametrize("name", ["gptq with act-order, others for each", "gptq of both", "awq"])
def test_experts_are_read_one_by_one(name: str, written: Callable[..., tuple[Path, Path]]) -> None:
    folder, plain = written(name, "mixtral")
    assert any(".experts." in name for name in load_file(folder / "model.safetensors"))
    assert all_equal(stream(folder), stream(plain))


def test_a_quantized_model_takes_fewer_bytes_of_the_files(written: Callable[..., tuple[Path, Path]]) -> None:
    folder, plain = written("packed")
    sizes = [Checkpoint(its, load_config(its)).num_bytes for its in (folder, plain)]
    assert sizes[0] < sizes[1] / 2


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FORMATS)
def test_the_inventory_counts_all_bytes_of_the_files_by_their_types(
    name: str, written: Callable[..., tuple[Path, Path]]
) -> None:
    folder, _ = written(name)
    config = load_config(folder)
    parts = list(stored_parts(folder, config))
    used, downs = Checkpoint(folder, config), [part for part in parts if part.canonical.endswith("ffn_down.weight")]

    assert sum(part.num_bytes for part in parts) == used.num_bytes
    assert {part.type for part in parts} - {"F32"} == {stored.name for stored in used.stored_types} - {PLAIN.name}
    assert {(part.number, part.num_parts) for part in parts if "qkv" in part.canonical} == {(0, 3), (1, 3), (2, 3)}
    assert {part.num_weights for part in downs} == {64 * 96}
    assert all(part.num_bytes < 2 * part.num_weights for part in downs)


@pytest.mark.parametrize(
    ("name", "form", "wraps"),
    [
        ("quantize_config.json", "gptq", lambda section: section),
        ("quant_config.json", "awq of rows", lambda section: section),
        ("hf_quant_config.json", "nvfp4 of modelopt", lambda section: {"quantization": section}),
    ],
)
def test_an_old_folder_has_a_file_instead_of_the_section(
    name: str,
    form: str,
    wraps: Callable[[dict[str, Any]], dict[str, Any]],
    written: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    folder, plain = written(form)
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    section = config.pop("quantization_config")
    (copy / "config.json").write_text(json.dumps(config))
    (copy / name).write_text(json.dumps(wraps({key: section[key] for key in section if key != "quant_method"})))
    assert all_equal(stream(copy), stream(plain))


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_a_file_that_repeats_the_config_is_no_obstacle(
    name: str, written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, plain = written("gptq")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / name).write_text("{}")
    assert all_equal(stream(copy), stream(plain))


def test_modules_that_are_not_converted_stay_as_they_are(tmp_path: Path) -> None:
    """Whether a list in config.json names them or not: their tensors show it."""
    form = FORMATS["awq"]
    section = {**form.section, "modules_to_not_convert": ["re:.*self_attn.*", "model.layers.1.mlp"]}
    write_model(tmp_path / "quantized", "llama", LLAMA)
    plain = write_quantized(
        tmp_path / "quantized",
        section,
        lambda module: None if "self_attn" in module or ".1." in module else form.of(module),
    )
    assert all_equal(stream(tmp_path / "quantized"), stream(plain))


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_a_head_may_be_quantized(tied: bool, tmp_path: Path) -> None:
    """As MLX has them."""
    form = FORMATS["mlx"]
    write_model(tmp_path / "quantized", "llama", {**LLAMA, "tie_word_embeddings": tied})
    plain = write_quantized(tmp_path / "quantized", form.section, lambda module: form.packer)
    found = stream(tmp_path / "quantized")
    assert ("head.weight" in found) == (not tied)
    assert all_equal(found, stream(plain))


SECTIONS: dict[str, tuple[Mapping[str, Any], str]] = {
    "2 bits": (gptq(bits=2), "bits must be 4 or 8, got 2: others are not read"),
    "3 bits": (gptq(bits=3), "bits must be 4 or 8, got 3: others are not read"),
    "3 bits of some": (
        gptq(dynamic={"+:.*": {"bits": 3}}),
        "dynamic: +:.*: bits must be 4 or 8, got 3: others are not read",
    ),
    "marlin": (
        gptq(checkpoint_format="marlin"),
        "checkpoint_format must be gptq, gptq_v2, got 'marlin': others are not read",
    ),
    "AWQ's gemv": ({**AWQ, "version": "gemv"}, "version must be gemm, got 'gemv': others are not read"),
    "AWQ of 8 bits": ({**AWQ, "bits": 8}, "bits must be 4, got 8: others are not read"),
    "AWQ without zeros": (
        {**AWQ, "zero_point": False},
        "zero_point must be true, got False: AWQ without zeros is not read",
    ),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt must be e4m3, float8_e4m3fn, got 'e5m2': others are not read"),
    "6-bit floats": (
        compressed("mxfp6-pack-quantized", group(**E4M3)),
        "format must be pack-quantized, int-quantized, float-quantized, naive-quantized, nvfp4-pack-quantized, "
        "mxfp4-pack-quantized, mixed-precision, got 'mxfp6-pack-quantized': others are not read",
    ),
    "W4A8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo must be nvfp4, fp8, got 'W4A8_AWQ': others are not read",
    ),
    "2:4": (
        compressed("pack-quantized", group(**INT4), sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config: format must be dense, got 'sparse-24-bitmask': others are not read",
    ),
    "transforms": (
        compressed("pack-quantized", group(**INT4), transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "transform_config: config_groups must be absent: transformed weights are not read",
    ),
    "packed 6 bits": (
        compressed("pack-quantized", group(**INT4 | {"num_bits": 6})),
        "config_groups: group_0: weights: num_bits must be 4 or 8, got 6: others are not read",
    ),
    "floats of 4 bits": (
        compressed("float-quantized", group(**E4M3 | {"num_bits": 4})),
        "config_groups: group_0: weights: num_bits must be 8, got 4: others are not read",
    ),
    "groups of floats": (
        compressed("float-quantized", group(**E4M3 | {"strategy": "tensor_group"})),
        "config_groups: group_0: weights: strategy must be tensor, channel, group, block, got 'tensor_group': others "
        "are not read",
    ),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    section, message = SECTIONS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, "quantization_config": section}))
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"config.json: quantization_config: {message}"


@pytest.mark.parametrize("method", ["exl2", "exl3", "aqlm", "hqq", "torchao", "quip"])
def test_a_method_that_is_not_known_is_named(method: str, tmp_path: Path) -> None:
    section = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, "quantization_config": section}))
    with pytest.raises(UnsupportedModelError, match=rf"^the weights are quantized by the method '{method}', which "):
        load_config(tmp_path)


def spoil(folder: Path, target: Path, **changed: Tensor | None) -> Path:
    """Copy a folder with other tensors of the first down projection; None takes one out."""
    copy = Path(shutil.copytree(folder, target))
    tensors = load_file(copy / "model.safetensors")
    for ending, tensor in changed.items():
        tensors.pop(f"model.layers.0.mlp.down_proj.{ending}", None)
        tensors |= {} if tensor is None else {f"model.layers.0.mlp.down_proj.{ending}": tensor}
    save_file(tensors, copy / "model.safetensors")
    return copy


def state_of(**values: Any) -> Tensor:
    """Return the quant_state of bitsandbytes with these values."""
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


SPOILT: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "no scales": ("gptq", {"scales": None}, r"1 missing \(layers\.0\.mlp\.down_proj\.scales\)$"),
    "other words": (
        "gptq",
        {"qweight": torch.zeros(11, 64, dtype=torch.int32)},
        r"1 misshapen \(model\.layers\.0\.mlp\.down_proj\.qweight is \[11, 64\], expected \[12, 64\]\)$",
    ),
    "other types": (
        "awq",
        {"qzeros": torch.zeros(3, 8)},
        r"1 mistyped \(model\.layers\.0\.mlp\.down_proj\.qzeros is F32, expected one of I32\)$",
    ),
    "a weight beside its codes": (
        "awq",
        {"weight": torch.zeros(64, 96)},
        r"1 unexpected \('model\.layers\.0\.mlp\.down_proj\.weight'\)$",
    ),
    "a group too high": (
        "gptq with act-order",
        {"g_idx": torch.full((96,), 3, dtype=torch.int32)},
        r"^layers\.0\.mlp\.down_proj\.weight is in GPTQ, which takes groups of inputs in \[0, 3\), got 3 to 3$",
    ),
    "a group too low": (
        "packed with act-order",
        {"weight_g_idx": torch.full((96,), -1, dtype=torch.int32)},
        r"down_proj\.weight is in compressed-tensors, which takes groups of inputs in \[0, 3\), got -1 to -1$",
    ),
    "a scale too few": (
        "fp8",
        {"weight_scale_inv": torch.zeros(1, 6)},
        r"1 misshapen \(.*weight_scale_inv is \[1, 6\], expected \[2, 6\]\)$",
    ),
    "a state that is none": (
        "four bits",
        {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)},
        r"down_proj\.weight is in bitsandbytes' 4 bits, which takes a quant_state in JSON$",
    ),
    "a state of other blocks": (
        "four bits",
        {"weight.quant_state.bitsandbytes__nf4": state_of(shape=[64, 96], blocksize=128)},
        r"down_proj\.weight is in bitsandbytes' 4 bits, which takes a quant_state with blocksize 64, got 128$",
    ),
    "a state of another shape": (
        "four bits",
        {"weight.quant_state.bitsandbytes__nf4": state_of(shape=[96, 64], blocksize=64)},
        r"which takes a quant_state with shape \[64, 96\], got \[96, 64\]$",
    ),
    "an offset that is no number": (
        "four bits, nested",
        {"weight.quant_state.bitsandbytes__nf4": state_of(shape=[64, 96], blocksize=64, nested_offset=float("nan"))},
        r"which takes a quant_state with a finite nested_offset, got nan$",
    ),
    "a format of other rows": (
        "eight bits",
        {"weight_format": torch.tensor(1, dtype=torch.uint8)},
        r"which takes a weight_format of 0, rows, got 1$",
    ),
    "8-bit floats without scales": (
        "fp8",
        {"weight_scale_inv": None},
        r"1 mistyped \(layers\.0\.mlp\.down_proj\.weight is F8_E4M3, expected one of BF16, F16, F32\)$",
    ),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", SPOILT)
def test_tensors_that_do_not_fit_are_named(
    name: str, written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    form, changed, message = SPOILT[name]
    folder = spoil(written(form)[0], tmp_path / "spoilt", **changed)
    with pytest.raises(InvalidCheckpointError, match=message):
        stream(folder)


def test_a_bias_of_zeros_is_no_obstacle_and_another_one_is(
    written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """Older GPTQ files have one for each linear."""
    folder, plain = written("gptq")
    bias = torch.zeros(64, dtype=torch.float16)
    assert all_equal(stream(spoil(folder, tmp_path / "zeros", bias=bias)), stream(plain))
    bias[63] = 1
    message = r"1 unexpected \('model\.layers\.0\.mlp\.down_proj\.bias'\)$"
    with pytest.raises(InvalidCheckpointError, match=message):
        stream(spoil(folder, tmp_path / "one", bias=bias))


def test_scales_of_a_cache_are_no_obstacle_in_a_quantized_folder_and_are_one_in_others(tmp_path: Path) -> None:
    form = FORMATS["packed"]
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    folder = tmp_path / "quantized"
    plain = write(folder, replace(form, section={**form.section, "kv_cache_scheme": cache}))
    for its in (folder, plain):
        scales = {f"model.layers.1.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
        save_file(load_file(its / "model.safetensors") | scales, its / "model.safetensors")
    with pytest.raises(InvalidCheckpointError, match=r"2 unexpected \('model\.layers\.1\.self_attn\.k_scale'; "):
        stream(plain)
    save_file(
        {name: its for name, its in load_file(plain / "model.safetensors").items() if name not in scales},
        plain / "model.safetensors",
    )
    assert all_equal(stream(folder), stream(plain))


def test_a_width_that_fills_no_word_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "quantized", "llama", LLAMA)
    write_quantized(tmp_path / "quantized", FORMATS["awq"].section, FORMATS["awq"].of)
    path = tmp_path / "quantized" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 100}))
    takes = r"layers\.0\.mlp\.gate_proj\.weight is in AWQ, which takes a multiple of 8 outputs, expected \[100, 64\]"
    with pytest.raises(InvalidCheckpointError, match=takes):
        stream(tmp_path / "quantized")


FUZZED = (
    "gptq with act-order",
    "awq",
    "fp8",
    "packed, asymmetric",
    "packed and floats",
    "mlx of both",
    "four bits, nested",
)
VALUES = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 3, 4, 8, 2**31, 2**63, 0.5, "", "a", [], {}, [0, 0], [1, 1], [2**62, 1], {"a": 1}]
)


def change_one(value: Any, data: st.DataObject) -> Any:
    """Return the JSON value with another one at some place."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: change_one(value[key], data)}
    return data.draw(VALUES)


@settings(max_examples=4 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_configuration_or_header_is_refused_in_one_sentence_or_read(
    data: st.DataObject, written: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    form = data.draw(st.sampled_from(FUZZED))
    folder = Path(shutil.copytree(written(form)[0], tmp_path / "changed", dirs_exist_ok=True))
    if data.draw(st.booleans()):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        section = change_one(config["quantization_config"], data)
        path.write_text(json.dumps(config | {"quantization_config": section}))
    else:
        content = bytearray((folder / "model.safetensors").read_bytes())
        length = int.from_bytes(content[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(8, 8 + length))] = data.draw(st.sampled_from(b'0129[]{},:"FIU'))
        (folder / "model.safetensors").write_bytes(content)
    try:
        stream(folder)
    except WeightsError as error:
        assert "\n" not in str(error)  # noqa: PT017 - some changes leave a good folder


def test_more_rules_than_any_file_has_are_refused(tmp_path: Path) -> None:
    section = gptq(dynamic={f"+:{number}": {"group_size": number + 1} for number in range(65)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, "quantization_config": section}))
    with pytest.raises(InvalidConfigError, match="dynamic must be at most 64 rules, got"):
        load_config(tmp_path)
