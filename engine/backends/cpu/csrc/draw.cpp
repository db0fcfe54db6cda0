// Drawing tokens: from raw logits to the token of each row, as engine/sampling/choice.py defines it.
//
// Rows are independent and computed one a chunk of the team. Sums have a fixed order and no multiply-add is fused, so a
// row's token depends neither on other rows nor on threads nor on the instructions. reference/draw.py is the reference in
// the tests.

#include "scratch.h"
#include "softmax.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr double REACHED = 1 - 2e-7;  // a mass short of top_p by the rounding of fp32 weights has reached it
constexpr uint32_t ONE = 0x3f800000;           // the bits of 1, the largest weight
constexpr uint32_t SPARE = 64;

// Weights are selected digit by digit, the highest first: `num` digits of so many bits.
struct Digits {
    int shift;
    uint32_t num;
};
constexpr Digits LEVELS[] = {{17, ONE >> 17}, {8, 1 << 9}, {0, 1 << 8}};

struct Adjustment {
    double frequency, presence;  // 0 is off
    float repetition;            // 1 is off
    int64_t num_tokens, num_biased, num_banned;
    const int64_t *token_ids, *counts;  // distinct tokens; how often each was generated
    const int64_t* biased;
    const float* bias;
    const int64_t* banned;
};

struct Row {
    double noise;       // in [0, 1)
    double top_p;       // 1 is off
    float temperature;  // 0 is greedy
    float min_p;        // 0 is off
    int64_t top_k;      // 0 is off
    const uint32_t* allowed;       // a bit for each entry; null: all are
    const Adjustment* adjustment;  // of the entries before all else; null: none
};

struct Draw {
    const float* logits;  // [num_rows][stride]
    int64_t stride, vocab_size, num_rows;
    const Row* rows;
    int64_t* token_ids;  // out; -1 for a row that is not finite
};

int64_t blocks_of(int64_t vocab_size) { return (vocab_size + BLOCK - 1) / BLOCK; }

// Return what a thread needs for one row: [3 * padded vocabulary + 2 * blocks].
float* scratch_of(int64_t vocab_size) {
    thread_local Scratch scratch;
    const int64_t num_blocks = blocks_of(vocab_size);
    return (float*)scratch.take((2 * num_blocks + 3 * num_blocks * BLOCK) * sizeof(float));
}

// Return the index of the first entry that equals `value`; there is one.
INLINE int64_t first_of(float value, const float* row, int64_t n) {
    int64_t start = 0;
    for (; start + BLOCK <= n; start += BLOCK) {
        int32_t is_here = 0;  // a whole block at once: a loop that may end at any entry takes one at a time
        for (int64_t i = 0; i < BLOCK; i++) is_here |= row[start + i] == value;
        if (is_here) break;
    }
    while (row[start] != value) start++;
    return start;
}

// Write each entry's weight exp((x - max) / temperature) and each block's sum. Entries past the end weigh nothing.
INLINE void weigh(const float* row, int64_t n, float max, float temperature, float* weights, double* sums) {
    for (int64_t block = 0; block < blocks_of(n); block++) {
        const float* in = row + block * BLOCK;
        float padded[BLOCK];
        if ((block + 1) * BLOCK > n) {
            const int64_t left = n - block * BLOCK;
            for (int64_t i = 0; i < BLOCK; i++) padded[i] = i < left ? in[i] : -INFINITY;
            in = padded;
        }
        float* out = weights + block * BLOCK;
        for (int64_t i = 0; i < BLOCK; i++) out[i] = exp_of((in[i] - max) / temperature);
        sums[block] = sum_of(out);
    }
}

// Replace weights below the floor by 0, and sum the blocks anew.
INLINE void drop_below(float floor, int64_t num_blocks, float* weights, double* sums) {
    for (int64_t block = 0; block < num_blocks; block++) {
        float* out = weights + block * BLOCK;
        for (int64_t i = 0; i < BLOCK; i++) out[i] = out[i] < floor ? 0.0f : out[i];
        sums[block] = sum_of(out);
    }
}

