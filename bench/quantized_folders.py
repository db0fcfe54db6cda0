"""Perplexity of a model in formats of quantized folders: served from the folder, and by the library of the format.

    build/clients/quantizers/bin/python -m bench.quantized_folders MODEL TEXT [--formats AWQ GPTQ W4A16 FP8 nf4]
        [--window 512] [--windows 8] [--output RESULT.json]

`python -m tests.clients.environments quantizers` makes that Python. Libraries write the folders, all rounded to
nearest: gptqmodel AWQ and GPTQ, compressed-tensors W4A16 and FP8, bitsandbytes nf4. transformers computes in fp32 what
they read from them. Prints a table and one JSON line; a difference comes with its standard error.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.int8_quality import WINDOW, WINDOWS, Comparison, cut, measure
from bench.machine import tell, versions
from gptserve.weights.tokenizers.tokenizer import Tokenizer

GROUP_SIZE = 64
"""A divisor of all widths of SmolLM2-135M."""


def write_compressed(
    folder: str, target: str, scheme: str, dtype: str, group_size: int | None = None, has_cache: bool = False
) -> None:
    """Write a folder in one of compressed-tensors' schemes, rounded to nearest, and the floats that it reads from it.

    has_cache adds scales of a KV cache in FP8.

    It uses nothing outside itself, as the other writers, which tests run in the libraries' environment.
    """
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    if group_size is not None:
        groups["group_0"].weights.group_size = group_size
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"} if has_cache else None
    settings = QuantizationConfig(config_groups=groups, ignore=["lm_head"], kv_cache_scheme=cache)
    apply_quantization_config(model, settings)
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
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, f"{target}/model.safetensors", {"format": "pt"})
    compressor.update_config(target)
    compressor.decompress_model(model)
    floats = {name: tensor for name, tensor in model.state_dict().items() if name in tensors or "weight" in name}
    save_file({name: floats[name].contiguous() for name in floats if name not in tied}, f"{target}/floats")


def write_gptqmodel(folder: str, target: str, method: str, group_size: int, is_symmetric: bool) -> None:
    """Write a folder in the layout of GPTQ or AWQ, rounded to nearest, and the floats that gptqmodel reads from it."""
    import json

    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    floats = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    tensors = {name: tensor.half() for name, tensor in floats.items()}
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    for name, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        groups = linear.weight.data.unflatten(1, (-1, group_size))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales = ((high - low) / 15).half().float()
        zeros = torch.full_like(scales, 8) if is_symmetric else (-low / scales).round().clamp(0, 15)
        least, most = ((limit - zeros)[..., None] * scales[..., None] for limit in (0, 15))
        linear.weight.data = torch.clamp(groups, least, most).flatten(1)
        kind, form = (TorchLinear, FORMAT.GPTQ_V2) if method == "gptq" else (AwqTorchLinear, FORMAT.GEMM)
        packed = kind(
            bits=4,
            group_size=group_size,
            sym=is_symmetric,
            desc_act=False,
            in_features=linear.in_features,
            out_features=linear.out_features,
            format=form,
        )
        if method == "gptq":
            packed.pack_original(linear, scales, zeros, torch.arange(linear.in_features).int() // group_size)
            packed.post_init()
            weight = packed.dequantize_weight()
            packed.qzeros = packed.qzeros.clone()
            convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=4, group_size=group_size))
        else:
            packed.pack(linear, scales, zeros)
            weight = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group_size)
        del tensors[f"{name}.weight"]
        kinds = ("qweight", "qzeros", "scales", *(("g_idx",) if method == "gptq" else ()))
        tensors |= {f"{name}.{kind}": getattr(packed, kind).contiguous() for kind in kinds}
        floats[f"{name}.weight"] = weight.t().contiguous()
    save_file(tensors, f"{target}/model.safetensors", {"format": "pt"})
    save_file(floats, f"{target}/floats")
    section = {"quant_method": method, "bits": 4, "group_size": group_size}
    gptq = {"sym": is_symmetric, "desc_act": False, "checkpoint_format": "gptq"}
    section |= gptq if method == "gptq" else {"zero_point": True, "version": "gemm"}
    with open(f"{target}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    with open(f"{target}/config.json", "w", encoding="utf-8") as file:
        json.dump(config | {"quantization_config": section}, file)


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
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    floats = {name: tensor for name, tensor in floats.items() if "nested" not in name and name not in tied}
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, f"{target}/floats")


FORMATS: dict[str, Callable[[str, str], None]] = {
    "AWQ": lambda folder, target: write_gptqmodel(folder, target, "awq", GROUP_SIZE, False),
    "GPTQ": lambda folder, target: write_gptqmodel(folder, target, "gptq", GROUP_SIZE, True),
    "W4A16": lambda folder, target: write_compressed(folder, target, "W4A16", "bfloat16", GROUP_SIZE),
    "FP8": lambda folder, target: write_compressed(folder, target, "FP8_DYNAMIC", "bfloat16"),
    "nf4": lambda folder, target: write_bitsandbytes(folder, target, "nf4", False),
}


def compute(folder: Path, floats: Path, windows: Sequence[Sequence[int]]) -> Comparison:
    """Return what transformers computes in fp32 with these weights in place of a folder's."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, names = Comparison([]), set(model.state_dict())
    values = {name: tensor.float() for name, tensor in load_file(floats).items() if name in names}
    missing = names - values.keys() - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    if missing:
        raise ValueError(f"the library reads no {', '.join(sorted(missing))}")
    model.load_state_dict(values, strict=False)
    for ids in windows:
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            found.add(model(tokens[:, :-1]).logits[0], tokens[0, 1:])
    return found


def main() -> None:
    args = parse_arguments()
    tokens = Tokenizer.of_model(args.model).encode(args.text.read_text(encoding="utf-8"))
    windows, rows = cut(tokens, args.window, args.windows), []
    print(f"{'':>8} {'served':>9} {'library':>9} {'difference':>17}")
    for name in args.formats:
        with tempfile.TemporaryDirectory() as target:
            for path in args.model.iterdir():
                if path.suffix in (".json", ".jinja"):
                    shutil.copy(path, target)
            FORMATS[name](str(args.model), target)
            library = compute(args.model, Path(target) / "floats", windows)
            served, _ = measure(Path(target), "stored", windows, [])
        figures, expected = served.figures(library), library.figures(library)["perplexity"]
        rows.append({"format": name, **figures, "library": expected})
        difference = f"{figures['change']:+.2%} ± {figures['error']:.2%}"
        print(f"{name:>8} {figures['perplexity']:>9.4f} {expected:>9.4f} {difference:>17}", flush=True)
    told = {"benchmark": "quantized_folders", "model": args.model.name, "window": args.window, "rows": rows}
    tell(told | versions(), args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of floats")
    parser.add_argument("text", type=Path, help="UTF-8 file")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
