"""Folders of quantized weights that are damaged, one fault each; damaged.json has the words in which they are refused.

FOLDER in the words stands for the folder that is opened.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weights.quantized.formats import AWQ, FP8, INT4, compressed, gptq, group

DOWN = "model.layers.0.mlp.down_proj."
"""The linear that is damaged, [64, 96]."""
HUGE = 2**60
ENDLESS = "re:(a|a)*(.*.*)*$!"
"""A pattern on which Python's matcher would not end."""

Damage = Callable[[Path], object]
"""Changes a good folder."""


def _config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def _section(value: object) -> Damage:
    return partial(_config, change=lambda config: config.update(quantization_config=value))


def _sections() -> Iterator[tuple[str, object]]:
    """Yield what is wrong with quantization_config, or with a value of it."""
    yield from {"a text": "gptq", "a list": [gptq()], "a number": 4, "an empty object": {}}.items()
    yield from {"no method": gptq(quant_method=None), "a method that is a number": gptq(quant_method=4)}.items()
    yield "a method without end", gptq(quant_method="gptq" * 10**5)
    for name, bits in {"missing": None, "a text": "4", "negative": -4, "huge": HUGE, "true": True, "5": 5}.items():
        yield f"GPTQ: bits {name}", gptq(bits=bits)
    for name, size in {"a text": "32", "0": 0, "-2": -2, "huge": HUGE, "a fraction": 32.5, "a list": [32]}.items():
        yield f"GPTQ: group_size {name}", gptq(group_size=size)
    yield "GPTQ: other groups", gptq(group_size=16)
    yield "GPTQ: more bits", gptq(bits=8)
    yield "GPTQ: checkpoint_format a number", gptq(checkpoint_format=2)
    yield "GPTQ: dynamic a list", gptq(dynamic=["+:.*"])
    yield "GPTQ: a rule that is a text", gptq(dynamic={"+:.*": "8"})
    yield "GPTQ: a rule of -1 bits", gptq(dynamic={"+:.*": {"bits": -1}})
    yield "AWQ: zero_point a text", {**AWQ, "zero_point": "yes"}
    yield "AWQ: no bits", {name: AWQ[name] for name in AWQ if name != "bits"}
    yield "AWQ: version a number", {**AWQ, "version": 2}
    yield "AWQ: group_size huge", {**AWQ, "group_size": 2**64}
    yield "AWQ: other groups", {**AWQ, "group_size": 48}
    yield "AWQ: groups that do not divide", {**AWQ, "group_size": 40}
    blocks = {"a text": "128x128", "one size": [128], "negative": [-32, 16], "true": [True, 16], "0": [0, 0]}
    for name, block in {**blocks, "other": [64, 64], "a list of lists": [[32], [16]]}.items():
        yield f"FP8: weight_block_size {name}", {**FP8, "weight_block_size": block}
    yield "FP8: no blocks", {"quant_method": "fp8"}
    yield "FP8: fmt a number", {**FP8, "fmt": 8}
    for name, groups in {"missing": None, "a list": [], "empty": {}, "a number": {"a": 1}}.items():
        yield f"packed: config_groups {name}", {**compressed("pack-quantized"), "config_groups": groups}
    yield "packed: 65 groups", compressed("pack-quantized", *([group(**INT4)] * 65))
    weights = {"no num_bits": {"num_bits": None}, "num_bits a text": {"num_bits": "4"}, "a type": {"type": "bool"}}
    weights |= {"a strategy": {"strategy": 1}, "group_size 0": {"group_size": 0}, "group_size -5": {"group_size": -5}}
    weights |= {"other groups": {"group_size": 48}, "no block": {"strategy": "block"}, "more bits": {"num_bits": 8}}
    for name, fields in {**weights, "a block": {"strategy": "block", "block_structure": "32x16"}}.items():
        yield f"packed: {name}", compressed("pack-quantized", group(**INT4 | fields))
    yield "packed: weights a list", compressed("pack-quantized", {**group(), "weights": [4]})
    yield "packed: no format", compressed("pack-quantized", group(**INT4), format=None)
    yield "packed: a group's format", compressed("pack-quantized", {**group(**INT4), "format": "dense"})
    yield "packed: sparsity_config a text", compressed("pack-quantized", group(**INT4), sparsity_config="none")
    yield "modelopt: no quant_algo", {"quant_method": "modelopt"}
    yield "modelopt: quant_algo a list", {"quant_method": "modelopt", "quant_algo": ["NVFP4"]}
    yield "bitsandbytes: words of other bytes", {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}
    yield "MLX: no group_size", {"bits": 4, "quant_method": "mlx"}
    yield "MLX: 3 bits", {"bits": 3, "group_size": 32}
    yield "MLX: group_size huge", {"bits": 4, "group_size": HUGE}
    yield "MLX: a mode", {"bits": 4, "group_size": 32, "mode": "nvfp4"}
    yield "MLX: bits of a module", {"bits": 4, "group_size": 32, "lm_head": {"bits": "8", "group_size": 32}}
    sizes = {str(number): {"bits": 4, "group_size": number + 1} for number in range(17)}
    yield "MLX: many types", {"bits": 4, "group_size": 32, **sizes}


