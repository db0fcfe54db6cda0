// Causal attention over the paged KV cache on a CPU, and the store into that cache.
//
// It computes in the team, as products do. The instruction set is chosen at run time among the compiled ones;
// attention_kernel.h has the arithmetic. Threads take tasks from a counter: the bits of a row depend neither on the thread
// nor on the tile that computes it.

#include "attention.h"

#include <float.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "team.h"
#include "vectors.h"

constexpr int GROUP = 16;          // positions handled together: a multiple of every LANES
constexpr int MAX_TILE_ROWS = 32;  // query rows that share a pass over keys and values, so converting bf16 costs little
constexpr int PREFETCH = 64;       // positions fetched ahead: some 200 ns of work, more than a memory latency
constexpr int RING = 8;            // groups located at a time, more than PREFETCH / GROUP

constexpr float LOG2E = 1.44269504088896341f;

// Minimum work for which it pays to wake a second thread, which takes some 3 us.
constexpr int64_t WRITE_TASK_BYTES = 1 << 16;
constexpr int64_t ATTEND_MULTIPLICATIONS = 1 << 15;

template <int... I>
using lane_list = std::integer_sequence<int, I...>;
template <int N>
using make_lanes = std::make_integer_sequence<int, N>;

static inline int64_t row_bytes_of(const AttentionCache& cache) {
    return cache.head_size * cache.element_size + (cache.element_size == 1 ? (int64_t)sizeof(float) : 0);
}

constexpr float LARGEST_CODE = 127, LARGEST_SHORT = 32767;
constexpr float NO_MAGNITUDE = 0x1p-100f;  // rows below it become zeros, as the inverse of their scale may be infinite

// The largest code of a query, with which the sum of a score fits into 32 bits.
static inline float largest_of_query(int64_t head_size) {
    const int64_t most = INT32_MAX / ((int64_t)LARGEST_CODE * head_size);
    return most < (int64_t)LARGEST_SHORT ? (float)most : LARGEST_SHORT;
}

static inline float as_float(int32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int32_t bits_of(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline int32_t bits_of(bf16 x) { return (int32_t)((uint32_t)x << 16); }

// Round to the type of the model: to nearest, ties to even.
template <class T>
static inline T stored(float x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    const uint32_t bits = (uint32_t)bits_of(x);
    return (T)((x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16);
}

// Write n elements as whole numbers, -largest to largest, and return what they are multiples of; NaN if an element is
// not finite. reference/attention.py has the same for the cache, with the same bits.
template <class T, class Code>
static inline float encode(const T* x, int64_t n, float largest, Code* codes) {
    int32_t highest = 0;  // magnitudes rank as their bits, NaN above all
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = bits_of(x[i]) & INT32_MAX;
        highest = bits > highest ? bits : highest;
    }
    const float magnitude = as_float(highest);
    if (!(magnitude >= NO_MAGNITUDE && magnitude <= FLT_MAX)) {
        for (int64_t i = 0; i < n; i++) codes[i] = 0;
        return magnitude < NO_MAGNITUDE ? 0 : __builtin_nanf("");
    }
    const float inverse = largest / magnitude, shift = 12582912.f;  // 1.5 * 2^23: adding it rounds, ties to even
    for (int64_t i = 0; i < n; i++)
        codes[i] = (Code)(bits_of(as_float(bits_of(x[i])) * inverse + shift) - bits_of(shift));
    return magnitude / largest;
}

// Floats of a head, in whole loads of the widest instruction set.
static inline int64_t padded_head(int64_t head_size) { return (head_size + 31) / 32 * 32; }

// Floats of scratch a thread needs; 16 beyond the row keep rows of 2^n positions out of the same cache sets.
static inline int64_t score_row(int64_t max_positions) { return (max_positions + 2 * GROUP) / GROUP * GROUP + 16; }

// The data that the threads of one call share.
struct Attend {
    const AttentionBatch& batch;
    const AttentionCache& cache;
    const void* query;
    int64_t query_stride;
    void* out;
    int64_t num_heads, window;
    const float *slopes, *sinks;
    float softcap, scale_log2e;
    int64_t score_stride;
    void (*tile)(const Attend&, float* scratch, int64_t s, int64_t g, int64_t row, int rows);
    int tile_rows;
    int64_t next_thread, next_task;
};

#define ISA attention_generic
#define LANES 4
#define ROWS 2
#define LOAD_CODES(p) (IntVec{(p)[0], (p)[1], (p)[2], (p)[3]})
#if defined(__x86_64__)
#define ADD_PRODUCTS_OF_INT16(sum, a, b) ((sum) + (IntVec)_mm_madd_epi16((__m128i)(a), (__m128i)(b)))
#else
#define ADD_PRODUCTS_OF_INT16(sum, a, b) \
    ((sum) + ((IntVec)(a) << 16 >> 16) * ((IntVec)(b) << 16 >> 16) + ((IntVec)(a) >> 16) * ((IntVec)(b) >> 16))
#endif
#if defined(__aarch64__)
#define FMA(a, b, c) ((Vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))  // a software FMA would be far slower, and rounding twice is as exact as needed
#endif
#include "attention_kernel.h"

#if defined(__x86_64__)
BEGIN_INSTRUCTIONS(WITH_AVX2)
#define ISA attention_avx2
#define LANES 8
#define ROWS 2
#define FMA(a, b, c) ((Vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define LOAD_CODES(p) ((IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p))))
#define ADD_PRODUCTS_OF_INT16(sum, a, b) ((sum) + (IntVec)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#include "attention_kernel.h"
END_INSTRUCTIONS
BEGIN_INSTRUCTIONS(WITH_AVX512)
#define ISA attention_avx512
#define LANES 16
#define ROWS 4
#define FMA(a, b, c) ((Vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LOAD_CODES(p) ((IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p))))
#define ADD_PRODUCTS_OF_INT16(sum, a, b) ((sum) + (IntVec)_mm512_madd_epi16((__m512i)(a), (__m512i)(b)))
#include "attention_kernel.h"
END_INSTRUCTIONS
BEGIN_INSTRUCTIONS(WITH_AVX512 ",avx512bf16,avx512vnni")
#define ISA attention_avx512_bf16
#define LANES 16
#define ROWS 4
#define FMA(a, b, c) ((Vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LOAD_CODES(p) ((IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p))))
#define ADD_PRODUCTS_OF_INT16(sum, a, b) \
    ((IntVec)_mm512_dpwssd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b)))
