// Products with weights that are codes in groups of 32, as they are stored. groups.h says how they lie, groups_kernel.h
// what is computed, with the same bits by all instructions; tests/engine/backends/cpu/groups.py says it in torch.
//
// Rows of x become codes of 8 bits, with a scale for each group: a group's quantization depends on it alone. A row with an
// element that is not finite gives NaN.

#include "groups.h"

#include "scratch.h"
#include "team.h"

namespace generic {

#include "floats_generic.h"
#include "ints_generic.h"
#include "activation.h"
#include "linear_vectors.h"
#include "linear_words.h"

// Halves have the bits of floats, shifted, but for an exponent that is 112 less: a product corrects it, for subnormal
// ones, too.
static inline Vector widened_halves(const uint8_t* p) {
    uint16_t halves[4];
    __builtin_memcpy(halves, p, sizeof halves);
    const FourInts bits = {halves[0], halves[1], halves[2], halves[3]};
    const FourInts magnitudes = (bits & 0x7fff) << 13, not_finite = magnitudes >= 0x7c00 << 13;
    const FourInts finite = (FourInts)((Vector)magnitudes * 0x1p112f);
    return (Vector)(finite | (not_finite & (magnitudes | 0x7f800000)) | (bits & 0x8000) << 16);
}

template <int BITS>
struct Dot {
    static Words add(Words sum, Words x, Words weights) {
        UNROLL for (int i = 0; i < 2; i++) sum = add_pairs(sum, pairs_of_x(i, x), pairs_of_weights(i, weights));
        return sum;
    }
    static Words total(Words sum) { return sum; }
};

#include "groups_kernel.h"

}  // namespace generic

#if defined(__x86_64__)

#define WITH_HALVES WITH_AVX2 ",f16c"
BEGIN_INSTRUCTIONS(WITH_HALVES)
namespace avx2 {

#include "floats_avx2.h"
#include "ints_avx2.h"
#include "activation.h"
#include "linear_vectors.h"
#include "linear_words.h"

static inline Vector widened_halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

// By pairs of 16 bits. The products of codes of 4 bits, 8 pairs of them a group, are sums of 16 bits: at most 16 * 15 *
// 127 = 30,480.
template <int BITS>
struct Dot {
    static Words add(Words sum, Words x, Words weights) {
        if (BITS == 4) {
            const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
            return (Words)_mm256_add_epi16((__m256i)sum, pairs);
        }
        UNROLL for (int i = 0; i < 2; i++) sum = add_pairs(sum, pairs_of_x(i, x), pairs_of_weights(i, weights));
        return sum;
    }
    static Words total(Words sum) {
        return BITS == 4 ? (Words)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) : sum;
    }
};

#include "groups_kernel.h"

namespace vnni {

// By AVX-VNNI, in assembly, as compilers that know AVX512-BF16 may not know it.
template <int BITS>
struct Dot {
    static Words add(Words sum, Words x, Words weights) {
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
        return sum;
    }
    static Words total(Words sum) { return sum; }
};

#include "groups_kernel.h"

}  // namespace vnni
}  // namespace avx2
END_INSTRUCTIONS

