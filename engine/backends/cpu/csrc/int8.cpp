// Products in int8 and int10: rows of x are quantized as they come, and sums are integers.
//
// The weights of an output are whole multiples, -127 to 127, of its scale. The elements of a row are multiples of a scale
// of the row: its quantization depends on that row alone. Most multiples are -127 to 127. Up to one element in 128 may lie
// beyond, so that few outliers do not make the rest coarse: it is 128 times a far part plus a near part. The words of 4
// elements that have a far part are multiplied once more. Few outputs, those with by far the largest weights, are
// products of numbers that are not quantized, and so are few elements of all rows with their weights.
//
// Integer sums are exact, so all variants and engine/backends/cpu/int8.py, which says the same in torch, give the same bits:
//   y = (near + 128 far) * row scale * output scale, near and far being sums converted to fp32; then the products with
//   elements that are not quantized are added, one after the other; the rest, with its activations, as in bf16.
// Products that are not quantized have the same bits everywhere, too: exact_product sums in one order.
//
// The instructions of VNNI and AMX multiply signed with unsigned bytes, so packed weights in int8 have 128 added, which
// is subtracted with the sums of the rows.
//
// In int10 weights are multiples of -511 to 511. Most elements of a row are multiples of -1023 to 1023; the outliers, at
// most MAX_OUTLIERS_10 and one in 128, have 16 bits, so there are no far parts. The products of SEGMENT elements are
// summed as integers, and these sums in fp32, in ascending order. That is multiplied by the scales, and so on.
//
// A row with an element that is not finite gives NaN. int8_kernel.h has all but the sums; tests/engine/backends/cpu/int10.py
// says in torch what int10 is.

#include "linear.h"
#include "scratch.h"
#include "team.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

constexpr int LEVEL = 20;    // the bits of a float from here on, without its sign: an eighth of an octave
constexpr int LEVELS = 48;   // a far part stays below 64
constexpr int LEVELS_10 = 40;  // and multiples in int10 stay below 2^15

namespace generic {

#include "floats_generic.h"
#include "ints_generic.h"
#include "int8_words.h"
#include "int10_kernel.h"

}  // namespace generic

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX2)
namespace avx2 {

#include "floats_avx2.h"
#include "ints_avx2.h"
#include "int8_words.h"
#include "int10_kernel.h"

// By AVX-VNNI, in assembly, as compilers that know AVX512-BF16 may not know it.
struct Int8ByVnni {
    static constexpr int MAX_ROWS = 6, PARTS = 1;
    static constexpr bool IN_PIECES = false;
    typedef Words Sum;
    static Words part_of_x(int, Words words) { return words; }
    static Words part_of_weights(int, Words words) { return words; }
    static Words add_product(Words sum, Words x, Words weights) {
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
        return sum;
    }
    template <int R>
    static constexpr auto sum = sum_words<Int8ByVnni, R>;
    static constexpr auto finish_sums = finish_int8;
};

}  // namespace avx2
END_INSTRUCTIONS

#define WITH_VNNI WITH_AVX512 ",avx512vnni"
BEGIN_INSTRUCTIONS(WITH_VNNI)
namespace avx512 {

#define MULTIPLY_TILES "tdpbsud"
#include "linear_kernel.h"
#include "ints_avx512.h"
#include "int8_kernel.h"
#include "int10_kernel.h"

template <bool HAS_PREFETCHES>
struct Int8 {
    static constexpr int MAX_ROWS = 8;
    static constexpr bool PREFETCHES = HAS_PREFETCHES;
    static __m512i dot(__m512i sum, __m512i x, __m512i weights) { return _mm512_dpbusd_epi32(sum, weights, x); }
    template <int R>
    static constexpr auto sum = sum_words<Int8, R>;
    static constexpr auto finish_sums = finish_int8;
};

}  // namespace avx512
END_INSTRUCTIONS

static bool has_avx_vnni() {
    constexpr unsigned AVX_VNNI = 1 << 4;
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
}

static bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

#endif

void compute_int10(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    auto compute = generic::compute_vectors<generic::Int10<2, false>>;  // only tests take it: bf16 is faster
#if defined(__x86_64__)
    if (p.linear.variant >= INT8_VNNI)
        compute = __builtin_cpu_is("intel") ? avx512::compute_vectors<avx512::Int10<8, true>>
                                            : avx512::compute_vectors<avx512::Int10<8, false>>;
    else if (p.linear.variant >= INT8_AVX2) compute = avx2::compute_vectors<avx2::Int10<4, false>>;
#endif
    compute(p, from, to, panel, last);
}

