"""The stored types of quantized weights, by the quant_method of config.json.

A new one is a file that makes a StoredType, and a line in METHODS. Importing them does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown
from gptserve.weights.json_file import read_json_object
from gptserve.weights.quantized.awq import read_awq
from gptserve.weights.quantized.bitsandbytes import read_bitsandbytes
from gptserve.weights.quantized.compressed_tensors import read_compressed
from gptserve.weights.quantized.fp8 import read_fp8
from gptserve.weights.quantized.gguf import read_gguf
from gptserve.weights.quantized.gptq import read_gptq
from gptserve.weights.quantized.mlx import read_mlx
from gptserve.weights.quantized.modelopt import read_modelopt
from gptserve.weights.quantized.mxfp4 import read_mxfp4
from gptserve.weights.quantized.stored_type import PLAIN, Found, PackedType, StoredType, UnfitError
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape, StoredTensor

METHODS: Mapping[str, Callable[[RawConfig], tuple[StoredType, ...]]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "gguf": read_gguf,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mlx": read_mlx,
    "mxfp4": read_mxfp4,
}
"""What reads the section of config.json: the types that weights may have, that of most first. It raises a WeightsError
for settings that are not supported."""

_MLX = {"bits", "group_size"}
"""MLX writes these, in two sections that are alike, and names no method."""

KEYS = ("quantization_config", "compression_config", "quantization")
FILES: Mapping[str, tuple[str, str | None]] = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
"""Files that some tools write beside config.json, and once wrote instead of its section: their method, and the key of
the section if they have one."""


def stored_types(raw: RawConfig, folder: Path) -> tuple[StoredType, ...]:
    """Return the stored types of the quantized weights that config.json names; none if they are all floats.

    Which weights have which, the names, shapes and dtypes of their tensors show: see `type_of`. Raises a WeightsError
    for what cannot be read.
    """
    found: tuple[StoredType, ...] = ()
    for section, method in _sections(raw, folder):
        if method is None or method not in METHODS:
            how = f"by the method {shown(method)}, which" if method else "in a way that"
            raise UnsupportedModelError(
                f"the weights are quantized {how} gptserve cannot read ({section.file_name}); use a checkpoint of this "
                f"model in fp32, fp16 or bf16, or one that is quantized by {', '.join(METHODS)}"
            )
        found += METHODS[method](section)
    return tuple(dict.fromkeys(found))


def _sections(raw: RawConfig, folder: Path) -> Iterator[tuple[RawConfig, str | None]]:
    """Yield the sections that say how weights are quantized, and their method as far as they name one."""
    keys = [key for key in KEYS if key in raw]
    for key in keys:
        value = raw.value(key)
        if not isinstance(value, dict):
            raise raw.error(key, "an object")
        section = RawConfig(value, f"config.json: {key}")
        method = section.value("quant_method", "mlx" if set(section.names()) >= _MLX else None)
        yield section, method if isinstance(method, str) else None
    for name in (name for name in FILES if not keys and (folder / name).is_file()):
        its_method, its_key = FILES[name]
        section = RawConfig(read_json_object(folder / name, InvalidConfigError), name)
        yield section if its_key is None else section.section(its_key), its_method


def type_of(weight: str, shape: Shape, files: Mapping[str, StoredTensor], types: Sequence[StoredType]) -> StoredType:
    """Return which of these types the files hold the weight in: plain floats, unless they show another.

    Of several that it may be by the names, it is the one of which all tensors fit. The shape is [out, in].
    """
    found = Found.of(weight, files)
    candidates = [stored for stored in types if stored.holds(found)]
    for stored in candidates if len(candidates) > 1 else ():
        with suppress(UnfitError):
            if found.fits(stored.tensors(shape, found)):
                return stored
    return candidates[0] if candidates else PLAIN


def held_shapes(name: str, shape: Shape, stored: StoredType) -> dict[str, Shape] | None:
    """Return the canonical names and shapes of what a backend that keeps this type holds; None: it is unpacked.

    Backends keep experts alone, whose kernels read packed weights. `name` and `shape` are canonical.
    """
    if not isinstance(stored, PackedType) or ".experts." not in name or not name.endswith(".weight"):
        return None
    shapes = stored.held_shapes(shape)
    linear = name.removesuffix("weight")
    return None if shapes is None else {f"{linear}{kind}": its_shape for kind, its_shape in shapes.items()}