// Penalize, bias and ban entries. Each step rounds to fp32, as torch does.
void adjust(float* row, const Adjustment& by) {
    for (int64_t i = 0; i < by.num_tokens; i++) {
        float& x = row[by.token_ids[i]];
        x = x > 0 ? x / by.repetition : x * by.repetition;
        if (by.counts[i]) x -= (float)(by.frequency * (double)by.counts[i] + by.presence);
    }
    for (int64_t i = 0; i < by.num_biased; i++) row[by.biased[i]] += by.bias[i];
    for (int64_t i = 0; i < by.num_banned; i++) row[by.banned[i]] -= INFINITY;
}

// Replace entries that are not allowed by minus infinity; a NaN stays one.
INLINE void mask(float* row, int64_t n, const uint32_t* allowed) {
    for (int64_t start = 0; start < n; start += 32) {
        const uint32_t word = allowed[start / 32];
        const int64_t end = n - start < 32 ? n - start : 32;
        for (int64_t i = 0; i < end; i++) row[start + i] = word >> i & 1 ? row[start + i] : row[start + i] - INFINITY;
    }
}

uint32_t bits_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, 4);
    return bits;
}

// Add the weights up by the digit of their depth, or count them. The depth is how far the bits of a weight lie below
// those of 1; it ascends as weights, none of which is negative or above 1, descend. `start` is the depth of digit 0.
// Weights outside of the digits, such as the many zeros, go to spare places: in one place each would wait for the last.
template <bool COUNTS>
INLINE void add_by_digit(const float* weights, int64_t n, uint32_t start, Digits digits, double* sums) {
    for (int64_t first = 0; first < n; first += SPARE) {
        uint16_t places[SPARE];
        for (uint32_t i = 0; i < SPARE; i++) {
            const uint32_t digit = (ONE - bits_of(weights[first + i]) - start) >> digits.shift;
            places[i] = digit < digits.num ? digit : digits.num + i;
        }
        for (int64_t i = 0; i < SPARE; i++) sums[places[i]] += COUNTS ? 1.0 : weights[first + i];
    }
}

// Write the weights whose digit is 0, and zeros up to a multiple of SPARE; return how many these are together. It may
// write where it has read.
INLINE int64_t collect(const float* weights, int64_t n, uint32_t start, int shift, float* collected) {
    int64_t num = 0;
    constexpr int64_t GROUP = 2 * LANES;  // few weights have the digit, so most groups are passed over at once
    for (int64_t first = 0; first < n; first += GROUP) {
        int32_t is_here = 0;
        for (int64_t i = 0; i < GROUP; i++) is_here |= (ONE - bits_of(weights[first + i]) - start) >> shift == 0;
        if (!is_here) continue;
        for (int64_t i = 0; i < GROUP; i++) {
            const float weight = weights[first + i];
            if ((ONE - bits_of(weight) - start) >> shift == 0) collected[num++] = weight;
        }
    }
    for (; num % SPARE; num++) collected[num] = 0;
    return num;
}

// Return the largest weight v for which the weights of at least v are as many as `enough`, or weigh as much; if all are
// less, the smallest above 0. n is a multiple of SPARE.
template <bool COUNTS>
INLINE float select(const float* weights, int64_t n, double enough, float* candidates) {
    const float* left = weights;
    double above = 0;
    uint32_t start = 0;
    for (Digits digits : LEVELS) {
        double sums[LEVELS[0].num + SPARE];
        memset(sums, 0, (digits.num + SPARE) * sizeof(double));
        add_by_digit<COUNTS>(left, n, start, digits, sums);
        uint32_t last = 0;  // the digit that reaches enough, or the last one that occurs
        double reached = above;
        for (uint32_t digit = 0; digit < digits.num && reached < enough; digit++) {
            if (sums[digit] == 0) continue;
            last = digit;
            above = reached;
            reached += sums[digit];
        }
        start += last << digits.shift;
        n = collect(left, n, start, digits.shift, candidates);
        left = candidates;
    }
    const uint32_t bits = ONE - start;
    float weight;
    memcpy(&weight, &bits, 4);
    return weight;
}

