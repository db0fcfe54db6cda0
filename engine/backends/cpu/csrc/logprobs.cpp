// Logprobs of chosen tokens and of the likeliest, as runner/logprobs.py defines them.
//
// A logprob is (x - max) - log(sum), in fp32; the sum is in fp64, of blocks and then over them. Rows are independent and
// computed one a chunk of the team.

#include "softmax.h"
#include "team.h"
#include "vectors.h"

namespace {

struct Scores {
    const float* logits;  // [rows][stride]
    int64_t stride, vocab_size, num_rows, max_top;
    const int64_t* rows;                 // [num_rows]: which rows of logits
    const int64_t *token_ids, *num_top;  // [num_rows]; num_top is at most max_top
    int64_t* ranks;                      // out [num_rows]: 1 more than the number of likelier tokens
    int64_t* best_ids;                   // out [num_rows][max_top]: the likeliest, the lowest id first among equals
    float *own, *best;                   // out [num_rows] and [num_rows][max_top]: logprobs; own is NaN if not finite
};

struct Logprob {
    float max, log_sum;
    float operator()(float x) const { return (x - max) - log_sum; }
};

INLINE Logprob logprob_of(const float* row, int64_t n) {
    const float max = max_of(row, n);
    double sum = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        float weights[BLOCK];
        const int64_t size = n - start < BLOCK ? n - start : BLOCK;
        for (int64_t i = 0; i < size; i++) weights[i] = exp_of(row[start + i] - max);
        for (int64_t i = size; i < BLOCK; i++) weights[i] = 0;
        sum += sum_of(weights);
    }
    return {max, (float)log(sum)};
}

// Write the k likeliest tokens, likeliest first.
INLINE void find_best(const float* row, int64_t n, int64_t k, Logprob logprob, int64_t* ids, float* best) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t size = n - start < BLOCK ? n - start : BLOCK;
        if (count == k && !(logprob(max_of(row + start, size)) > best[k - 1])) continue;
        for (int64_t id = start; id < start + size; id++) {
            const float value = logprob(row[id]);
            if (count == k && !(value > best[k - 1])) continue;
            int64_t at = count < k ? count++ : k - 1;
            for (; at > 0 && value > best[at - 1]; at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
            best[at] = value, ids[at] = id;
        }
    }
}

INLINE void score_row(const Scores& s, int64_t index) {
    const float* row = s.logits + s.rows[index] * s.stride;
    const int64_t n = s.vocab_size, k = s.num_top[index] < n ? s.num_top[index] : n;
    const Logprob logprob = logprob_of(row, n);
    const float own = logprob(row[s.token_ids[index]]);
    int64_t rank = 1;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t size = n - start < BLOCK ? n - start : BLOCK;
        int32_t above = 0;
        for (int64_t i = 0; i < size; i++) above += logprob(row[start + i]) > own;
        rank += above;
    }
    s.own[index] = own;
    s.ranks[index] = rank;
    if (k > 0) find_best(row, n, k, logprob, s.best_ids + index * s.max_top, s.best + index * s.max_top);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq"))) void score_avx512(const Scores& s, int64_t index) { score_row(s, index); }
__attribute__((target("avx2"))) void score_avx2(const Scores& s, int64_t index) { score_row(s, index); }
#endif

void score_by_best(void* scores, int64_t index) {
    const Scores& s = *(const Scores*)scores;
#if defined(__x86_64__)
    if (has_avx512()) return score_avx512(s, index);
    if (has_avx2()) return score_avx2(s, index);
#endif
    score_row(s, index);
}

}  // namespace

// Score the rows; there are at most MAX_CHUNKS.
EXPORT void native_score(Scores* scores) {
    run_chunks(score_by_best, scores, scores->num_rows, num_threads());
}
