"""What multiplies with each weight of a model: by its device and dtype, and by what quantization makes of it.

ModelRunner hands a Linears to what builds the layers, which knows nothing of packing and quantizing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int4 import NativeInt4Linear
from gptserve.engine.backends.cpu.int8 import DenseInt8Linear
from gptserve.engine.backends.cpu.linear import (
    NativeCodedLinear,
    NativeLinear,
    PackedLinear,
    PackedRows,
    has_onednn,
)
from gptserve.engine.config import EngineConfig, Quantization, WeightType
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.linear import Affine, DenseLinear, Linear, Rows
from gptserve.engine.runner.memory import (
    codes_kept,
    group_format,
    keeps_codes,
    weight_type_of,
)
from gptserve.weights.config import ModelConfig
from gptserve.weights.huge_pages import HugePages
from gptserve.weights.quantized.coded import AnyFormat
from gptserve.weights.unread import UnreadWeight

logger = logging.getLogger(__name__)

Product = Literal["native", "onednn", "torch", "native_coded", "torch_coded"]
"""What multiplies: NativeLinear, PackedLinear, DenseLinear, NativeCodedLinear or DenseInt8Linear."""


def check_quantization(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raise InvalidConfigurationError if this model cannot be computed so; warn if that is slow."""
    if config.requantization is None:
        return
    name = f"quantization '{config.requantization}'"
    if config.tensor_parallel_size > 1:
        raise InvalidConfigurationError(
            f"{name} has packed codes, which are not split, got tensor_parallel_size {config.tensor_parallel_size}"
        )
    if device.type != "cpu":
        raise InvalidConfigurationError(f"{name} is computed on a CPU only, got device '{device.type}'")
    if native.is_available():
        return
    if config.requantization == "int4":
        raise InvalidConfigurationError(f"{name} is computed by the compiled library, which is missing")
    logger.warning("linear: without the compiled library, products in int8 are slow; int8 saves memory only")


def choose_codes(
    config: EngineConfig,
    model: ModelConfig,
    formats: Mapping[str, AnyFormat],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, AnyFormat]:
    """Return which of the weights that can come as codes are multiplied as they are, by their canonical names."""
    fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return codes_kept(model, formats) if fits and keeps_codes(config) else {}


def product_of(device: torch.device, dtype: torch.dtype, weight_type: WeightType | None = None) -> Product:
    """Return what multiplies rows of this dtype on this device with weights of this dtype, or of this type.

    Without the library int8 alone can be multiplied.
    """
    fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if fits and native.is_available():
        return "native" if weight_type is None else "native_coded"
    if weight_type is not None:
        assert weight_type == "int8"
        return "torch_coded"
    return "onednn" if device.type == "cpu" and has_onednn() and dtype != torch.float16 else "torch"


def build_of(product: Product, dtype: torch.dtype) -> str:
    """Return the product and what else decides its bits; the versions of torch and its libraries decide the others'."""
    match product:
        case "native":
            return f"native {native.supported_variants(8 * dtype.itemsize)[-1]} {native.digest()}"
        case "native_coded":  # activations are those of "native", all else the same by all variants
            return f"{product} {native.digest()}"
        case _:
            return product


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """What some products take: torch's multiplies `call_rows` rows a call.

    Codes have small errors where the means of inputs' squares, fp32 [in], are large. Our own products
    keep the weight in `memory`, or in memory of its own.
    """

    call_rows: int | None = None
    squares: Tensor | None = None
    memory: HugePages | None = None


def make_linear(affine: Affine, weight_type: WeightType | None = None, options: ProductOptions | None = None) -> Linear:
    """Return the fastest exact Linear on the weight's device. The caller may drop the weight.

    `weight_type` is what becomes of the weight. On a CPU oneDNN's product and torch's round results in bf16.
    """
    options = options or ProductOptions()
    weight, others, memory = affine.weight, (affine.bias, affine.activation), options.memory
    if not isinstance(weight, Tensor | UnreadWeight):
        return NativeCodedLinear(weight, *others, affine.out_dtype, memory=memory)
    product = product_of(weight.device, weight.dtype, weight_type)
    if isinstance(weight, UnreadWeight):
        if product == "native_coded":
            return _quantized(weight, weight_type, affine, options)
        weight = weight.whole()
    terms = weight, *others
    match product:
        case "native":
            return NativeLinear(*terms, affine.out_dtype, memory=memory)
        case "native_coded":
            return _quantized(weight, weight_type, affine, options)
        case "torch_coded":
            return DenseInt8Linear(*terms, affine.out_dtype, options.squares)
        case "onednn":
            return PackedLinear(*terms)
        case "torch":
            return DenseLinear(*terms, affine.out_dtype, options.call_rows)


def _quantized(
    weight: Tensor | UnreadWeight, weight_type: WeightType | None, affine: Affine, options: ProductOptions
) -> Linear:
    assert weight_type is not None
    its, others = group_format(weight_type, weight.shape[1]), (affine.bias, affine.activation, affine.out_dtype)
    return NativeInt4Linear(weight, its, *others, memory=options.memory, squares=options.squares)


class Linears:
    """Makes the fastest exact Linear of each weight of a model. A LinearMaker.

    memory.py says what becomes of each weight of num_layers by `quantization`. Our own products keep their weights in
    `memory`; torch's of the shapes (in, out) in call_rows multiply so many rows a call. `squares` has the means of the
    squares of the inputs of linears, by their canonical names.
    """

    def __init__(
        self,
        quantization: Quantization | None = None,
        memory: HugePages | None = None,
        call_rows: Mapping[tuple[int, int], int] | None = None,
        squares: Mapping[str, Tensor] = MappingProxyType({}),
        num_layers: int = 0,
    ) -> None:
        assert num_layers or quantization != "int4", "int4 asks where in the model a layer is"
        self._squares, self._num_layers = squares, num_layers
        self._quantization = quantization
        self._memory, self._call_rows = memory or HugePages(), call_rows or {}

    def make(self, name: str, affine: Affine) -> Linear:
        weight_type = weight_type_of(name, self._quantization, self._num_layers)
        num_out, num_in = affine.weight.shape
        options = ProductOptions(self._call_rows.get((num_in, num_out)), self._squares.get(name), self._memory)
        return make_linear(affine, weight_type, options)

    def rows_of(self, linear: Linear) -> Rows | None:
        if isinstance(linear, DenseInt8Linear):
            return linear
        return linear.copied_rows if isinstance(linear, DenseLinear) else PackedRows.of(linear)