void compute_int8(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    auto compute = generic::compute_vectors<generic::Int8>;
#if defined(__x86_64__)
    const int variant = p.linear.variant;
    if (variant == INT8_AMX) compute = avx512::compute_tiles<avx512::Int8<true>>;  // tiles always prefetch
    if (variant == INT8_VNNI)
        compute = __builtin_cpu_is("intel") ? avx512::compute_vectors<avx512::Int8<true>>
                                            : avx512::compute_vectors<avx512::Int8<false>>;
    if (variant == INT8_AVX_VNNI) compute = avx2::compute_vectors<avx2::Int8ByVnni>;
    if (variant == INT8_AVX2) compute = avx2::compute_vectors<avx2::Int8>;
#endif
    compute(p, from, to, panel, last);
}

bool has_int8_variant(int variant) {
#if defined(__x86_64__)
    if (variant == INT8_AMX) return has_avx512_vnni() && has_amx();
    if (variant == INT8_VNNI) return has_avx512_vnni();
    if (variant == INT8_AVX_VNNI) return has_avx_vnni();
    if (variant == INT8_AVX2) return has_avx2();
#endif
    return variant == INT8_GENERIC;
}

namespace {

thread_local Scratch memory;  // of the rows that the thread has quantized last

typedef void (*QuantizeRow)(const Linear&, const void* x, int64_t size, int64_t max_far, int8_t* near, QuantizedRow&);

struct Quantization {
    const Linear& linear;
    const uint8_t* x;
    int64_t size, x_bytes, max_far, row_bytes, rows, rows_a_chunk;
    QuantizedRow* quantized;
    QuantizedRow::Far* far;
    float *exact, *inputs;
    uint8_t* near;
    QuantizeRow quantize_row;
};

template <bool WIDE>
QuantizeRow quantize_row_by([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant >= INT8_VNNI) return avx512::quantize_row<WIDE>;
    if (variant >= INT8_AVX2) return avx2::quantize_row<WIDE>;
#endif
    return generic::quantize_row<WIDE>;
}

void quantize_chunk(void* job, int64_t chunk) {
    const Quantization& q = *(const Quantization*)job;
    for (int64_t i = chunk * q.rows_a_chunk; i < min_of(q.rows, (chunk + 1) * q.rows_a_chunk); i++) {
        QuantizedRow& row = q.quantized[i];
        row.far = q.far + i * q.max_far;
        row.exact = q.exact + i * q.linear.num_exact;
        row.inputs = q.inputs + i * q.linear.num_exact_inputs;
        const uint8_t* x = q.x + i * q.x_bytes;
        int8_t* near = (int8_t*)q.near + i * q.row_bytes;
        const int64_t num_bytes = q.size * (q.linear.element_bits == 10 ? 2 : 1);
        __builtin_memset(near + num_bytes, 0, q.row_bytes - num_bytes);
        q.quantize_row(q.linear, x, q.size, q.max_far, near, row);
    }
}

}  // namespace

void quantize_rows(Product& p, const void* x, bool wide) {
    const int64_t size = padded(p.linear.num_in, ROW_MULTIPLE), max_far = (p.linear.num_in + 127) / 128;
    const int64_t num_exact = p.linear.num_exact;
    const int64_t each = p.row_bytes + sizeof(QuantizedRow) + max_far * sizeof(QuantizedRow::Far) +
                         (num_exact + p.linear.num_exact_inputs) * sizeof(float);
    auto* near = (uint8_t*)memory.take(p.rows * each);
    auto* quantized = (QuantizedRow*)(near + p.rows * p.row_bytes);
    auto* far = (QuantizedRow::Far*)(quantized + p.rows);
    auto* exact = (float*)(far + p.rows * max_far);
    auto* inputs = exact + p.rows * num_exact;
    const int64_t rows_a_chunk = max_of(max_of(1, 32768 / size / (1 + num_exact)), p.rows / MAX_CHUNKS + 1);  // some 10 us
    Quantization q = {p.linear, (const uint8_t*)x, size, size * (wide ? 4 : 2), max_far, p.row_bytes, p.rows, rows_a_chunk,
                      quantized, far, exact, inputs, near,
                      (wide ? quantize_row_by<true> : quantize_row_by<false>)(p.linear.variant)};
    run_chunks(quantize_chunk, &q, (p.rows + rows_a_chunk - 1) / rows_a_chunk, num_threads());
    p.x = near;
    p.quantized = quantized;
}