_FORMAT_OF = {"GPTQ": "gptq", "AWQ": "awq", "FP8": "fp8", "modelopt": "nvfp4 of modelopt", "MLX": "mlx"}
_FORMAT_OF |= {"bitsandbytes": "four bits"}


def _tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Set tensors of the linear by the endings of their names; None takes one out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for ending, tensor in changes.items():
        tensors.pop(DOWN + ending, None)
        tensors |= {} if tensor is None else {DOWN + ending: tensor}
    save_file(tensors, path)


def _state(**values: object) -> Tensor:
    """Return the quant_state of bitsandbytes; one value may be wrong."""
    state = {"shape": [64, 96], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.25, **values}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
_I32, _U8, _E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn


def _endings() -> Iterator[tuple[str, str, dict[str, Tensor | None]]]:
    """Yield what is wrong with the tensors of a linear: the fault, the format and the tensors."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    yield "no codes", "gptq", {"qweight": None}
    yield "no scales", "gptq", {"scales": None}
    yield "no zeros", "gptq", {"qzeros": None}
    yield "scales of integers", "gptq", {"scales": zeros(3, 64, dtype=_I32)}
    yield "scales of 64 bits", "gptq", {"scales": zeros(3, 64, dtype=torch.float64)}
    yield "scales turned", "gptq", {"scales": zeros(64, 3)}
    yield "scales that are no numbers", "gptq", {"scales": zeros(3, 64) + torch.nan}
    yield "an infinite scale", "awq", {"scales": zeros(3, 64) + torch.inf}
    yield "a group out of range", "gptq with act-order", {"g_idx": torch.full((96,), 2**31 - 1, dtype=_I32)}
    yield "a group below 0", "gptq with act-order", {"g_idx": torch.full((96,), -(2**31), dtype=_I32)}
    yield "groups of fewer inputs", "gptq with act-order", {"g_idx": zeros(95, dtype=_I32)}
    yield "groups of 64 bits", "gptq with act-order", {"g_idx": zeros(96, dtype=torch.int64)}
    yield "codes of bytes", "awq", {"qweight": zeros(96, 8, dtype=_U8)}
    yield "zeros of a group too few", "awq", {"qzeros": zeros(2, 8, dtype=_I32)}
    yield "no scales", "awq", {"scales": None}
    yield "a bias that is no vector", "awq", {"bias": zeros(8, 8) + 1}
    yield "no scales", "packed", {"weight_scale": None}
    yield "scales that are no numbers", "packed", {"weight_scale": zeros(64, 3, dtype=torch.bfloat16) + torch.nan}
    yield "no shape", "packed", {"weight_shape": None}
    yield "zeros of other words", "packed, asymmetric", {"weight_zero_point": zeros(8, 4, dtype=_I32)}
    yield "zeros that are floats", "packed, asymmetric", {"weight_zero_point": zeros(8, 3)}
    yield "a group out of range", "packed with act-order", {"weight_g_idx": torch.full((96,), 3, dtype=_I32)}
    yield "codes of 16 bits", "integers", {"weight": zeros(64, 96, dtype=torch.int16)}
    yield "scales of groups", "integers", {"weight_scale": zeros(64, 3)}
    yield "a zero for each row", "integers, asymmetric", {"weight_zero_point": zeros(64, 1, dtype=torch.int8)}
    yield "a scale for each input", "floats", {"weight_scale": zeros(1, 96)}
    yield "another kind of floats", "floats", {"weight": zeros(64, 96).to(torch.float8_e5m2)}
    yield "a scale that is infinite", "floats of a tensor", {"weight_scale": zeros(1) + torch.inf}
    yield "fewer blocks", "floats of blocks", {"weight_scale": zeros(1, 6)}
    yield "no scale", "fp8", {"weight_scale_inv": None}
    yield "two scales", "fp8", {"weight_scale": zeros(2, 6)}
    yield "scales that are no numbers", "fp8", {"weight_scale_inv": zeros(2, 6) + torch.nan}
    yield "scales of a block too many", "fp8", {"weight_scale_inv": zeros(3, 6)}
    yield "no scale of all", "nvfp4", {"weight_global_scale": None}
    yield "a scale of all of 0", "nvfp4", {"weight_global_scale": torch.zeros(1)}
    yield "scales of 32 inputs", "nvfp4", {"weight_scale": zeros(64, 3).to(_E4M3)}
    yield "scales that are no numbers", "nvfp4", {"weight_scale": (zeros(64, 6) + torch.nan).to(_E4M3)}
    yield "scales of bytes", "nvfp4 of modelopt", {"weight_scale": zeros(64, 6, dtype=_U8)}
    yield "an infinite scale of all", "nvfp4 of modelopt", {"weight_scale_2": torch.tensor(torch.inf)}
    yield "several scales", "fp8 of modelopt", {"weight_scale": zeros(64, 1)}
    yield "scales of floats", "mxfp4", {"weight_scale": zeros(64, 3)}
    yield "scales that are no numbers", "mxfp4", {"weight_scale": zeros(64, 3, dtype=_U8) + 255}
    yield "codes of half the inputs", "mxfp4", {"weight_packed": zeros(64, 24, dtype=_U8)}
    yield "no biases", "mlx", {"biases": None}
    yield "signed codes", "mlx", {"weight": zeros(64, 12, dtype=_I32)}
    yield "biases that are no numbers", "mlx", {"biases": zeros(64, 3) + torch.nan}
    yield "scales of other groups", "mlx", {"scales": zeros(64, 6)}
    yield "no state", "four bits", {STATE: None}
    yield "a state of a megabyte", "four bits", {STATE: zeros(2**20, dtype=_U8)}
    yield "a state that is no object", "four bits", {STATE: torch.tensor([0x34], dtype=_U8)}
    yield "a state nested without end", "four bits", {STATE: torch.full((4096,), ord("["), dtype=_U8)}
    yield "a state of a huge shape", "four bits", {STATE: _state(shape=[HUGE, HUGE])}
    yield "a state of huge blocks", "four bits", {STATE: _state(blocksize=HUGE)}
    yield "a block size of 64.0", "four bits", {STATE: _state(blocksize="64")}
    yield "a table of 15", "four bits", {"weight.quant_map": torch.zeros(15)}
    yield "a table of infinities", "four bits", {"weight.quant_map": torch.zeros(16) + torch.inf}
    yield "no factors", "four bits", {"weight.absmax": None}
    yield "factors that are no numbers", "four bits", {"weight.absmax": torch.zeros(96) + torch.nan}
    yield "an offset that is a text", "four bits, nested", {STATE: _state(nested_offset="0.25")}
    yield "an offset that is infinite", "four bits, nested", {STATE: _state(nested_offset=float("inf"))}
    yield "nested factors of another table", "four bits, nested", {"weight.nested_quant_map": torch.zeros(16)}
    yield "no factors", "eight bits", {"SCB": None}
    yield "a factor for each input", "eight bits", {"SCB": torch.zeros(96)}
    yield "factors that are no numbers", "eight bits", {"SCB": torch.zeros(64) + torch.nan}


def _header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the safetensors file; its data stay."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def _entry(ending: str, **fields: object) -> Damage:
    return partial(_header, change=lambda header: header[DOWN + ending].update(fields))


def _shards(folder: Path, weight_map: object) -> None:
    """Have an index instead of the one file, which becomes a.safetensors; * in its map stands for all tensors."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    if weight_map == "*":
        weight_map = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _linked(folder: Path) -> None:
    _shards(folder, {"a": "a.safetensors", "b": "b.safetensors"})
    (folder / "b.safetensors").symlink_to("b.safetensors")


