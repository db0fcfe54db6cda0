// Products in int8: rows of x are quantized as they come, and sums are integers.
//
// The weights of an output are whole multiples, -127 to 127, of its scale. The elements of a row are multiples of a scale
// of the row: its quantization depends on that row alone. Most multiples are -127 to 127. Up to one element in 128 may lie
// beyond, so that few outliers do not make the rest coarse: it is 128 times a far part plus a near part. The words of 4
// elements that have a far part are multiplied once more. Few outputs, those with by far the largest weights, are
// products of numbers that are not quantized, and so are few elements of all rows with their weights.
//
// Integer sums are exact, so that all variants and engine/model/int8.py, which says the same in torch, give the same bits:
//   y = (near + 128 far) * row scale * output scale, near and far being sums converted to fp32; then the products with
//   elements that are not quantized are added, one after the other; the rest as in bf16.
// Products that are not quantized have the same bits everywhere, too: exact_product sums in one order.
// AVX512-VNNI and AMX multiply signed with unsigned bytes, so packed weights have 128 added, which is subtracted with the
// sums of the rows. A row with an element that is not finite gives NaN.

#include <stdlib.h>

#include "linear.h"
#include "team.h"

#if defined(__x86_64__)

#define WITH_VNNI WITH_AVX512 ",avx512vnni"
BEGIN_INSTRUCTIONS(WITH_VNNI)

#define MULTIPLY_TILES "tdpbsud"
#include "linear_kernel.h"

struct Int8 {
    static constexpr int MAX_ROWS = 8;
    static __m512i dot(__m512i sum, __m512i x, __m512i weights) { return _mm512_dpbusd_epi32(sum, weights, x); }
    template <int R>
    static constexpr auto sum = sum_words<Int8, R>;

    static void finish_sums(const Product& p, int64_t row, int rows, int64_t panel, float* sums) {
        const uint8_t* weights = p.linear.weight + panel * p.row_bytes * COLUMNS;
        for (int r = 0; r < rows; r++) {
            const QuantizedRow& q = p.quantized[row + r];
            UNROLL for (int half = 0; half < 2; half++) {
                float* at = sums + r * COLUMNS + half * 16;
                const __m512i near = _mm512_sub_epi32(_mm512_loadu_si512(at), _mm512_set1_epi32(128 * q.near_sum));
                __m512i far = _mm512_set1_epi32(-128 * q.far_sum);
                for (int i = 0; i < q.num_far; i++) {
                    const int word = q.far[i].word;
                    const uint8_t* line = weights + word / 16 * STEP + half * TILE + word % 16 * LINE;
                    far = dot(far, _mm512_set1_epi32(q.far[i].bytes), _mm512_loadu_si512(line));
                }
                const __m512 far_part = _mm512_mul_ps(_mm512_cvtepi32_ps(far), _mm512_set1_ps(128));
                const __m512 sum = _mm512_add_ps(_mm512_cvtepi32_ps(near), far_part);
                const __m512 scales = _mm512_loadu_ps(p.linear.scales + panel * COLUMNS + half * 16);
                __m512 y = _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_set1_ps(q.scale)), scales);
                const float* wide = p.linear.input_weights + panel * p.linear.num_exact_inputs * COLUMNS + half * 16;
                for (int64_t i = 0; i < p.linear.num_exact_inputs; i++)
                    y = _mm512_add_ps(y, _mm512_mul_ps(_mm512_set1_ps(q.inputs[i]), _mm512_loadu_ps(wide + i * COLUMNS)));
                _mm512_storeu_ps(at, y);
            }
        }
        int64_t i = 0, end = p.linear.num_exact;  // of the exact outputs, which ascend, find the panel's first one
        while (i < end) {
            const int64_t middle = (i + end) / 2;
            if (p.linear.exact_outputs[middle] < panel * COLUMNS) i = middle + 1;
            else end = middle;
        }
        for (; i < p.linear.num_exact && p.linear.exact_outputs[i] < (panel + 1) * COLUMNS; i++)
            for (int r = 0; r < rows; r++)
                sums[r * COLUMNS + p.linear.exact_outputs[i] - panel * COLUMNS] = p.quantized[row + r].exact[i];
    }
};

