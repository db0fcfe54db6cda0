"""Whether a row has the same bits in any batch: found out at each start, on the device and in the model's own shapes.

On a CPU the products are made to be so. On a GPU cuBLAS chooses the order of its sums by the number of rows. If
EngineConfig.batch_invariant asks for it, `set_up_device` forbids split sums, and where rows still differ, products are
computed in calls of one size. selfcheck/attention.py compares attention; model/group.py sums the terms of ranks in
their order. ModelRunner calls this, and each other rank for its own products.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from os import putenv
from typing import NoReturn

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.backends.gpu.recorded_steps import batch_sizes
from gptserve.engine.config import EngineConfig, WeightType
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.attention import AttentionBackend
from gptserve.engine.model.layout import Span, StepArrays, lay_out
from gptserve.engine.model.linear import Affine, Linear
from gptserve.engine.runner.memory import linear_shapes, weight_types
from gptserve.engine.runner.products import ProductOptions, make_linear, product_of
from gptserve.engine.runner.seeded import seeded
from gptserve.weights.config import ModelConfig

logger = logging.getLogger(__name__)

PROBED_ROWS = (1, 2, 3, 8, 9, 24, 33, 64, 65, 160, 256)
"""Row counts, ascending: small ones, and those between which oneDNN with AMX was seen to change its order of sums."""
_DRAWN = 2**16 + 1  # a prime, so that no two rows are alike
_LEAST_OF_GPU = 512  # the default of max_num_batched_tokens
_PROBED_COLUMNS = 8192  # of others' weights on a CPU: more show nothing new; cuBLAS chooses by their number
_PROBED_COLUMNS_OF_OURS = 1024  # an output of our products is computed by itself, however many there are

CALL_ROWS = 64
"""Rows of a product's call, where calls need one size: so few that a GPU should still wait for the weights."""

_PROMPT_TOKENS = 8
_BESIDE = (1, 2, 7, 63)
"""How many others a sequence is computed beside, to be compared with itself alone; and as many as a step can have."""


@dataclass(frozen=True, slots=True)
class Products:
    """Whether rows have the same bits in any batch, and how many a call computes, by the shape (in, out) of a product.

    Those of other shapes compute as many rows as there are.
    """

    are_invariant: bool
    call_rows: Mapping[tuple[int, int], int] = field(default_factory=dict)


