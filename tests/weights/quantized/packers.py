"""Random weights in the layouts of quantized files, beside the floats that they mean.

Each packer takes the shape [out, in] of a weight and returns its tensors, by the endings of their names, and the floats
in fp32. It follows the definition of its format with sums of powers, and shares nothing with what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[tuple[int, int], torch.Generator], Packed]


def words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 [rows, n * bits / 32] of codes [rows, n], the first in the lowest bits, with zeros behind them."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    powers = torch.tensor([2 ** (bits * place) for place in range(per_word)])
    return (padded.unflatten(-1, (-1, per_word)) * powers).sum(-1).to(torch.int32)


def draw(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2**bits, shape, generator=generator)


def draw_scales(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def gptq(
    bits: int = 4, group_size: int = 32, version: int = 1, act_order: bool = False, symmetric: bool = False
) -> Packer:
    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        num_out, num_in = shape
        size = num_in if group_size == -1 else group_size
        groups = torch.arange(num_in) // size
        if act_order:
            groups = groups[torch.randperm(num_in, generator=generator)]
        num_groups = -(-num_in // size)
        codes, zeros = draw(shape, bits, generator), draw((num_out, num_groups), bits, generator)
        if symmetric:
            zeros.fill_(2 ** (bits - 1))
        scales = draw_scales((num_out, num_groups), torch.float16, generator)
        floats = scales.float()[:, groups] * (codes - zeros[:, groups])
        stored_zeros = words(zeros.t(), bits)
        if version == 1:  # a zero of 0 borrows from the next one of its word
            stored_zeros -= sum(2**place for place in range(0, 32, bits))
        tensors = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": stored_zeros,
            "scales": scales.t().contiguous(),
            "g_idx": groups.to(torch.int32),
        }
        return tensors, floats

    return pack


def awq(group_size: int = 32) -> Packer:
    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        num_out, num_in = shape
        size = num_in if group_size == -1 else group_size
        groups = torch.arange(num_in) // size
        codes, zeros = draw(shape, 4, generator), draw((num_out, num_in // size), 4, generator)
        scales = draw_scales((num_out, num_in // size), torch.float16, generator)

        def pack_outputs(values: Tensor) -> Tensor:
            order = [8 * word + place for word in range(num_out // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
            return words(values.t()[:, order], 4)

        tensors = {"qweight": pack_outputs(codes), "qzeros": pack_outputs(zeros), "scales": scales.t().contiguous()}
        return tensors, scales.float()[:, groups] * (codes - zeros[:, groups])

    return pack


def fp8(block: tuple[int, int] | None = (32, 16), scale: str = "weight_scale_inv") -> Packer:
    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        if block is None:
            scales = draw_scales((), torch.float32, generator)
            return {"weight": weight, scale: scales}, weight.float() * scales
        num_rows, num_columns = (-(-size // its) for size, its in zip(shape, block, strict=True))
        scales = draw_scales((num_rows, num_columns), torch.float32, generator)
        rows, columns = (torch.arange(size) // its for size, its in zip(shape, block, strict=True))
        return {"weight": weight, scale: scales}, weight.float() * scales[rows][:, columns]

    return pack


def packed(bits: int = 4, group_size: int | None = 32, symmetric: bool = True, act_order: bool = False) -> Packer:
    """compressed-tensors' pack-quantized."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        num_out, num_in = shape
        size = group_size or num_in
        groups = torch.arange(num_in) // size
        if act_order:
            groups = groups[torch.randperm(num_in, generator=generator)]
        num_groups = -(-num_in // size)
        codes, zeros = draw(shape, bits, generator), draw((num_out, num_groups), bits, generator)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        scales = draw_scales((num_out, num_groups), torch.bfloat16, generator)
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
        tensors |= {} if symmetric else {"weight_zero_point": words(zeros.t(), bits).t().contiguous()}
        tensors |= {"weight_g_idx": groups.to(torch.int32)} if act_order else {}
        return tensors, scales.float()[:, groups] * (codes - zeros[:, groups])

    return pack


def integers(strategy: str = "channel", symmetric: bool = True, dtype: torch.dtype = torch.float32) -> Packer:
    """compressed-tensors' int-quantized."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        codes = (draw(shape, 8, generator) - 128).to(torch.int8)
        its_shape = (shape[0], 1) if strategy == "channel" else (1,)
        scales = draw_scales(its_shape, dtype, generator)
        zeros = torch.zeros_like(scales) if symmetric else draw(its_shape, 7, generator) - 64
        tensors = {"weight": codes, "weight_scale": scales}
        tensors |= {} if symmetric else {"weight_zero_point": zeros.to(torch.int8)}
        return tensors, (codes.float() - zeros) * scales

    return pack


def floats(strategy: str = "channel", block: tuple[int, int] = (32, 16)) -> Packer:
    """compressed-tensors' float-quantized, with the scales of activations beside them."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        if strategy == "block":
            return fp8(block, "weight_scale")(shape, generator)
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scales = draw_scales((shape[0], 1) if strategy == "channel" else (1,), torch.bfloat16, generator)
        tensors = {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}
        return tensors, weight.float() * scales.float()

    return pack


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NVFP4_ENDINGS = ("weight_packed", "weight_scale", "weight_global_scale")
"""Of compressed-tensors."""


def draw_e2m1(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    """Return two codes a byte, the first in the lower half, and the numbers."""
    codes = draw(shape, 4, generator)
    numbers = E2M1[codes % 8] * (1 - 2 * (codes // 8))
    return {"": (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)}, numbers


def nvfp4(endings: tuple[str, str, str] = NVFP4_ENDINGS) -> Packer:
    """compressed-tensors' or modelopt's, which has the reciprocal of the scale of all."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        codes, numbers = draw_e2m1(shape, generator)
        scales = draw_scales((shape[0], shape[1] // 16), torch.float32, generator) * 2000
        of_groups, of_all = scales.to(torch.float8_e4m3fn), torch.tensor([1500.0])
        tensors = dict(zip(endings, (codes[""], of_groups, of_all), strict=True))
        scales = of_groups.float() / of_all
        if endings != NVFP4_ENDINGS:
            of_all = torch.tensor(1 / 1500)
            tensors |= {endings[2]: of_all, "input_scale": torch.tensor(0.5)}
            scales = of_groups.float() * of_all
        return tensors, numbers * scales[:, torch.arange(shape[1]) // 16]

    return pack


def mxfp4() -> Packer:
    """compressed-tensors' mxfp4-pack-quantized."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        codes, numbers = draw_e2m1(shape, generator)
        exponents = torch.randint(-9, -3, (shape[0], shape[1] // 32), generator=generator)
        tensors = {"weight_packed": codes[""], "weight_scale": (exponents + 127).to(torch.uint8)}
        return tensors, numbers * (2.0**exponents)[:, torch.arange(shape[1]) // 32]

    return pack


def mlx(bits: int = 4, group_size: int = 32) -> Packer:
    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        groups = torch.arange(shape[1]) // group_size
        codes = draw(shape, bits, generator)
        scales, biases = (draw_scales((shape[0], int(groups[-1]) + 1), torch.bfloat16, generator) for _ in range(2))
        tensors = {"weight": words(codes, bits).view(torch.uint32), "scales": scales, "biases": -biases}
        return tensors, codes * scales.float()[:, groups] - biases.float()[:, groups]

    return pack


def four_bits(is_nested: bool = False) -> Packer:
    """bitsandbytes', with a table of no known kind."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        num = shape[0] * shape[1]
        codes, table = draw((num,), 4, generator), torch.randn(16, generator=generator)
        absmax = draw_scales((-(-num // 64),), torch.float32, generator)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        tensors = {
            "weight": (16 * codes[::2] + codes[1::2]).to(torch.uint8)[:, None],
            "weight.absmax": absmax,
            "weight.quant_map": table,
        }
        if is_nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            its_codes, its_table = draw((len(absmax),), 8, generator), torch.rand(256, generator=generator)
            its_absmax = draw_scales((-(-len(absmax) // 256),), torch.float32, generator)
            absmax = its_table[its_codes] * its_absmax[torch.arange(len(absmax)) // 256] + 0.25
            nested = {"absmax": its_codes.to(torch.uint8), "nested_absmax": its_absmax, "nested_quant_map": its_table}
            tensors |= {f"weight.{name}": tensor for name, tensor in nested.items()}
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (table[codes] * absmax[torch.arange(num) // 64]).reshape(shape)

    return pack


def eight_bits() -> Packer:
    """bitsandbytes'."""

    def pack(shape: tuple[int, int], generator: torch.Generator) -> Packed:
        codes = (draw(shape, 8, generator) - 128).to(torch.int8)
        factors = draw_scales((shape[0],), torch.float32, generator)
        tensors = {"weight": codes, "SCB": factors, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes * factors[:, None] * (1 / 127)

    return pack


def write_quantized(
    folder: Path, section: Mapping[str, Any], packer: Callable[[str], Packer | None], *, is_transposed: bool = False
) -> Path:
    """Quantize the linears of a model in its files; return a folder beside it with the floats that they mean.

    `packer` gives that of a module by its name, or None for one that stays as it is. is_transposed: the files have
    [in, out].
    """
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}), encoding="utf-8")
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        pack = packer(name.removesuffix(".weight")) if name.endswith(".weight") and tensor.dim() == 2 else None
        if pack is None:
            quantized[name] = tensor
            continue
        num_out, num_in = tensor.shape[::-1] if is_transposed else tensor.shape
        its, values = pack((num_out, num_in), generator)
        quantized |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in its.items()}
        tensors[name] = (values.t() if is_transposed else values).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(quantized, folder / "model.safetensors")
    return plain
