"""The Triton kernels of gpu/operations.py: norms, rotary positions, gates, products with the chosen experts and
their weighted sum.

A row of a product is summed in one order, whatever the routing: its bits depend neither on the other rows nor on its
place in a tile. The other kernels have a program for each row, or for columns of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gptserve.engine.backends.gpu.kernels.attention import dot, tanh


@triton.jit
def normalize(
    x,
    term,
    total,
    weight,
    bias,
    residual,
    out,
    row_stride,
    vector_stride,
    eps,
    IS_LAYERNORM: tl.constexpr,
    VECTORS: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Normalize one of the VECTORS of a row, in fp32, and add the residual to the rounded result.

    They share their weights, or each has OWN_WEIGHTS.

    With a term, x + term is stored in `total`, and normalized.
    """
    vector = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_in = column < WIDTH
    place = vector // VECTORS * row_stride + vector % VECTORS * vector_stride
    wide = tl.load(x + place + column, is_in, other=0.0).to(tl.float32)
    if term is not None:
        added = tl.load(term + vector * WIDTH + column, is_in, other=0.0)
        rounded = (wide + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + vector * WIDTH + column, rounded, is_in)
        wide = rounded.to(tl.float32)
    if IS_LAYERNORM:
        wide = tl.where(is_in, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if weight is not None:
        if OWN_WEIGHTS:
            weight += vector % VECTORS * WIDTH
        y *= tl.load(weight + column, is_in, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + column, is_in, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if residual is not None:
        added = tl.load(residual + vector * WIDTH + column, is_in, other=0.0)
        y = (y.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + vector * WIDTH + column, y, is_in)


@triton.jit(do_not_specialize_on_alignment=("slots",))
def rotate_and_write(
    heads,
    cos,
    sin,
    key_cache,
    value_cache,
    slots,
    row_stride,
    wave_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Rotate a query of a row in place, or store a rotated key or a value at the row's slot, unless that is -1.

    x[i] and x[i + NUM_PAIRS] are a pair, rotated in fp32; what is beyond 2 * NUM_PAIRS stays as it is.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if (head >= NUM_HEADS) & (slot < 0):
        return
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    place = ((slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_SIZE
    source = heads + row * row_stride + head * HEAD_SIZE
    if head < NUM_HEADS:
        target = source
    elif head < NUM_HEADS + NUM_KV_HEADS:
        target = key_cache + place
    else:
        target = value_cache + place

    num_pairs = tl.where(head < NUM_HEADS + NUM_KV_HEADS, NUM_PAIRS, 0)
    pair = tl.arange(0, PADDED_PAIRS)
    is_pair = pair < num_pairs
    a = tl.load(source + pair, is_pair, other=0.0).to(tl.float32)
    b = tl.load(source + NUM_PAIRS + pair, is_pair, other=0.0).to(tl.float32)
    c = tl.load(cos + row * wave_stride + pair, is_pair, other=0.0)
    s = tl.load(sin + row * wave_stride + pair, is_pair, other=0.0)
    tl.store(target + pair, (a * c - b * s).to(target.dtype.element_ty), is_pair)
    tl.store(target + NUM_PAIRS + pair, (b * c + a * s).to(target.dtype.element_ty), is_pair)
    column = tl.arange(0, PADDED)
    is_kept = (column >= 2 * num_pairs) & (column < HEAD_SIZE)
    tl.store(target + column, tl.load(source + column, is_kept), is_kept)


@triton.jit
def gate(x, out, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute gated(x) of activation.py for COLUMNS of a row, in fp32 and rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = column < WIDTH
    place = x + row * (2 * WIDTH) + column
    left = tl.load(place, is_in, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, is_in, other=0.0).to(tl.float32)
    if LIMIT is not None:
        left = tl.minimum(left, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
    y = activate(left, ACTIVATION) * up
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), is_in)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of this name, as activation.py defines it."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu_sigmoid":
        y = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        y = relu(x)
    elif ACTIVATION == "relu2":
        y = relu(x) * relu(x)
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "tanh")
        y = tanh(x)
    return y


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)  # NaN stays


@triton.jit(do_not_specialize=("num_experts",))
def multiply_experts(
    x,
    weight,
    scales,
    bias,
    out,
    pairs,
    starts,
    num_experts,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply ROWS pairs of one expert with COLUMNS of its outputs. EXPERTS is num_experts or more.

    An expert has as many tiles as its pairs need, and none without pairs; tiles are counted over all experts. With
    scales, one for each GROUP inputs, the weight is in MXFP4.
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
        if scales is None:
            place_NK = weight_row_N[:, None] * NUM_IN + k[None, :]
            weight_NK = tl.load(weight + place_NK, is_column_N[:, None] & is_k[None, :], other=0.0)
        else:
            wide_NK = load_mxfp4(weight, scales, weight_row_N, is_column_N, depth, NUM_IN, GROUP, DEPTH)
            weight_NK = wide_NK.to(x_MK.dtype)
        acc_MN = dot(x_MK, tl.trans(weight_NK), acc_MN)
    if bias is not None:
        acc_MN += tl.load(bias + weight_row_N, is_column_N, other=0.0).to(tl.float32)[None, :]
    place_MN = pair_M[:, None] * NUM_OUT + column_N[None, :]
    tl.store(out + place_MN, acc_MN.to(out.dtype.element_ty), is_row_M[:, None] & is_column_N[None, :])


@triton.jit
def load_mxfp4(blocks, scales, row_N, is_row_N, depth, NUM_IN: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """Return the inputs from `depth` on, DEPTH of each row, in fp32, which is exact; those beyond NUM_IN are 0."""
    ROWS: tl.constexpr = row_N.shape[0]
    pair = depth // 2 + tl.arange(0, DEPTH // 2)
    is_pair_NK = is_row_N[:, None] & (pair < NUM_IN // 2)[None, :]
    byte_NK = tl.load(blocks + row_N[:, None] * (NUM_IN // 2) + pair[None, :], is_pair_NK, other=0).to(tl.int32)
    group = depth // GROUP + tl.arange(0, DEPTH // GROUP)
    is_group_NG = is_row_N[:, None] & (group < NUM_IN // GROUP)[None, :]
    place_NG = row_N[:, None] * (NUM_IN // GROUP) + group[None, :]
    exponent_NG = tl.load(scales + place_NG, is_group_NG, other=0).to(tl.int32)
    # As the exponent of an fp32 number; 2**-127 has none.
    power_NG = tl.where(exponent_NG == 0, 1 << 22, exponent_NG << 23).to(tl.float32, bitcast=True)
    number_NKP = tl.join(decode_e2m1(byte_NK & 15), decode_e2m1(byte_NK >> 4))
    number_NGI = number_NKP.reshape(ROWS, DEPTH // GROUP, GROUP) * power_NG[:, :, None]
    return number_NGI.reshape(ROWS, DEPTH)


@triton.jit
def decode_e2m1(code):
    """Return the fp32 values of 4-bit floats: sign, exponent and mantissa at their places, with the exponent raised."""
    bits = (code & 8) << 28 | (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


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