// Return the mass of the k largest weights, of which v is the smallest.
INLINE double mass_of_largest(const float* weights, int64_t num_blocks, int64_t k, float v) {
    double mass = 0;
    int64_t num = 0;
    for (int64_t block = 0; block < num_blocks; block++) {
        const float* in = weights + block * BLOCK;
        float kept[BLOCK];
        int32_t num_kept = 0;
        for (int64_t i = 0; i < BLOCK; i++) kept[i] = in[i] < v ? 0.0f : in[i];
        for (int64_t i = 0; i < BLOCK; i++) num_kept += in[i] >= v;
        mass += sum_of(kept);
        num += num_kept;
    }
    return num > k ? mass - (double)(num - k) * v : mass;
}

INLINE float floor_of(const Row& row, const float* weights, int64_t n, double total, float* candidates) {
    const int64_t num_blocks = blocks_of(n);
    float floor = row.min_p;  // the largest weight is 1
    if (row.top_k && row.top_k < n) {
        const float kept = select<true>(weights, num_blocks * BLOCK, (double)row.top_k, candidates);
        floor = kept > floor ? kept : floor;
        if (row.top_p < 1.0) total = mass_of_largest(weights, num_blocks, row.top_k, kept);
    }
    if (row.top_p < 1.0) {
        const float kept = select<false>(weights, num_blocks * BLOCK, REACHED * row.top_p * total, candidates);
        floor = kept > floor ? kept : floor;
    }
    return floor;
}

// Return the first entry whose cumulative weight exceeds noise * total.
int64_t entry_at(double noise, const float* weights, const double* sums, int64_t num_blocks) {
    double total = 0;
    for (int64_t block = 0; block < num_blocks; block++) total += sums[block];
    double target = noise * total;
    if (target >= total) target = nextafter(total, 0.0);
    double before = 0;
    int64_t block = 0, last = 0;
    for (; block < num_blocks - 1 && before + sums[block] <= target; block++) before += sums[block];
    for (; block < num_blocks; block++)
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
            before += weights[i];
            if (weights[i] > 0) last = i;
            if (before > target) return i;
        }
    return last;  // the sum of a block, in another order, may have been larger by a rounding error
}

INLINE int64_t token_of(const Draw& draw, int64_t index, float* scratch) {
    const float* logits = draw.logits + index * draw.stride;
    const Row& row = draw.rows[index];
    const int64_t n = draw.vocab_size, num_blocks = blocks_of(n);
    double* sums = (double*)scratch;
    float* weights = scratch + 2 * num_blocks;
    float* candidates = weights + num_blocks * BLOCK;
    if (row.adjustment || row.allowed) {
        // The copy stays in the cache of this core: reading its source in order is faster than at scattered places.
        float* own = candidates + num_blocks * BLOCK;
        memcpy(own, logits, n * sizeof(float));
        if (row.adjustment) adjust(own, *row.adjustment);
        if (row.allowed) mask(own, n, row.allowed);
        logits = own;
    }
    const float max = max_of(logits, n);
    if (!(max - max == 0)) return -1;  // NaN or infinite
    if (row.temperature == 0) return first_of(max, logits, n);
    weigh(logits, n, max, row.temperature, weights, sums);
    if (row.top_k || row.top_p < 1.0 || row.min_p > 0) {
        double total = 0;
        for (int64_t block = 0; block < num_blocks; block++) total += sums[block];
        drop_below(floor_of(row, weights, n, total, candidates), num_blocks, weights, sums);
    }
    return entry_at(row.noise, weights, sums, num_blocks);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq"))) int64_t token_avx512(const Draw& d, int64_t i, float* s) {
    return token_of(d, i, s);
}
__attribute__((target("avx2"))) int64_t token_avx2(const Draw& d, int64_t i, float* s) { return token_of(d, i, s); }
#endif
int64_t token_generic(const Draw& d, int64_t i, float* s) { return token_of(d, i, s); }

int64_t token_by_best(const Draw& draw, int64_t index, float* scratch) {
#if defined(__x86_64__)
    if (has_avx512()) return token_avx512(draw, index, scratch);
    if (has_avx2()) return token_avx2(draw, index, scratch);
#endif
    return token_generic(draw, index, scratch);
}

void draw_row(void* job, int64_t index) {
    const Draw& draw = *(const Draw*)job;
    draw.token_ids[index] = token_by_best(draw, index, scratch_of(draw.vocab_size));
}

}  // namespace

// Draw a token for each row.
EXPORT void native_draw(const Draw* draw) { run_chunks(draw_row, (void*)draw, draw->num_rows, num_threads()); }
