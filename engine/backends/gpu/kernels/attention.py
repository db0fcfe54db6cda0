"""The Triton kernels of gpu/attention.py: the KV write, attention over the paged cache, and the merge of its pieces.

Keys are taken in pieces of PIECE and, within a piece, in tiles of KEYS, both counted from position 0 of a sequence. The
pieces of a row are merged in their order by one function, whether one program has them all or several share them: so
the bits of a row depend neither on other sequences nor on how the work was cut. Scores are in base 2: log2(e) times the
natural.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SEQUENCES = tl.constexpr(128)
"""So many sequences are searched at once for the owner of a row."""
ANY_SIZE = ("num_seqs", "num_tokens", "table_stride")
"""They change from step to step. Triton would compile a kernel anew for 1 and for multiples of 16."""
ANY_ADDRESS = ("query_starts", "kv_lens", "tables", "slots")
"""Parts of larger tensors; Triton would compile a kernel anew for each alignment."""


@triton.jit(do_not_specialize_on_alignment=ANY_ADDRESS)
def write(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store the keys and values of one row; a slot of -1 is padding."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    index = tl.arange(0, PADDED)
    is_in = index < NUM_KV_HEADS * HEAD_SIZE
    head, column = index // HEAD_SIZE, index % HEAD_SIZE
    place = (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = place * HEAD_SIZE + column
    tl.store(key_cache + target, tl.load(key + row * key_stride + index, is_in), is_in)
    tl.store(value_cache + target, tl.load(value + row * value_stride + index, is_in), is_in)


@triton.jit(do_not_specialize=ANY_SIZE, do_not_specialize_on_alignment=ANY_ADDRESS)
def attend(
    query,
    key_cache,
    value_cache,
    out,
    piece_acc,
    piece_max,
    piece_sum,
    query_starts,
    kv_lens,
    tables,
    slopes,
    sinks,
    scale,
    num_seqs,
    num_tokens,
    table_stride,
    query_stride,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend with ROWS of a sequence's rows and one KV head. If SPLIT, the programs of the third axis share its pieces.

    A row is a query head of a token: GROUP rows a token, as the heads of a group read the same keys. Sequence s has
    the tiles from query_starts[s] * GROUP // ROWS + s on, some of them empty.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = _owner(query_starts, num_seqs, tile, GROUP, ROWS)
    start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - start
    first_row = (tile - start * GROUP // ROWS - seq) * ROWS
    if first_row >= num_queries * GROUP:
        return
    num_before = tl.load(kv_lens + seq) - num_queries
    last_row = tl.minimum(first_row + ROWS, num_queries * GROUP) - 1
    end = num_before + last_row // GROUP + 1
    begin = tl.maximum(num_before + first_row // GROUP + 1 - WINDOW, 0) if WINDOW else 0
    first_piece, end_piece, step = begin // PIECE, (end + PIECE - 1) // PIECE, 1
    if SPLIT:
        first_piece, step = first_piece + tl.program_id(2), tl.num_programs(2)
        if first_piece >= end_piece:
            return
    row_M = first_row + tl.arange(0, ROWS)
    position_M = num_before + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    token_M = (start + row_M // GROUP).to(tl.int64)
    column_D = tl.arange(0, PADDED)
    is_row_M1, is_column_D = (row_M < num_queries * GROUP)[:, None], column_D < HEAD_SIZE
    is_in_MD = is_row_M1 & is_column_D[None, :]
    place_M1 = (token_M * query_stride + head_M * HEAD_SIZE)[:, None]
    query_MD = tl.load(query + place_M1 + column_D[None, :], is_in_MD, other=0.0)
    slope_M = tl.full([ROWS], 0.0, tl.float32) if slopes is None else tl.load(slopes + head_M)

    max_M, sum_M, acc_MD = _nothing(ROWS, PADDED)
    for piece in range(first_piece, end_piece, step):
        its_max_M, its_sum_M, its_acc_MD = _nothing(ROWS, PADDED)
        first_key = tl.maximum(piece * PIECE, begin // KEYS * KEYS)
        end_key = tl.minimum((piece + 1) * PIECE, end)
        for tile_key in range(first_key, end_key, KEYS):
            key_N = tile_key + tl.arange(0, KEYS)
            is_key_N = key_N < end_key
            block_N = tl.load(tables + seq * table_stride + key_N // BLOCK_SIZE, is_key_N, other=0).to(tl.int64)
            place_N = ((block_N * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key_N % BLOCK_SIZE) * HEAD_SIZE
            is_in_ND = is_key_N[:, None] & is_column_D[None, :]
            place_ND = place_N[:, None] + column_D[None, :]
            key_ND = tl.load(key_cache + place_ND, is_in_ND, other=0.0)
            score_MN = dot(query_MD, tl.trans(key_ND), None) * scale
            if SOFTCAP is not None:
                score_MN = SOFTCAP * tanh(score_MN / SOFTCAP)
            distance_MN = key_N[None, :] - position_M[:, None]
            score_MN = (score_MN + slope_M[:, None] * distance_MN) * LOG2E
            is_seen_MN = distance_MN <= 0
            if WINDOW:
                is_seen_MN = is_seen_MN & (distance_MN > -WINDOW)
            score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
            new_max_M = tl.maximum(its_max_M, tl.max(score_MN, 1))
            origin_M = _finite(new_max_M)
            prob_MN = tl.exp2(score_MN - origin_M[:, None])
            decay_M = tl.exp2(its_max_M - origin_M)
            its_max_M, its_sum_M = new_max_M, its_sum_M * decay_M + tl.sum(prob_MN, 1)
            value_ND = tl.load(value_cache + place_ND, is_in_ND, other=0.0)
            its_acc_MD = dot(prob_MN.to(value_ND.dtype), value_ND, its_acc_MD * decay_M[:, None])
        if SPLIT:
            place_M = (piece * num_tokens + token_M) * (GROUP * NUM_KV_HEADS) + head_M
            is_row_M = row_M < num_queries * GROUP
            tl.store(piece_max + place_M, its_max_M, is_row_M)
            tl.store(piece_sum + place_M, its_sum_M, is_row_M)
            tl.store(piece_acc + place_M[:, None] * HEAD_SIZE + column_D[None, :], its_acc_MD, is_in_MD)
        else:
            max_M, sum_M, acc_MD = _merge(max_M, sum_M, acc_MD, its_max_M, its_sum_M, its_acc_MD)
    if not SPLIT:
        result_MD = _result(max_M, sum_M, acc_MD, sinks, head_M)
        place_M = token_M * (GROUP * NUM_KV_HEADS) + head_M
        tl.store(out + place_M[:, None] * HEAD_SIZE + column_D[None, :], result_MD.to(out.dtype.element_ty), is_in_MD)


@triton.jit(do_not_specialize=ANY_SIZE, do_not_specialize_on_alignment=ANY_ADDRESS)
def merge(
    out,
    piece_acc,
    piece_max,
    piece_sum,
    query_starts,
    kv_lens,
    sinks,
    num_seqs,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Merge the pieces of one head of one token, in their order."""
    token, head = tl.program_id(0), tl.program_id(1)
    seq = _owner(query_starts, num_seqs, token, 1, 0)
    behind = tl.load(query_starts + seq + 1) - token
    if behind <= 0:
        return  # a row of padding
    position = tl.load(kv_lens + seq) - behind
    begin = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    head_1 = head + tl.arange(0, 1)
    column_D = tl.arange(0, PADDED)
    is_in_1D = (column_D < HEAD_SIZE)[None, :]
    max_1, sum_1, acc_1D = _nothing(1, PADDED)
    for piece in range(begin // PIECE, (position + PIECE) // PIECE):
        place_1 = (piece * num_tokens + token).to(tl.int64) * NUM_HEADS + head_1
        its_max_1, its_sum_1 = tl.load(piece_max + place_1), tl.load(piece_sum + place_1)
        its_acc_1D = tl.load(piece_acc + place_1[:, None] * HEAD_SIZE + column_D[None, :], is_in_1D, other=0.0)
        max_1, sum_1, acc_1D = _merge(max_1, sum_1, acc_1D, its_max_1, its_sum_1, its_acc_1D)
    result_1D = _result(max_1, sum_1, acc_1D, sinks, head_1)
    place_1 = token.to(tl.int64) * NUM_HEADS + head_1
    tl.store(out + place_1[:, None] * HEAD_SIZE + column_D[None, :], result_1D.to(out.dtype.element_ty), is_in_1D)


@triton.jit
def _owner(query_starts, num_seqs, target, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the sequence that owns the token `target` or, unless ROWS is 0, the tile `target`."""
    count = 0
    for first in range(0, num_seqs, SEQUENCES):
        seq = first + tl.arange(0, SEQUENCES)
        start = tl.load(query_starts + seq, seq < num_seqs, other=0)
        if ROWS:
            start = start * GROUP // ROWS + seq
        count += tl.sum(((start <= target) & (seq < num_seqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def dot(left, right, acc):
    """Return left @ right + acc in fp32; the model's kernels multiply by it, too."""
    if INTERPRETED:  # it holds bf16 as integers, and would multiply these
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _nothing(ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Return maximum, sum and accumulator of no keys."""
    return (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.full([ROWS], 0.0, tl.float32),
        tl.full([ROWS, PADDED], 0.0, tl.float32),
    )


@triton.jit
def _merge(max_M, sum_M, acc_MD, its_max_M, its_sum_M, its_acc_MD):
    """Return the softmax over the keys so far and those of one more piece; a piece that is not seen changes no bit."""
    new_max_M = tl.maximum(max_M, its_max_M)
    origin_M = _finite(new_max_M)
    decay_M, its_decay_M = tl.exp2(max_M - origin_M), tl.exp2(its_max_M - origin_M)
    acc_MD = acc_MD * decay_M[:, None] + its_acc_MD * its_decay_M[:, None]
    return new_max_M, sum_M * decay_M + its_sum_M * its_decay_M, acc_MD


@triton.jit
def _result(max_M, sum_M, acc_MD, sinks, head_M):
    """Return the output: the accumulator over the sum, to which the head's sink adds its share."""
    if sinks is not None:
        sink_M = tl.load(sinks + head_M) * LOG2E
        new_max_M = tl.maximum(max_M, sink_M)
        decay_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * decay_M + tl.exp2(sink_M - new_max_M)
        acc_MD = acc_MD * decay_M[:, None]
    return acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@triton.jit
def _finite(max_M):
    """Return the maximum, or 0 where no key is seen: the difference of infinities would be NaN."""
    return tl.where(max_M == float("-inf"), 0.0, max_M)


@triton.jit
def tanh(x):
    """Return tanh(x); it is exact to 1e-7 of 1, and the exponential may overflow to infinity or vanish."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
