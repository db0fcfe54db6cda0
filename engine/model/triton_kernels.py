"""The Triton kernels of triton_operations.py: products with the chosen experts, and their weighted sum.

A row of a product is summed in one order, whatever the routing: its bits depend neither on the other rows nor on its
place in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gptserve.engine.attention.triton_kernels import dot


@triton.jit(do_not_specialize=("num_experts",))
def multiply_experts(
    x,
    weight,
    bias,
    out,
    pairs,
    starts,
    num_experts,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply ROWS pairs of one expert with COLUMNS of its outputs. EXPERTS is num_experts or more.

    An expert has as many tiles as its pairs need, and none without pairs; tiles are counted over all experts.
    """
    tile = tl.program_id(1)
    e = tl.arange(0, EXPERTS)
    start_E = tl.load(starts + e, e < num_experts, other=0)
    count_E = tl.load(starts + e + 1, e < num_experts, other=0) - start_E
    tiles_E = (count_E + ROWS - 1) // ROWS
    end_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum((end_E <= tile).to(tl.int32), 0)
    if expert >= num_experts:
        return
    is_its_E = e == expert
    start = tl.sum(tl.where(is_its_E, start_E, 0), 0)
    count = tl.sum(tl.where(is_its_E, count_E, 0), 0)
    first = (tile - tl.sum(tl.where(is_its_E, end_E - tiles_E, 0), 0)) * ROWS
    row_M = first + tl.arange(0, ROWS)
    is_row_M = row_M < count
    pair_M = tl.load(pairs + start + row_M, is_row_M, other=0)
    column_N = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_N = column_N < NUM_OUT
    weight_row_N = expert.to(tl.int64) * NUM_OUT + column_N
    x_row_M = pair_M // PAIRS_PER_ROW
    acc_MN = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for depth in range(0, NUM_IN, DEPTH):
        k = depth + tl.arange(0, DEPTH)
        is_k = k < NUM_IN
        x_MK = tl.load(x + x_row_M[:, None] * NUM_IN + k[None, :], is_row_M[:, None] & is_k[None, :], other=0.0)
        place_NK = weight_row_N[:, None] * NUM_IN + k[None, :]
        weight_NK = tl.load(weight + place_NK, is_column_N[:, None] & is_k[None, :], other=0.0)
        acc_MN = dot(x_MK, tl.trans(weight_NK), acc_MN)
    if bias is not None:
        acc_MN += tl.load(bias + weight_row_N, is_column_N, other=0.0).to(tl.float32)[None, :]
    place_MN = pair_M[:, None] * NUM_OUT + column_N[None, :]
    tl.store(out + place_MN, acc_MN.to(out.dtype.element_ty), is_row_M[:, None] & is_column_N[None, :])


@triton.jit
def sum_experts(parts, weights, residual, out, NUM_ACTIVE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the parts of one row, each times its weight, in the order of the pairs, and then the residual."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = column < WIDTH
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for i in range(NUM_ACTIVE):
        pair = row * NUM_ACTIVE + i
        total += tl.load(weights + pair) * tl.load(parts + pair * WIDTH + column, is_in, other=0.0)
    y = total.to(out.dtype.element_ty)
    if residual is not None:  # rounded before and after, as torch does
        added = tl.load(residual + row * WIDTH + column, is_in, other=0.0)
        y = (y.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, y, is_in)
