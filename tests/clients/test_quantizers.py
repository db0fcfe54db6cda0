"""Libraries that quantize: folders that they write are read here, bit for bit as they dequantize them themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.quantized_folders import write_bitsandbytes, write_compressed, write_gptqmodel
from tests.clients.environments import Environment
from tests.parity.models import write_model
from tests.weights.quantized.formats import AWQ, FORMATS, FP8
from tests.weights.quantized.packers import write_quantized
from tests.weights.quantized.test_quantized import all_equal, stream

CLIENT = "quantizers"
pytestmark = pytest.mark.clients
MODEL = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")
"""Presets of compressed-tensors."""
CASES = [(scheme, dtype) for scheme in SCHEMES for dtype in ("float32", "bfloat16")]
CASES.remove(("NVFP4A16", "float32"))  # which the library reads in bf16 alone


def convert_awq(folder: str) -> None:
    """Write the floats that compressed-tensors' reader of AWQ finds in a folder."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter
    from safetensors.torch import load_file, save_file

    tensors = load_file(f"{folder}/model.safetensors")
    converter = AutoAWQConverter.from_pretrained(folder)
    [scheme] = converter.update_config(None).config_groups.values()
    unpacker, floats = BaseCompressor.get_value_from_registry("pack-quantized"), dict(tensors)
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix("qweight")
        its = {key: floats.pop(key) for key in tensors if key.startswith(module)}
        converted = converter.process(its)
        parts = {key.removeprefix(module): value for key, value in converted.items()}
        parts["weight_scale"] = parts["weight_scale"].to(torch.float32)
        floats[f"{module}weight"] = unpacker.decompress(parts, scheme)["weight"].contiguous()
    save_file(floats, f"{folder}/floats")


def write_modelopt(folder: str, target: str, algorithm: str, has_cache: bool) -> None:
    """Write a folder with NVIDIA's modelopt, maybe with scales of a cache, and the floats that it reads from it."""
    import torch
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    settings = getattr(quantization, algorithm)
    if has_cache:
        cache = quantization.FP8_KV_CFG["quant_cfg"]
        settings = quantization.utils.update_quant_cfg_with_kv_cache_quant(settings, cache)
    quantization.quantize(model, settings, lambda its: its(torch.arange(16)[None]))
    export_hf_checkpoint(model, export_dir=target)
    tensors = load_file(f"{target}/model.safetensors")
    floats = {name: tensor for name, tensor in tensors.items() if name.endswith("weight")}
    for name, packed in floats.items():
        scale = tensors.get(f"{name}_scale")
        if packed.dtype == torch.uint8:
            shape = torch.Size((len(packed), 2 * packed.shape[1]))
            of_all = tensors[f"{name}_scale_2"]
            its = NVFP4QTensor(shape, torch.float32, packed)
            floats[name] = its.dequantize(scale=scale, double_scale=of_all, block_sizes={-1: 16})
        elif scale is not None:
            floats[name] = FP8QTensor(packed.shape, torch.float32, packed).dequantize(scale=scale)
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, f"{target}/floats")


def read_fp8(folder: str, block: list[int]) -> None:
    """Write the floats that transformers finds in a folder of blocks in FP8."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    config = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    save_file(model.state_dict(), f"{folder}/floats")


def quantize_mlx(folder: str, group_size: int, bits: int) -> None:
    """Put the linears of a folder into MLX's layout, and write the floats that it makes of them."""
    import mlx.core as mx

    tensors, floats = mx.load(f"{folder}/model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        floats[name] = tensor
        if tensor.ndim == 2:
            codes, scales, biases = mx.quantize(tensor, group_size, bits)
            floats[name] = mx.dequantize(codes, scales, biases, group_size, bits)
            tensors |= {name: codes, name.replace("weight", "scales"): scales, name.replace("weight", "biases"): biases}
    mx.save_safetensors(f"{folder}/model.safetensors", tensors)
    mx.save_safetensors(f"{folder}/floats.safetensors", floats)


def check(folder: Path, floats: Path, dtype: str = "float32") -> None:
    """Check that a folder is read as these floats, and not as other ones."""
    plain = folder.with_name("plain")
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("quantization_config", "quantization"):
        config.pop(key, None)
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: its for name, its in load_file(floats).items() if name.endswith(("weight", "bias"))}
    save_file(tensors, plain / "model.safetensors")
    found, expected = (stream(its, getattr(torch, dtype)) for its in (folder, plain))
    assert all_equal(found, expected)
    down = "blocks.1.ffn_down.weight"
    assert not all_equal(found, expected | {down: expected[down].roll(1, 0)})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", "llama", MODEL)
    return tmp_path / "model"


@pytest.mark.parametrize(("scheme", "dtype"), CASES)
def test_compressed_tensors(scheme: str, dtype: str, client: Environment, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    target.mkdir()
    shutil.copy(model / "config.json", target)
    client.call(write_compressed, str(model), str(target), scheme, dtype)
    check(target, target / "floats", dtype)


def test_scales_of_a_cache_of_compressed_tensors_are_no_obstacle(
    client: Environment, model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "quantized"
    target.mkdir()
    shutil.copy(model / "config.json", target)
    client.call(write_compressed, str(model), str(target), "FP8", "bfloat16", None, True)
    assert "model.layers.1.self_attn.v_scale" in load_file(target / "model.safetensors")
    check(target, target / "floats", "bfloat16")


def test_awq_is_what_the_reader_of_compressed_tensors_finds(client: Environment, model: Path) -> None:
    write_quantized(model, AWQ, FORMATS["awq"].of)
    client.call(convert_awq, str(model))
    check(model, model / "floats")


@pytest.mark.parametrize("kind", ["gptq", "gptq, symmetric", "awq"])
def test_gptqmodel(kind: str, client: Environment, model: Path, tmp_path: Path) -> None:
    target, method = tmp_path / "quantized", kind.partition(",")[0]
    target.mkdir()
    shutil.copy(model / "config.json", target)
    client.call(write_gptqmodel, str(model), str(target), method, 32, "symmetric" in kind)
    check(target, target / "floats", "float16")


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("algorithm", ["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"])
def test_modelopt(algorithm: str, has_cache: bool, client: Environment, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    client.call(write_modelopt, str(model), str(target), algorithm, has_cache)
    check(target, target / "floats")


def test_blocks_of_fp8_are_what_transformers_finds(client: Environment, model: Path) -> None:
    write_quantized(model, FP8, FORMATS["fp8"].of)
    client.call(read_fp8, str(model), FP8["weight_block_size"])
    check(model, model / "floats")


@pytest.mark.parametrize("kind", ["nf4", "nf4, nested", "fp4", "int8"])
def test_bitsandbytes(kind: str, client: Environment, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    client.call(write_bitsandbytes, str(model), str(target), kind.partition(",")[0], "nested" in kind)
    check(target, target / "floats")


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx(bits: int, client: Environment, model: Path) -> None:
    client.call(quantize_mlx, str(model), 64, bits)
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": bits}}), encoding="utf-8")
    floats = (model / "floats.safetensors").rename(model.parent / "floats")
    check(model, floats)