def set_up_device(config: EngineConfig, device: torch.device) -> None:
    """Make cuBLAS multiply fp32 as fp32 and, for batch_invariant, sum each element in one piece.

    Call it before the device computes anything. TF32 has 10 bits of fp32's 23; a variable that some images set turns it
    on. Without a workspace there is no place for the parts of a split sum; both variables are read once a process. The
    flags forbid such sums in bf16 and fp16, which only cuBLASLt heeds, and parts that are rounded to 16 bits.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    if config.batch_invariant:
        putenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        putenv("CUBLASLT_WORKSPACE_SIZE", "1")
        with warnings.catch_warnings():  # torch calls this choice experimental; the products are compared at each start
            warnings.filterwarnings("ignore", ".*preferred_blas_library is an experimental feature", UserWarning)
            torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def choose_products(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend,
    num_threads: int,
) -> Products:
    """Return how products are computed; on a CPU, warn if their bits depend on the batch or on up to num_threads.

    Raises InvalidConfigurationError if they do and config.batch_invariant is set.
    """
    if device.type == "cpu":
        found = _on_cpu(config, model, device, dtype, num_threads)
    elif config.batch_invariant:
        found = _on_gpu(config, model, device, dtype, backend)
    else:
        found = Products(are_invariant=False)
    if isinstance(found, Products):
        return found
    if config.batch_invariant:
        _refuse(found)
    logger.warning("linear: the bits of answers depend on the batch: %s", found)
    return Products(are_invariant=False)


def _on_cpu(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, num_threads: int
) -> Products | str:
    """Return the products, or why they depend on the batch."""
    for weight_type in weight_types(config.requantization):
        if product_of(device, dtype, weight_type) == "torch":
            return "there is neither the compiled library nor torch's oneDNN, whose products are also faster"
        found = first_difference(linear_shapes(model), PROBED_ROWS, device, dtype, weight_type, num_threads=num_threads)
        if found is not None:
            break
    else:
        return Products(are_invariant=True)
    return f"{found}; if this CPU has AMX, ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment turns it off"


def _on_gpu(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> Products | str:
    """Return the products, in calls of one size if need be, or why rows depend on the batch even so."""
    if backend.name == "reference":
        return "attention is 'reference', whose sums on a GPU depend on the lengths of sequences"
    counts, shapes = gpu_counts(config.max_num_seqs, config.max_num_batched_tokens), linear_shapes(model)

    def difference(shape: tuple[int, int], call_rows: int | None = None) -> str | None:
        try:
            return first_difference([shape], counts, device, dtype, call_rows=call_rows)
        except RuntimeError as error:  # of a library or a GPU that no test has seen
            return f"products failed with {error}"

    found = {shape: why for shape in sorted(shapes) if (why := difference(shape)) is not None}
    if not found:
        return Products(are_invariant=True)
    instead_of = f"larger for {len(found)} of {len(shapes)} shapes"
    used = f"calls of {CALL_ROWS} rows, which are slower, are"
    warn_of_fallback("linear", used, instead_of, next(iter(found.values())))
    if (why := next(filter(None, (difference(shape, CALL_ROWS) for shape in found)), None)) is not None:
        return why
    return Products(are_invariant=True, call_rows=dict.fromkeys(found, CALL_ROWS))


def gpu_counts(max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Return the row counts that are compared on a GPU, ascending: near each power of two up to the largest step.

    cuBLAS chooses its tiles by the number of rows. At least 512 rows are compared, so that engines with smaller steps
    choose the same products.
    """
    most = max(max_num_tokens, _LEAST_OF_GPU)
    powers = [2**i for i in range(most.bit_length())]
    near = {count for power in powers for count in (power, power + 1, power + power // 2) if count < most}
    return sorted({*PROBED_ROWS, *batch_sizes(max_num_seqs), *near, most})


def first_difference(
    shapes: Iterable[tuple[int, int]],
    counts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    weight_type: WeightType | None = None,
    call_rows: int | None = None,
    num_threads: int | None = None,
) -> str | None:
    """Return which product (in, out) has other bits for some count of rows than for the last count, or None.

    A probe, not a proof: it compares these counts, and on a CPU with num_threads (None: torch's), all but
    one, half of them and one.
    """
    before = torch.get_num_threads(), native.num_threads()
    num_threads = num_threads or before[0]
    widths = {max(1, number) for number in (1, num_threads // 2, num_threads - 1, num_threads)}
    is_ours = product_of(device, dtype, weight_type).startswith("native")
    most = _PROBED_COLUMNS_OF_OURS if is_ours else _PROBED_COLUMNS

    def depends(linear: Linear, x: Tensor, whole: Tensor, num_rows: int) -> bool:
        # The last rows, so that each gets another place. They are copied, as cuBLAS chooses by the alignment, too, and
        # tensors of their own are aligned, as those of a step are.
        return not torch.equal(linear(x[-num_rows:].clone()), whole[-num_rows:])

    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before[0])
        stack.callback(native.set_num_threads, before[1])
        draw = partial(torch.randn, generator=stack.enter_context(seeded(device)), dtype=dtype, device=device)
        drawn = draw(_DRAWN) if device.type == "cpu" else None

        def rows(num_rows: int, num_columns: int) -> Tensor:
            if drawn is None:
                return draw(num_rows, num_columns)
            size = num_rows * num_columns  # drawing all of them would take as long as the products
            return drawn.repeat(-(-size // _DRAWN))[:size].view(num_rows, num_columns)

        for num_in, num_out in shapes:
            weight = rows(min(num_out, most) if device.type == "cpu" else num_out, num_in)
            bias, x = rows(1, len(weight))[0], rows(counts[-1], num_in)
            # On a GPU a bias and a wide result are other kernels.
            kinds = [(None, dtype)] if device.type == "cpu" else [(None, dtype), (bias, dtype), (None, torch.float32)]
            affines = (Affine(weight, its_bias, out_dtype=out) for its_bias, out in kinds)
            for linear in (make_linear(affine, weight_type, ProductOptions(call_rows)) for affine in affines):
                whole = linear(x)
                for width in widths if device.type == "cpu" else (num_threads,):
                    torch.set_num_threads(1 if is_ours else width)  # the team has these threads, or torch
                    native.set_num_threads(width)
                    if found := next((count for count in counts if depends(linear, x, whole, count)), None):
                        shape = f"{num_in} inputs, {num_out} outputs"
                        return f"a row of a product ({shape}) has other bits among {found} rows than among {counts[-1]}"
    return None


def check_model(
    logits_of: Callable[[StepArrays, slice], Tensor],
    config: EngineConfig,
    vocab_size: int,
    num_blocks: int,
    max_model_len: int,
) -> None:
    """Raise InvalidConfigurationError if a sequence has other logits in some step of the loaded model than alone.

    `logits_of(arrays, rows)` are those of rows of a step. Call it before any sequence owns a block.
    """
    length = min(_PROMPT_TOKENS, config.block_size, config.max_num_batched_tokens, max_model_len)
    most = min(config.max_num_seqs, config.max_num_batched_tokens // length, num_blocks)
    target, *others = (_prompt(index, length, vocab_size) for index in range(most))

    def last_logits(*spans: Span) -> Tensor:
        arrays = lay_out(spans, config.block_size)
        num_rows = len(arrays.token_ids)
        # The head gets as many rows as in a step that samples for all of them.
        return logits_of(arrays, slice(num_rows - len(spans), num_rows))[-1]

    alone = last_logits(target)
    for num_others in sorted({min(count, len(others)) for count in (*_BESIDE, len(others))}):
        if not torch.equal(last_logits(*others[:num_others], target), alone):
            _refuse(f"a sequence has other logits beside {num_others} others than alone")
    if not torch.equal(last_logits(Span(target.token_ids[-1:], length - 1, target.block_ids, 1)), alone):
        _refuse("a token has other logits in a step of its own than in that of its prompt")


def _prompt(index: int, length: int, vocab_size: int) -> Span:
    """Return a prompt whose keys lie in the block of this index."""
    return Span([(7 * index + 3 * i + 1) % vocab_size for i in range(length)], 0, [index], num_sampled=1)


def _refuse(found: str) -> NoReturn:
    raise InvalidConfigurationError(f"batch_invariant cannot be kept: {found}")
