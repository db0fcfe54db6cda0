"""The Triton kernels of gpu/sampler.py: adjusted logits, and a draw from them.

A row is cut into pieces, each with a program of its own. A weight is exp((x - max) / temperature) in fp32, or 1 for the
largest and 0 for others where temperature is 0. Sums of weights are those of whole multiples of 2**-42: exact, so they
do not depend on their order, and programs add to one place in any order. The smallest weight that a row keeps is found
by its bits, DIGIT_BITS at a time from the highest: weights that are not negative have the order of their bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)
"""Of a row in the tables. Those of a draw: noise, top_p, temperature, min_p, top_k, source; two are spare."""
SCALE = tl.constexpr(4398046511104.0)
"""2**42: weights of 2 million tokens stay below 2**63, and each is off by 1e-12 at most."""
REACHED = tl.constexpr(1 - 2e-7)
"""A mass short of top_p by the rounding of fp32 weights has reached it."""
LEVELS = tl.constexpr(8)
DIGITS = tl.constexpr(16)
MEASURES = tl.constexpr(2 * 8 * 2 * 16)
"""Of a row: by count and by mass, for each level, how many weights each digit has at or above it, and their sum."""


@triton.jit
def adjust(
    logits,
    scores,
    table,
    counts,
    drafts,
    masks,
    logits_stride,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Penalize and mask a piece of a row: steps 1 and 3 of choice.py. Bias and bans follow in torch.

    A row of the table: row, seat, row of the mask, repetition, frequency, presence, start and end of its draft. A seat
    or mask below 0 is none.
    """
    entry = table + tl.program_id(0) * COLUMNS
    row, seat = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
    mask = tl.load(entry + 2).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_in = column < VOCAB
    x = tl.load(logits + row * logits_stride + column, is_in, other=0.0)
    if seat >= 0:
        word = tl.load(counts + seat * VOCAB + column, is_in, other=0)
        count, is_seen = word >> 1, word > 0
        for i in range(tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)):
            is_drafted = column == tl.load(drafts + i)
            count += is_drafted.to(tl.int32)
            is_seen = is_seen | is_drafted
        repetition = tl.load(entry + 3).to(tl.float32)
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        penalty = tl.load(entry + 4) * count.to(tl.float64) + tl.load(entry + 5)
        x = tl.where(count > 0, x - penalty.to(tl.float32), x)
    if mask >= 0:
        word = tl.load(masks + mask * WORDS + column // 32, is_in, other=0)
        x = tl.where(((word >> (column % 32)) & 1) > 0, x, x - float("inf"))  # a NaN stays one
    tl.store(scores + row * VOCAB + column, x, is_in)


@triton.jit
def load_source(logits, scores, source, row, column, is_in, logits_stride, VOCAB: tl.constexpr):
    if source > 0:
        x = tl.load(scores + row * VOCAB + column, is_in, other=float("-inf"))
    else:
        x = tl.load(logits + row * logits_stride + column, is_in, other=float("-inf"))
    return x


@triton.jit
def find_peaks(logits, scores, table, peaks, logits_stride, VOCAB: tl.constexpr, PIECE: tl.constexpr):
    """Store the largest entry of a piece; infinity if it has a NaN."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(table + row * COLUMNS + 5)
    if source < 0:
        return
    column = piece * PIECE + tl.arange(0, PIECE)
    x = load_source(logits, scores, source, row, column, column < VOCAB, logits_stride, VOCAB)
    peak = tl.max(tl.where(x == x, x, float("inf")), 0)
    tl.store(peaks + row * tl.num_programs(1) + piece, peak)


@triton.jit
def whole(weight):
    """Return a weight as a multiple of 2**-42."""
    return (weight * SCALE).to(tl.int64)


@triton.jit
def weigh(
    logits,
    scores,
    table,
    peaks,
    sums,
    measures,
    logits_stride,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Put the weights of a piece in the place of its scores, and store their sum. Those of a row without a finite
    maximum are 0."""
    row, piece, num_pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    source = tl.load(table + row * COLUMNS + 5)
    if source < 0:
        return
    place = tl.arange(0, PADDED)
    peak = tl.max(tl.load(peaks + row * num_pieces + place, place < num_pieces, other=float("-inf")), 0)
    is_finite = tl.abs(peak) < float("inf")
    peak = tl.where(is_finite, peak, 0.0)
    column = piece * PIECE + tl.arange(0, PIECE)
    is_in = column < VOCAB
    x = tl.where(is_finite, load_source(logits, scores, source, row, column, is_in, logits_stride, VOCAB), 0.0)
    temperature = tl.load(table + row * COLUMNS + 2).to(tl.float32)
    weight = (x == peak).to(tl.float32) if temperature == 0.0 else tl.exp(tl.div_rn(x - peak, temperature))
    weight = tl.where(is_in, tl.where(is_finite, weight, 0.0), 0.0)
    tl.store(scores + row * VOCAB + column, weight, is_in)
    tl.store(sums + row * num_pieces + piece, tl.sum(whole(weight), 0))
    if piece == 0:
        tl.store(measures + row * MEASURES + tl.arange(0, MEASURES), tl.zeros([MEASURES], tl.int64))


@triton.jit
def search(measures, enough, count, mass, num_levels, BY_MASS: tl.constexpr):
    """Return the bits of the largest weight that has enough at or above it, as far as so many levels tell; how many
    weights these are, and their sum. At first they are all: `count` and `mass`."""
    level_L, digit_D = tl.arange(0, LEVELS), tl.arange(0, DIGITS)
    place_LD = measures + level_L[:, None] * 2 * DIGITS + digit_D[None, :]
    is_known_LD = (level_L[:, None] < num_levels) & (digit_D[None, :] > 0)
    count_LD = tl.load(place_LD, is_known_LD, other=0)
    mass_LD = tl.load(place_LD + DIGITS, is_known_LD, other=0)
    found_LD = mass_LD if BY_MASS else count_LD
    digit_L = tl.sum((found_LD.to(tl.float64) >= enough).to(tl.int32), 1)
    bits = tl.sum(digit_L << tl.maximum(26 - 4 * level_L, 0), 0)  # 30 bits: the last level has two
    last = tl.max(tl.where(digit_L > 0, level_L, -1), 0)
    if last >= 0:
        is_last_LD = (level_L[:, None] == last) & (digit_D[None, :] == digit_L[:, None])
        count = tl.sum(tl.sum(tl.where(is_last_LD, count_LD, 0), 1), 0)
        mass = tl.sum(tl.sum(tl.where(is_last_LD, mass_LD, 0), 1), 0)
    return bits, count, mass


@triton.jit
def has_count(entry, VOCAB: tl.constexpr):
    top_k = tl.load(entry + 4)
    return (top_k > 0) & (top_k < VOCAB)


@triton.jit
def enough_mass(entry, measures, total, VOCAB: tl.constexpr):
    """Return the mass that top_p asks for: of all, or of the top_k largest."""
    if has_count(entry, VOCAB):
        top_k = tl.load(entry + 4)
        bits, count, mass = search(measures, top_k, total * 0 + VOCAB, total, LEVELS, False)
        equal = whole(bits.to(tl.float32, bitcast=True))
        total = mass - (count - top_k.to(tl.int64)) * equal
    return REACHED * tl.load(entry + 1) * total.to(tl.float64)


@triton.jit(do_not_specialize=("level",))
def narrow(
    weights,
    table,
    sums,
    measures,
    num_pieces,
    level,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Measure a piece for each digit of a level. Rows without top_k, or by mass without top_p, have no part in it."""
    row = tl.program_id(0).to(tl.int64)
    entry, measures = table + row * COLUMNS, measures + row * MEASURES
    if tl.load(entry + 5) < 0:
        return
    place = tl.arange(0, PADDED)
    total = tl.sum(tl.load(sums + row * num_pieces + place, place < num_pieces, other=0), 0)
    if BY_MASS:
        if tl.load(entry + 1) >= 1.0:
            return
        enough = enough_mass(entry, measures, total, VOCAB)
        measures += MEASURES // 2
    else:
        if not has_count(entry, VOCAB):
            return
        enough = tl.load(entry + 4)
    start, _, _ = search(measures, enough, total * 0, total, level, BY_MASS)
    digit_D = tl.arange(0, DIGITS)
    bits_D = start + (digit_D << tl.maximum(26 - 4 * level, 0))
    count_DT = tl.zeros([DIGITS, TILE], tl.int32)
    mass_DT = tl.zeros([DIGITS, TILE], tl.int64)
    for first in range(0, PIECE, TILE):
        column = tl.program_id(1) * PIECE + first + tl.arange(0, TILE)
        is_in = column < VOCAB
        weight = tl.load(weights + row * VOCAB + column, is_in, other=0.0)
        is_above_DT = is_in[None, :] & (weight.to(tl.int32, bitcast=True)[None, :] >= bits_D[:, None])
        if not BY_MASS:
            count_DT += is_above_DT.to(tl.int32)
        mass_DT += tl.where(is_above_DT, whole(weight)[None, :], 0)
    place_D = measures + level * 2 * DIGITS + digit_D
    if not BY_MASS:
        tl.atomic_add(place_D, tl.sum(count_DT, 1).to(tl.int64))
    tl.atomic_add(place_D + DIGITS, tl.sum(mass_DT, 1))


@triton.jit
def drop(
    weights,
    table,
    sums,
    kept_sums,
    floors,
    measures,
    num_pieces,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store the smallest weight that a row keeps, and the sum of what a piece keeps."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry, measures = table + row * COLUMNS, measures + row * MEASURES
    if tl.load(entry + 5) < 0:
        return
    place = tl.arange(0, PADDED)
    total = tl.sum(tl.load(sums + row * num_pieces + place, place < num_pieces, other=0), 0)
    floor = tl.load(entry + 3).to(tl.float32)  # the largest weight is 1
    if has_count(entry, VOCAB):
        bits, _, _ = search(measures, tl.load(entry + 4), total * 0, total, LEVELS, False)
        floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    if tl.load(entry + 1) < 1.0:
        enough = enough_mass(entry, measures, total, VOCAB)
        bits, _, _ = search(measures + MEASURES // 2, enough, total * 0, total, LEVELS, True)
        floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    column = piece * PIECE + tl.arange(0, PIECE)
    weight = tl.load(weights + row * VOCAB + column, column < VOCAB, other=0.0)
    tl.store(kept_sums + row * num_pieces + piece, tl.sum(whole(tl.where(weight >= floor, weight, 0.0)), 0))
    if piece == 0:
        tl.store(floors + row, floor)


@triton.jit
def pick(
    weights,
    table,
    sums,
    floors,
    token_ids,
    num_pieces,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    PADDED: tl.constexpr,
    IS_FILTERED: tl.constexpr,
):
    """Store the first token whose cumulative mass exceeds noise * total; -1 for a row that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(table + row * COLUMNS + 5) < 0:
        return
    place = tl.arange(0, PADDED)
    sum_P = tl.load(sums + row * num_pieces + place, place < num_pieces, other=0)
    total = tl.sum(sum_P, 0)
    if total == 0:
        tl.store(token_ids + row, -1)
        return
    target = tl.minimum((tl.load(table + row * COLUMNS) * total.to(tl.float64)).to(tl.int64), total - 1)
    piece = tl.sum((tl.cumsum(sum_P, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(place < piece, sum_P, 0), 0)
    column = piece * PIECE + tl.arange(0, PIECE)
    weight = tl.load(weights + row * VOCAB + column, column < VOCAB, other=0.0)
    if IS_FILTERED:
        weight = tl.where(weight >= tl.load(floors + row), weight, 0.0)
    index = tl.sum((tl.cumsum(whole(weight), 0) <= target).to(tl.int32), 0)
    tl.store(token_ids + row, (piece * PIECE + index).to(tl.int64))