def _same_shard_twice(folder: Path) -> None:
    _shards(folder, {"a": "a.safetensors", "b": "b.safetensors"})
    (folder / "b.safetensors").symlink_to("a.safetensors")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 99)


def _files() -> Iterator[tuple[str, str, Damage]]:
    """Yield what is wrong with files: the fault, the format and the damage."""
    yield "a file that is cut", "awq", _cut
    yield "an offset of 2^60", "gptq", _entry("qweight", data_offsets=[HUGE, HUGE + 3072])
    yield "offsets below 0", "gptq", _entry("qweight", data_offsets=[-3072, 0])
    yield "offsets of another tensor", "gptq", _entry("scales", data_offsets=[0, 384])
    yield "a shape of 2^60", "mlx", _entry("weight", shape=[HUGE, 12])
    yield "a shape of 2^120", "mlx", _entry("weight", shape=[HUGE, HUGE])
    yield "a shape below 0", "mlx", _entry("weight", shape=[-64, -12])
    yield "a shape of texts", "mlx", _entry("weight", shape=["64", "12"])
    yield "an unknown dtype", "packed", _entry("weight_packed", dtype="I4")
    yield "a dtype that is a number", "packed", _entry("weight_packed", dtype=4)
    yield "a tensor that is a text", "packed", partial(_header, change=lambda header: header.update(a="F32"))
    yield "a shard outside", "fp8", partial(_shards, weight_map={"a": "../a.safetensors"})
    yield "a shard that is missing", "fp8", partial(_shards, weight_map={"a": "b.safetensors"})
    yield "shards in a list", "fp8", partial(_shards, weight_map=["a.safetensors"])
    yield "a shard that links to itself", "fp8", _linked
    yield "a shard that is another one", "fp8", _same_shard_twice
    yield "a quantize_config.json that is a list", "gptq", partial(_beside, text="[4]")
    yield "a quantize_config.json without end", "gptq", partial(_beside, text="[" * 10**6)
    yield "a quantize_config.json of 3 bits", "gptq", partial(_beside, text='{"bits": 3}')


