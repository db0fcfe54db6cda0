// Drawing tokens: from raw logits to the token of each row, as engine/sampling/sampler.py defines it.
//
// Rows are independent and computed one a chunk of the team. Sums have a fixed order and no multiply-add is fused, so a
// row's token depends neither on other rows nor on threads nor on the instructions. sampler.py's torch version is the
// reference in the tests.

#include "softmax.h"
#include "team.h"

namespace {

constexpr double REACHED = 1 - 2e-7;  // a mass short of top_p by the rounding of fp32 weights has reached it
constexpr int LEVEL_BITS[] = {11, 11, 10};  // digits by which weights are selected, highest first: together a float

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
    float* scratch;      // [num_threads][3 * padded vocabulary + 2 * blocks]
    int64_t scratch_stride, num_threads;
};

struct Job {
    const Draw* draw;
    int busy[256];  // which parts of the scratch are in use
};

int64_t blocks_of(int64_t vocab_size) { return (vocab_size + BLOCK - 1) / BLOCK; }

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

struct Selected {
    float weight;      // the smallest that is kept
    double mass;       // of the `count` largest
};

// Return the largest weight v for which the weights of at least v have this count, or this mass if count is 0; and the
// mass of the `count` largest. Digit by digit: weights are not negative, so their bits ascend with them.
Selected select(const float* weights, int64_t n, int64_t count, double mass, float* candidates) {
    const float* left = weights;
    int64_t num_left = n, num_above = 0;
    double mass_above = 0;
    uint32_t prefix = 0;
    int shift = 32;
    for (int bits : LEVEL_BITS) {
        constexpr int MAX_DIGITS = 1 << 11;
        int64_t counts[MAX_DIGITS] = {};
        double masses[MAX_DIGITS] = {};
        shift -= bits;
        const uint32_t mask = (1u << bits) - 1;
        for (int64_t i = 0; i < num_left; i++) {
            const uint32_t digit = bits_of(left[i]) >> shift & mask;
            counts[digit]++;
            masses[digit] += left[i];
        }
        int digit = mask;
        for (; digit > 0; digit--) {
            const bool is_crossed = count ? num_above + counts[digit] >= count : mass_above + masses[digit] >= mass;
            if (is_crossed && counts[digit]) break;
            num_above += counts[digit];
            mass_above += masses[digit];
        }
        prefix |= (uint32_t)digit << shift;
        int64_t num = 0;
        for (int64_t i = 0; i < num_left; i++)
            if ((bits_of(left[i]) >> shift & mask) == (uint32_t)digit) candidates[num++] = left[i];
        left = candidates;
        num_left = num;
    }
    float weight;
    memcpy(&weight, &prefix, 4);
    return {weight, mass_above + (double)(count - num_above) * weight};
}

float floor_of(const Row& row, const float* weights, int64_t n, double total, float* candidates) {
    float floor = row.min_p;  // the largest weight is 1
    if (row.top_k && row.top_k < n) {
        const Selected kept = select(weights, n, row.top_k, 0, candidates);
        floor = kept.weight > floor ? kept.weight : floor;
        total = kept.mass;
    }
    if (row.top_p < 1.0) {
        const Selected kept = select(weights, n, 0, REACHED * row.top_p * total, candidates);
        floor = kept.weight > floor ? kept.weight : floor;
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
        // The copy stays in the cache of this core: reading its source in order is faster than here and there.
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
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return token_avx512(draw, index, scratch);
    if (__builtin_cpu_supports("avx2")) return token_avx2(draw, index, scratch);
#endif
    return token_generic(draw, index, scratch);
}

void draw_row(void* shared, int64_t index) {
    Job& job = *(Job*)shared;
    const Draw& draw = *job.draw;
    int part = 0;  // as many parts as threads, so one is free
    while (__atomic_exchange_n(&job.busy[part], 1, __ATOMIC_ACQUIRE)) part = (part + 1) % draw.num_threads;
    draw.token_ids[index] = token_by_best(draw, index, draw.scratch + part * draw.scratch_stride);
    __atomic_store_n(&job.busy[part], 0, __ATOMIC_RELEASE);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Floats of scratch that a thread needs.
EXPORT int64_t native_draw_scratch(int64_t vocab_size) {
    const int64_t num_blocks = blocks_of(vocab_size);
    return 2 * num_blocks + 3 * num_blocks * BLOCK;
}

// Draw a token for each row; num_threads is at most 256.
EXPORT void native_draw(const Draw* draw) {
    Job job = {draw, {}};
    run_chunks(draw_row, &job, draw->num_rows, draw->num_threads);
}
