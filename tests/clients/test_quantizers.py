"""Libraries that quantize: folders that they write are read here, bit for bit as they dequantize them themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.clients.environments import Environment
from tests.parity.models import write_model
from tests.weights.quantized.formats import AWQ, FORMATS
from tests.weights.quantized.packers import write_quantized
from tests.weights.quantized.test_quantized import all_equal, stream

CLIENT = "compressed-tensors"
pytestmark = pytest.mark.clients
MODEL = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")
"""Presets of compressed-tensors."""
CASES = [(scheme, dtype) for scheme in SCHEMES for dtype in ("float32", "bfloat16")]
CASES.remove(("NVFP4A16", "float32"))  # which the library reads in bf16 alone


def compress(folder: str, target: str, scheme: str, dtype: str) -> None:
    """Write a folder in one of the library's schemes, rounded to nearest, and the floats that it reads from it."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight, args, of_all = module.weight.data, module.quantization_scheme.weights, None
        if hasattr(module, "weight_global_scale"):
            of_all = generate_gparam(weight.amin(), weight.amax())
            module.weight_global_scale.data.copy_(of_all)
        shape = module.weight_scale.shape
        num_out, num_in = (1, 1) if len(shape) == 1 else shape
        blocks = weight.view(num_out, len(weight) // num_out, num_in, -1)
        scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, global_scale=of_all)
        module.weight_scale.data.copy_(scales.view(shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zeros.view(shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, f"{target}/model.safetensors", {"format": "pt"})
    compressor.update_config(target)
    compressor.decompress_model(model)
    floats = {name: tensor for name, tensor in model.state_dict().items() if name in tensors or "weight" in name}
    save_file({name: floats[name].contiguous() for name in floats}, f"{target}/floats")


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


def write_bitsandbytes(folder: str, target: str, kind: str, is_nested: bool) -> None:
    """Write a folder in bitsandbytes' nf4, fp4 or int8, and the floats that it makes of it."""
    import torch
    from bitsandbytes import functional
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested}
    config = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(target)
    floats = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    floats = {name: tensor for name, tensor in floats.items() if not name.endswith(("SCB", "absmax", "quant_map"))}
    for name, module in model.named_modules():
        if kind == "int8" and hasattr(module.__dict__.get("_parameters", {}).get("weight"), "SCB"):
            weight = module.weight
            floats[f"{name}.weight"] = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        elif hasattr(getattr(module, "weight", None), "quant_state"):
            floats[f"{name}.weight"] = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    floats = {name: tensor for name, tensor in floats.items() if "nested" not in name}
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, f"{target}/floats")


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
    client.call(compress, str(model), str(target), scheme, dtype)
    check(target, target / "floats", dtype)


def test_awq_is_what_the_reader_of_compressed_tensors_finds(client: Environment, model: Path) -> None:
    write_quantized(model, AWQ, FORMATS["awq"].of)
    client.call(convert_awq, str(model))
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