// Return elements k to k + 15 of a row, times their factors.
template <bool WIDE>
static inline Floats load(const void* x, const float* factors, int64_t k) {
    const Floats y = WIDE ? load((const float*)x + k, 16) : load((const bf16*)x + k, 16);
    return factors ? y * load(factors + k, 16) : y;
}

constexpr int LEVEL = 20;    // the bits of a float from here on, without its sign: an eighth of an octave
constexpr int LEVELS = 48;   // a far part stays below 64

// Return the largest level that is near: the lowest, at most LEVELS below the highest, with `max_far` elements above.
static int near_level(const uint16_t* keys, int64_t size, int highest, int64_t max_far) {
    int low = max_of(0, highest - LEVELS);
    while (low < highest) {
        const int middle = (low + highest) / 2;
        const __m512i last = _mm512_set1_epi16(((middle + 1) << (LEVEL - 16)) - 1);
        int64_t above = 0;
        for (int64_t k = 0; k < size; k += 32)
            above += __builtin_popcount(_mm512_cmpgt_epu16_mask(_mm512_loadu_si512(keys + k), last));
        if (above <= max_far) highest = middle;
        else low = middle + 1;
    }
    return low;
}

// Quantize a row of `size` elements, a multiple of 32.
template <bool WIDE>
static void quantize(const void* x, const float* factors, int64_t size, int64_t max_far, int8_t* near, QuantizedRow& row) {
    uint16_t keys[MAX_INT8_DEPTH];
    __m512i highest = _mm512_setzero_si512();
    for (int64_t k = 0; k < size; k += 16) {
        const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(load<WIDE>(x, factors, k)));
        highest = _mm512_max_epi32(highest, bits);
        _mm256_storeu_si256((__m256i*)(keys + k), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
    const int level = near_level(keys, size, _mm512_reduce_max_epi32(highest) >> LEVEL, max_far);
    const uint32_t bound_bits = (uint32_t)(level + 1) << LEVEL;
    const bool is_finite = _mm512_reduce_max_epi32(highest) < 0x7f800000 && bound_bits < 0x7f800000;
    float bound = 1e-30f;  // below it, 127 / bound is infinite
    if (is_finite && bound_bits > 0x0da24260) __builtin_memcpy(&bound, &bound_bits, sizeof bound);  // 1e-30 in bits
    row.scale = is_finite ? bound / 127 : __builtin_nanf("");
    row.num_far = 0;
    const __m512 inverse = _mm512_set1_ps(is_finite ? 127 / bound : 0);
    __m512i near_sum = _mm512_setzero_si512(), far_sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < size; k += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load<WIDE>(x, factors, k), inverse));
        whole = _mm512_maskz_mov_epi32(is_finite ? 0xffff : 0, whole);
        const __mmask16 is_far = _mm512_cmpgt_epi32_mask(_mm512_abs_epi32(whole), _mm512_set1_epi32(127));
        if (is_far) {
            const __m512i half = _mm512_set1_epi32(64);
            const __m512i far = _mm512_maskz_srai_epi32(is_far, _mm512_add_epi32(whole, half), 7);
            whole = _mm512_sub_epi32(whole, _mm512_slli_epi32(far, 7));
            far_sum = _mm512_add_epi32(far_sum, far);
            int32_t words[4];
            _mm_storeu_si128((__m128i*)words, _mm512_cvtepi32_epi8(far));
            for (int i = 0; i < 4; i++)
                if (words[i]) row.far[row.num_far++] = {(int32_t)(k / 4 + i), words[i]};
        }
        near_sum = _mm512_add_epi32(near_sum, whole);
        _mm_storeu_si128((__m128i*)(near + k), _mm512_cvtepi32_epi8(whole));
    }
    row.near_sum = _mm512_reduce_add_epi32(near_sum);
    row.far_sum = _mm512_reduce_add_epi32(far_sum);
}

// Return the product of a row and weights: 32 sums in ascending order, then the sum of their halves until one is left.
template <bool WIDE>
static float exact_product(const void* x, const float* weights, int64_t size) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 32) {
        low = _mm512_add_ps(low, _mm512_mul_ps(load<WIDE>(x, nullptr, k), _mm512_loadu_ps(weights + k)));
        high = _mm512_add_ps(high, _mm512_mul_ps(load<WIDE>(x, nullptr, k + 16), _mm512_loadu_ps(weights + k + 16)));
    }
    float sums[16];
    _mm512_storeu_ps(sums, _mm512_add_ps(low, high));
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

