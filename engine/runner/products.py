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
from gptserve.engine.backends.cpu.int8 import DenseInt8Linear, large_channels
from gptserve.engine.backends.cpu.linear import (
    NativeCodedLinear,
    NativeInt8Linear,
    NativeInt10Linear,
    NativeLinear,
    PackedLinear,
    PackedRows,
    has_onednn,
)
from gptserve.engine.config import EngineConfig, Quantization, WeightType
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.linear import Affine, DenseLinear, Linear, Rows
from gptserve.engine.runner.memory import (
    GROUPED,
    OF_STREAM,
    codes_kept,
    group_format,
    keeps_codes,
    linear_shapes,
    weight_type_of,
    width_without_groups,
)
from gptserve.weights.config import ModelConfig
from gptserve.weights.huge_pages import HugePages
from gptserve.weights.quantized.coded import GROUP, AnyFormat

logger = logging.getLogger(__name__)

Product = Literal["native", "onednn", "torch", "native_int8", "native_int10", "native_coded", "torch_int8"]
"""What multiplies: NativeLinear, PackedLinear, DenseLinear, NativeInt8Linear, NativeInt10Linear, NativeCodedLinear or
DenseInt8Linear."""

_NATIVE: dict[WeightType | None, Product] = {
    None: "native",
    "int8": "native_int8",
    "int10": "native_int10",
    **dict.fromkeys(GROUPED, "native_coded"),
}


def check_quantization(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raise InvalidConfigurationError if this model cannot be computed so; warn if that is slow."""
    if config.requantization is None:
        return
    name = f"quantization '{config.requantization}'"
    if config.tensor_parallel_size > 1:
        what = "scales of whole rows" if config.requantization == "int8" else "packed codes"
        raise InvalidConfigurationError(
            f"{name} has {what}, which are not split, got tensor_parallel_size {config.tensor_parallel_size}"
        )
    if device.type != "cpu":
        raise InvalidConfigurationError(f"{name} is computed on a CPU only, got device '{device.type}'")
    if config.requantization == "int4":
        _check_int4(model)
        return
    widest = max(num_in for num_in, _ in linear_shapes(model))
    if widest > native.MAX_INT8_DEPTH:
        raise InvalidConfigurationError(
            f"quantization 'int8' sums at most {native.MAX_INT8_DEPTH} products, but this model has rows of {widest}"
        )
    if not native.is_available():
        logger.warning("linear: without the compiled library, products in int8 are slow; int8 saves memory only")


def _check_int4(model: ModelConfig) -> None:
    """Raise InvalidConfigurationError if this model cannot be multiplied in int4 here."""
    odd = width_without_groups(model)
    if odd is not None:
        raise InvalidConfigurationError(
            f"quantization 'int4' has groups of {GROUP} inputs, but this model has rows of {odd}"
        )
    if not native.is_available():
        raise InvalidConfigurationError("quantization 'int4' is computed by the compiled library, which is missing")


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

    Only the library has int10; native.has_fast_int10() says where it is used.
    """
    fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if fits and native.is_available():
        return _NATIVE[weight_type]
    if weight_type is not None:
        assert weight_type == "int8"
        return "torch_int8"
    return "onednn" if device.type == "cpu" and has_onednn() and dtype != torch.float16 else "torch"


def build_of(product: Product, dtype: torch.dtype) -> str:
    """Return the product and what else decides its bits; the versions of torch and its libraries decide the others'."""
    match product:
        case "native":
            return f"native {native.supported_variants(8 * dtype.itemsize)[-1]} {native.digest()}"
        case (
            "native_int8" | "native_int10" | "native_coded"
        ):  # activations are those of "native", all else the same by all variants
            return f"{product} {native.digest()}"
        case _:
            return product


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """What some products take: torch's multiplies `call_rows` rows a call.

    Of a quantized weight the columns `exact_inputs`, int64 and ascending, are not quantized. Codes in groups have small
    errors where the means of inputs' squares, fp32 [in], are large. Our own products keep the weight in `memory`, or in
    memory of its own.
    """

    call_rows: int | None = None
    exact_inputs: Tensor | None = None
    squares: Tensor | None = None
    memory: HugePages | None = None


def make_linear(affine: Affine, weight_type: WeightType | None = None, options: ProductOptions | None = None) -> Linear:
    """Return the fastest exact Linear on the weight's device. The caller may drop the weight.

    `weight_type` is what becomes of the weight. On a CPU oneDNN's product and torch's round results in bf16.
    """
    options = options or ProductOptions()
    weight, others = affine.weight, (affine.bias, affine.activation)
    if not isinstance(weight, Tensor):
        return NativeCodedLinear(weight, *others, affine.out_dtype, memory=options.memory)
    terms = weight, *others
    exact, memory = options.exact_inputs, options.memory
    product = product_of(weight.device, weight.dtype, weight_type)
    match product:
        case "native":
            return NativeLinear(*terms, affine.out_dtype, memory=memory)
        case "native_coded":
            assert weight_type is not None
            its = group_format(weight_type, weight.shape[1])
            return NativeInt4Linear(weight, its, *others, affine.out_dtype, memory=memory, squares=options.squares)
        case "native_int8":
            return NativeInt8Linear(*terms, affine.out_dtype, exact_inputs=exact, memory=memory)
        case "native_int10":
            return NativeInt10Linear(*terms, affine.out_dtype, exact_inputs=exact, memory=memory)
        case "torch_int8":
            return DenseInt8Linear(*terms, affine.out_dtype, exact)
        case "onednn":
            return PackedLinear(*terms)
        case "torch":
            return DenseLinear(*terms, affine.out_dtype, options.call_rows)


class Linears:
    """Makes the fastest exact Linear of each weight of a model. A LinearMaker.

    `quantization` is that of a model of num_layers layers: memory.py says what becomes of each weight. Columns of
    outlier channels are not quantized in the linears that take the residual stream. Our own products keep their weights
    in `memory`; torch's of the shapes (in, out) in call_rows multiply so many rows a call. `squares` has the means of
    the squares of the inputs of linears, by their canonical names.
    """

    def __init__(
        self,
        quantization: Quantization | None = None,
        num_layers: int = 0,
        memory: HugePages | None = None,
        call_rows: Mapping[tuple[int, int], int] | None = None,
        squares: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._squares = squares
        self._quantization, self._num_layers = quantization, num_layers
        self._memory, self._call_rows = memory or HugePages(), call_rows or {}
        self._large_channels: Tensor | None = None

    def begin(self, embedding: Tensor, positions: Tensor | None) -> None:
        if self._quantization == "int8":
            self._large_channels = large_channels(embedding, positions)

    def make(self, name: str, affine: Affine) -> Linear:
        weight_type = weight_type_of(name, self._num_layers, self._quantization)
        exact_inputs = self._large_channels if name.rpartition(".")[2] in OF_STREAM else None
        num_out, num_in = affine.weight.shape
        options = ProductOptions(
            self._call_rows.get((num_in, num_out)), exact_inputs, self._squares.get(name), self._memory
        )
        return make_linear(affine, weight_type, options)

    def rows_of(self, linear: Linear) -> Rows | None:
        return linear.copied_rows if isinstance(linear, DenseLinear) else PackedRows.of(linear)