#define ADD_PRODUCTS_OF_BF16(sum, a, b) \
    ((Vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b)))
#include "attention_kernel.h"
END_INSTRUCTIONS
#endif

enum Instructions { GENERIC = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3 };

static int best_instructions() {
#if defined(__x86_64__)
    if (has_avx512()) {
        const bool has_bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
        return has_bf16 ? AVX512_BF16 : AVX512;
    }
    if (has_avx2()) return AVX2;
#endif
    return GENERIC;
}

static int fastest_instructions() {
    const int best = best_instructions();
#if defined(__x86_64__)
    // It was not measured on Intel's CPUs, where it makes matrix products slower (float_products.cpp).
    if (best == AVX512_BF16 && __builtin_cpu_is("intel")) return AVX512;
#endif
    return best;
}

template <class T, class C>
static auto tile_function([[maybe_unused]] int instructions) {
#if defined(__x86_64__)
    if (instructions == AVX512_BF16) return attention_avx512_bf16::attend_tile<T, C>;
    if (instructions == AVX512) return attention_avx512::attend_tile<T, C>;
    if (instructions == AVX2) return attention_avx2::attend_tile<T, C>;
#endif
    return attention_generic::attend_tile<T, C>;
}

// (token, head) pairs of sequence s that read the same KV head.
static int64_t rows_of(const Attend& a, int64_t s) {
    return (a.batch.query_starts[s + 1] - a.batch.query_starts[s]) * (a.num_heads / a.cache.num_kv_heads);
}

static int64_t tiles_of(const Attend& a, int64_t s) { return (rows_of(a, s) + a.tile_rows - 1) / a.tile_rows; }

static int64_t tasks_of(const Attend& a) {
    int64_t tasks = 0;
    for (int64_t s = 0; s < a.batch.num_seqs; s++) tasks += tiles_of(a, s) * a.cache.num_kv_heads;
    return tasks;
}

// Multiplications of the scores, as if no position were masked.
static int64_t multiplications_of(const Attend& a) {
    int64_t pairs = 0;
    for (int64_t s = 0; s < a.batch.num_seqs; s++) pairs += rows_of(a, s) * a.batch.kv_lens[s];
    return pairs * a.cache.num_kv_heads * a.cache.head_size;
}

static void attend_tasks(void* shared) {
    Attend& a = *(Attend*)shared;
    const int64_t thread = __atomic_fetch_add(&a.next_thread, 1, __ATOMIC_RELAXED);
    float* scratch = a.batch.scratch + thread * a.batch.scratch_stride;
    int64_t s = 0, first = 0;  // the sequence of the last task, and its first task: tasks only ascend
    for (;;) {
        const int64_t task = __atomic_fetch_add(&a.next_task, 1, __ATOMIC_RELAXED);
        while (s < a.batch.num_seqs && task >= first + tiles_of(a, s) * a.cache.num_kv_heads)
            first += tiles_of(a, s++) * a.cache.num_kv_heads;
        if (s == a.batch.num_seqs) return;
        // The tiles of a head lie together, the longest first: the next task finds the head's keys in the CPU's cache.
        const int64_t tiles = tiles_of(a, s), g = (task - first) / tiles;
        const int64_t row = (tiles - 1 - (task - first) % tiles) * a.tile_rows, left = rows_of(a, s) - row;
        a.tile(a, scratch, s, g, row, left < a.tile_rows ? left : a.tile_rows);
    }
}