def _beside(folder: Path, text: str) -> None:
    """Have the file that AutoGPTQ writes, instead of the section of config.json."""
    _config(folder, lambda config: config.pop("quantization_config"))
    (folder / "quantize_config.json").write_text(text, encoding="utf-8")


DAMAGED: dict[str, tuple[str, Damage]] = {
    **{
        f"quantization_config: {name}": (
            _FORMAT_OF.get(name.partition(":")[0], "packed" if name.startswith("packed") else "gptq"),
            _section(value),
        )
        for name, value in _sections()
    },
    **{f"{form}: {name}": (form, partial(_tensors, changes=changes)) for name, form, changes in _endings()},
    **{f"{form}: {name}": (form, damage) for name, form, damage in _files()},
}
"""From the name of a fault to that of the format whose folder has it, and the damage."""

READ: dict[str, tuple[str, Damage]] = {
    "names that a pattern without end leaves out": ("awq", _section({**AWQ, "modules_to_not_convert": [ENDLESS] * 99})),
    "modules that a pattern without end chooses": (
        "packed",
        _section(compressed("pack-quantized", {**group(**INT4), "targets": [ENDLESS]}, ignore=[ENDLESS, "re:("])),
    ),
    "a rule for a pattern without end": ("gptq", _section(gptq(dynamic={ENDLESS: {"bits": 8}, "-:(": {}}))),
    "a shape that is not that of the codes": (
        "packed",
        partial(_tensors, changes={"weight_shape": torch.tensor([HUGE, HUGE])}),
    ),
    "shards in an index": ("fp8", partial(_shards, weight_map="*")),
}
"""What does no harm: patterns are never matched, as the tensors show how each weight is stored."""