#define WITH_VNNI WITH_AVX512 ",avx512vnni"
BEGIN_INSTRUCTIONS(WITH_VNNI)
namespace avx512 {

#include "floats_avx512.h"
#include "ints_avx512.h"
#include "activation.h"
#include "linear_vectors.h"

static inline Vector widened_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

template <int BITS>
struct Dot {
    static Words add(Words sum, Words x, Words weights) {
        return (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
    }
    static Words total(Words sum) { return sum; }
};

#include "groups_kernel.h"

}  // namespace avx512
END_INSTRUCTIONS

#endif

void compute_groups(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const Linear& linear = p.linear;
    auto compute = generic::compute_of<2, false>(linear);
#if defined(__x86_64__)
    if (linear.variant >= INT8_VNNI)
        compute = (__builtin_cpu_is("intel") ? avx512::compute_of<6, true> : avx512::compute_of<6, false>)(linear);
    else if (linear.variant == INT8_AVX_VNNI) compute = avx2::vnni::compute_of<4, false>(linear);
    else if (linear.variant == INT8_AVX2) compute = avx2::compute_of<4, false>(linear);
#endif
    compute(p, from, to, panel, last);
}

namespace {

thread_local Scratch memory;  // of the rows that the thread has quantized last

struct Quantization {
    const uint8_t* x;
    RowGroup* groups;
    int64_t size, x_bytes, rows, rows_a_chunk;
    int32_t zero;
    void (*quantize_row)(const void* x, int64_t size, int32_t zero, RowGroup* groups);
};

template <bool WIDE>
auto quantize_row_by([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant >= INT8_VNNI) return avx512::quantize_row_groups<WIDE>;
    if (variant >= INT8_AVX2) return avx2::quantize_row_groups<WIDE>;
#endif
    return generic::quantize_row_groups<WIDE>;
}

void quantize_chunk(void* job, int64_t chunk) {
    const Quantization& q = *(const Quantization*)job;
    for (int64_t i = chunk * q.rows_a_chunk; i < min_of(q.rows, (chunk + 1) * q.rows_a_chunk); i++)
        q.quantize_row(q.x + i * q.x_bytes, q.size, q.zero, q.groups + i * (q.size / GROUP));
}

struct Packing {
    const uint8_t* codes;
    const uint16_t *scales, *others;
    uint8_t* packed;
    int64_t num_in, num_out;
    int bits, grouping;
};

void pack_panel(void* job, int64_t panel) {
    const Packing& p = *(const Packing*)job;
    const int64_t panel_bytes = grouped_panel_bytes(p.num_in, p.bits, p.grouping), num_groups = p.num_in / GROUP;
    const int64_t bytes = group_bytes_of(p.bits, p.grouping), word_bytes = COLUMNS * GROUP * p.bits / 8;
    uint8_t* to = p.packed + panel * panel_bytes;
    __builtin_memset(to, 0, panel_bytes);
    for (int64_t g = 0; g < num_groups; g++, to += bytes)
        for (int64_t column = 0; column < min_of(COLUMNS, p.num_out - panel * COLUMNS); column++) {
            const int64_t group = (panel * COLUMNS + column) * num_groups + g;
            __builtin_memcpy(to + column * 2, p.scales + group, 2);
            if (p.grouping != SCALES) __builtin_memcpy(to + COLUMNS * 2 + column * 2, p.others + group, 2);
            const uint8_t* codes = p.codes + group * GROUP;
            uint8_t* lane = to + bytes - word_bytes + column * 4;
            if (p.bits == 8)
                for (int k = 0; k < GROUP; k += 4, lane += WORDS) __builtin_memcpy(lane, codes + k, 4);
            else
                for (int k = 0; k < GROUP; k += 8, lane += WORDS)
                    for (int i = 0; i < 4; i++) lane[i] = codes[k + i] | codes[k + 4 + i] << 4;
        }
}

}  // namespace

void quantize_groups(Product& p, const void* x, bool wide) {
    const Linear& linear = p.linear;
    const int64_t size = linear.num_in;
    const int64_t rows_a_chunk = max_of(max_of(1, 32768 / size), p.rows / MAX_CHUNKS + 1);  // some 10 us
    const int32_t zero = linear.grouping == SCALES ? 1 << (linear.element_bits - 1) : 0;
    auto* groups = (RowGroup*)memory.take(p.rows * p.row_bytes);
    Quantization q = {(const uint8_t*)x, groups, size, size * (wide ? 4 : 2), p.rows, rows_a_chunk, zero,
                      (wide ? quantize_row_by<true> : quantize_row_by<false>)(linear.variant)};
    run_chunks(quantize_chunk, &q, quotient(p.rows, rows_a_chunk), num_threads());
    p.x = (const uint8_t*)groups;
}

// Bytes that codes [num_out][num_in] take packed, with what belongs to their groups.
EXPORT int64_t native_grouped_size(int64_t num_in, int64_t num_out, int bits, int grouping) {
    return grouped_panel_bytes(num_in, bits, grouping) * quotient(num_out, COLUMNS);
}

// Pack codes [num_out][num_in], a byte each, and scales [num_out][num_in / 32] in fp16. `others` are the least values or
// the zeros, alike; null if there are none.
EXPORT void native_pack_groups(const uint8_t* codes, const uint16_t* scales, const uint16_t* others, int64_t num_in,
                               int64_t num_out, int bits, int grouping, uint8_t* packed) {
    for (int64_t start = 0; start < num_out; start += MAX_CHUNKS * COLUMNS) {
        const int64_t first = start * (num_in / GROUP), num = min_of(num_out - start, MAX_CHUNKS * COLUMNS);
        Packing p = {codes + start * num_in, scales + first, others ? others + first : nullptr,
                     packed + native_grouped_size(num_in, start, bits, grouping), num_in, num, bits, grouping};
        run_chunks(pack_panel, &p, quotient(num, COLUMNS), num_threads());
    }
}