struct Write {
    const AttentionBatch* batch;
    const AttentionCache* cache;
    const char *key, *value;
    int64_t element_size, token_bytes;  // from one token to the next in key and in value
    int64_t tokens_a_task, next_task;
};

// Write a head's key or value as a row of the cache.
static void write_row(const Write& w, const char* from, char* to) {
    const int64_t size = w.cache->head_size;
    if (w.cache->element_size > 1) {
        __builtin_memcpy(to, from, size * w.element_size);
        return;
    }
    const float scale = w.element_size == 2 ? encode((const bf16*)from, size, LARGEST_CODE, (int8_t*)to)
                                            : encode((const float*)from, size, LARGEST_CODE, (int8_t*)to);
    __builtin_memcpy(to + size, &scale, sizeof scale);
}

static void write_tasks(void* shared) {
    Write& w = *(Write*)shared;
    const AttentionCache& cache = *w.cache;
    const int64_t head_bytes = cache.head_size * w.element_size, row_bytes = row_bytes_of(cache);
    const int64_t plane_bytes = cache.num_blocks * cache.num_kv_heads * cache.block_size * row_bytes;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&w.next_task, 1, __ATOMIC_RELAXED) * w.tokens_a_task;
        const int64_t end = from + w.tokens_a_task, num_tokens = w.batch->num_tokens;
        if (from >= num_tokens) return;
        for (int64_t t = from; t < end && t < num_tokens; t++) {
            const int64_t slot = w.batch->slots[t];
            if (slot < 0) continue;
            const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
            for (int64_t g = 0; g < cache.num_kv_heads; g++) {
                const int64_t row = (block * cache.num_kv_heads + g) * cache.block_size + offset;
                char* to = (char*)cache.data + row * row_bytes;
                const int64_t at = t * w.token_bytes + g * head_bytes;
                write_row(w, w.key + at, to);
                write_row(w, w.value + at, to + plane_bytes);
            }
        }
    }
}

static void run(const AttentionBatch& batch, void (*tasks)(void*), void* shared, int64_t num_tasks) {
    if (batch.num_threads > 1 && num_tasks > 1) native_parallel(tasks, shared, batch.num_threads);
    else tasks(shared);
}

EXPORT int native_best_instructions() { return best_instructions(); }

EXPORT int native_fastest_instructions() { return fastest_instructions(); }

EXPORT int64_t native_scratch_floats(int64_t max_kv_len, int64_t head_size) {
    return 2 * (MAX_TILE_ROWS + GROUP) * padded_head(head_size) + MAX_TILE_ROWS * score_row(max_kv_len);
}

EXPORT void native_write(const AttentionBatch* batch, const AttentionCache* cache, const void* key, const void* value,
                        int64_t token_stride, int64_t element_size) {
    Write w = {batch, cache, (const char*)key, (const char*)value, element_size, token_stride * element_size, 0, 0};
    const int64_t bytes = 2 * cache->num_kv_heads * cache->head_size * element_size;
    w.tokens_a_task = (WRITE_TASK_BYTES + bytes - 1) / bytes;
    run(*batch, write_tasks, &w, (batch->num_tokens + w.tokens_a_task - 1) / w.tokens_a_task);
}

EXPORT void native_attend(const AttentionBatch* batch, const AttentionCache* cache, const void* query,
                          int64_t query_stride, void* out, int64_t element_size, int64_t num_heads, float scale,
                          int64_t window, const float* slopes, const float* sinks, float softcap, int instructions) {
    Attend a = {*batch, *cache, query, query_stride, out, num_heads, window, slopes, sinks, softcap,
                scale * LOG2E, score_row(batch->max_kv_len), nullptr, MAX_TILE_ROWS, 0, 0};
    if (cache->element_size == 1)
        a.tile = element_size == 2 ? tile_function<bf16, int8_t>(instructions) : tile_function<float, int8_t>(instructions);
    else
        a.tile = element_size == 2 ? tile_function<bf16, bf16>(instructions) : tile_function<float, float>(instructions);
    // Few tasks leave threads idle, so cut smaller tiles then. Tiles of fewer than 4 rows repeat much work, so only cut
    // them for threads that would have no task. Tiles do not change the arithmetic of a row.
    while (a.tile_rows > 1 && tasks_of(a) < (a.tile_rows > 4 ? 4 : 1) * batch->num_threads) a.tile_rows /= 2;
    run(*batch, attend_tasks, &a, multiplications_of(a) < ATTEND_MULTIPLICATIONS ? 1 : tasks_of(a));

    const int64_t used = batch->query_starts[batch->num_seqs];
    const int64_t row_bytes = num_heads * cache->head_size * element_size;
    __builtin_memset((char*)out + used * row_bytes, 0, (batch->num_tokens - used) * row_bytes);
}