void compute_int8(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    (p.linear.variant == INT8_AMX ? compute_tiles<Int8> : compute_vectors<Int8>)(p, from, to, panel, last);
}

END_INSTRUCTIONS

int last_int8_variant(bool has_amx) {
    if (!has_avx512() || !__builtin_cpu_supports("avx512vnni")) return 0;
    return has_amx ? INT8_AMX : INT8_VNNI;
}

namespace {

struct Memory {
    void* data = nullptr;
    int64_t size = 0;
    ~Memory() { free(data); }
};

thread_local Memory memory;  // of the rows that the thread has quantized last

struct Quantization {
    const Linear& linear;
    const uint8_t* x;
    int64_t size, x_bytes, max_far, row_bytes, rows, rows_a_chunk;
    bool wide;
    QuantizedRow* quantized;
    QuantizedRow::Far* far;
    float *exact, *inputs;
    uint8_t* near;
};

void quantize_chunk(void* job, int64_t chunk) {
    const Quantization& q = *(const Quantization*)job;
    for (int64_t i = chunk * q.rows_a_chunk; i < min_of(q.rows, (chunk + 1) * q.rows_a_chunk); i++) {
        QuantizedRow& row = q.quantized[i];
        row.far = q.far + i * q.max_far;
        row.exact = q.exact + i * q.linear.num_exact;
        row.inputs = q.inputs + i * q.linear.num_exact_inputs;
        const uint8_t* x = q.x + i * q.x_bytes;
        int8_t* near = (int8_t*)q.near + i * q.row_bytes;
        __builtin_memset(near + q.size, 0, q.row_bytes - q.size);
        (q.wide ? quantize<true> : quantize<false>)(x, q.linear.factors, q.size, q.max_far, near, row);
        for (int64_t e = 0; e < q.linear.num_exact; e++) {
            const float y = (q.wide ? exact_product<true> : exact_product<false>)(x, q.linear.exact + e * q.size, q.size);
            row.exact[e] = row.scale == row.scale ? y : row.scale;  // NaN, if an element is not finite
        }
        for (int64_t e = 0; e < q.linear.num_exact_inputs; e++) {
            const int32_t k = q.linear.exact_inputs[e];
            const uint32_t bits = q.wide ? ((const uint32_t*)x)[k] : (uint32_t)((const bf16*)x)[k] << 16;
            __builtin_memcpy(row.inputs + e, &bits, sizeof bits);
        }
    }
}

}  // namespace

void quantize_rows(Product& p, const void* x, bool wide) {
    const int64_t size = padded(p.linear.num_in, 32), max_far = (p.linear.num_in + 127) / 128;
    const int64_t num_exact = p.linear.num_exact;
    const int64_t each = p.row_bytes + sizeof(QuantizedRow) + max_far * sizeof(QuantizedRow::Far) +
                         (num_exact + p.linear.num_exact_inputs) * sizeof(float);
    if (memory.size < p.rows * each) {
        free(memory.data);
        memory.size = p.rows * each;
        memory.data = aligned_alloc(LINE, padded(memory.size, LINE));
    }
    auto* near = (uint8_t*)memory.data;
    auto* quantized = (QuantizedRow*)(near + p.rows * p.row_bytes);
    auto* far = (QuantizedRow::Far*)(quantized + p.rows);
    auto* exact = (float*)(far + p.rows * max_far);
    auto* inputs = exact + p.rows * num_exact;
    const int64_t rows_a_chunk = max_of(max_of(1, 32768 / size / (1 + num_exact)), p.rows / MAX_CHUNKS + 1);  // some 10 us
    Quantization q = {p.linear, (const uint8_t*)x, size, size * (wide ? 4 : 2), max_far, p.row_bytes, p.rows, rows_a_chunk,
                      wide, quantized, far, exact, inputs, near};
    run_chunks(quantize_chunk, &q, (p.rows + rows_a_chunk - 1) / rows_a_chunk, num_threads());
    p.x = near;
    p.quantized = quantized;
}

#else

void compute_int8(const Product&, int64_t, int64_t, int64_t, int64_t) {}
void quantize_rows(Product&, const void*, bool) {}
int last_int8_variant(bool) { return 0; }

#endif
