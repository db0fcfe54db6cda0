// Products with weights that are codes in groups, as they are stored. groups.h says how they lie, groups_kernel.h
// what is computed, with the same bits by all instructions; tests/engine/backends/cpu/coded.py says it in torch.
//
// Rows of x become codes of 8 bits, with a scale for each group: a group's quantization depends on it alone. A row with an
// element that is not finite gives NaN.

#include "groups.h"

#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "scratch.h"
#include "team.h"

// The part of a weight that has this panel.
static const CodedRows& part_of(const Linear& linear, int64_t panel) {
    const CodedRows* part = linear.parts + linear.num_parts - 1;
    while (part->panel > panel) part--;
    return *part;
}

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

static inline Words widened_bytes(const uint8_t* p) {
    return Words{(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
}

static inline Words looked_up(Words places) {
    uint8_t bytes[sizeof places];
    __builtin_memcpy(bytes, &places, sizeof bytes);
    for (uint8_t& byte : bytes) byte = TABLE[byte];
    return words_at(bytes);
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
static inline Words widened_bytes(const uint8_t* p) { return (Words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline Words looked_up(Words places) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TABLE));
    return (Words)_mm256_shuffle_epi8(table, (__m256i)places);
}

// By pairs of 16 bits. The products of codes of 4 bits, 8 pairs of them a group, are sums of 16 bits: at most 16 * 15 *
// 127 = 30,480. A pair of 6 bits is at most 2 * 63 * 127 = 16,002.
template <int BITS>
struct Dot {
    static Words add(Words sum, Words x, Words weights) {
        if (BITS < 8) {
            const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
            if (BITS == 4) return (Words)_mm256_add_epi16((__m256i)sum, pairs);
            return sum + (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
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
static inline Words widened_bytes(const uint8_t* p) { return (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline Words looked_up(Words places) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)TABLE));
    return (Words)_mm512_shuffle_epi8(table, (__m512i)places);
}

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

bool has_int8_variant(int variant) {
#if defined(__x86_64__)
    if (variant == INT8_VNNI) return has_avx512() && __builtin_cpu_supports("avx512vnni");
    if (variant == INT8_AVX2) return has_avx2();
    constexpr unsigned AVX_VNNI = 1 << 4;
    unsigned a, b, c, d;
    if (variant == INT8_AVX_VNNI) return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
#endif
    return variant == INT8_GENERIC;
}

// What computes outputs of a part of a Linear of this variant, by its format.
static generic::Compute compute_of([[maybe_unused]] int variant, int64_t format) {
#if defined(__x86_64__)
    if (variant >= INT8_VNNI)
        return __builtin_cpu_is("intel") ? avx512::compute_of<8, true>(format) : avx512::compute_of<8, false>(format);
    if (variant == INT8_AVX_VNNI) return avx2::vnni::compute_of<4, false>(format);
    if (variant == INT8_AVX2) return avx2::compute_of<4, false>(format);
#endif
    return generic::compute_of<2, false>(format);
}

void compute_groups(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const Linear& linear = p.linear;
    for (int64_t i = 0; i < linear.num_parts; i++) {
        const CodedRows& part = linear.parts[i];
        const int64_t end = i + 1 < linear.num_parts ? linear.parts[i + 1].panel : p.panels;
        const int64_t first = max_of(panel, part.panel), its_last = min_of(last, end);
        if (first < its_last) compute_of(linear.variant, part.format)(p, part, from, to, first, its_last);
    }
}

int64_t grouped_panel_bytes(const Linear& linear) {
    const int64_t panels = quotient(linear.num_out, COLUMNS);
    int64_t bytes = 0;
    for (int64_t i = 0; i < linear.num_parts; i++) {
        const int64_t end = i + 1 < linear.num_parts ? linear.parts[i + 1].panel : panels;
        bytes += (end - linear.parts[i].panel) * CODE_FORMATS[linear.parts[i].format].panel_bytes(linear.num_in);
    }
    return bytes / panels;
}

namespace {

thread_local Scratch memory;  // of the rows that the thread has quantized last

struct Quantization {
    const uint8_t* x;
    RowGroup* groups;
    Remainder* remainders;
    int64_t size, x_bytes, num_remainders, rows, rows_a_chunk;
    void (*quantize_row)(const void* x, int64_t size, RowGroup* groups);
    void (*quantize_remainders)(const void* x, int64_t size, int64_t num, Remainder* remainders);
};

template <bool WIDE>
auto quantize_remainders_by([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant >= INT8_VNNI) return avx512::quantize_remainders<WIDE>;
    if (variant >= INT8_AVX2) return avx2::quantize_remainders<WIDE>;
#endif
    return generic::quantize_remainders<WIDE>;
}

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
    for (int64_t i = chunk * q.rows_a_chunk; i < min_of(q.rows, (chunk + 1) * q.rows_a_chunk); i++) {
        q.quantize_row(q.x + i * q.x_bytes, q.size, q.groups + i * (q.size / GROUP));
        if (q.num_remainders > 0)
            q.quantize_remainders(q.x + i * q.x_bytes, q.size, q.num_remainders, q.remainders + i * q.num_remainders);
    }
}

struct Packing {
    NumbersOfCodes numbers;
    uint8_t* packed;
    int64_t num_in, num_out;
    CodeFormat format;
};

// Put the codes of a group of an output into their words.
void pack_group(const uint8_t* codes, const CodeFormat& format, uint8_t* upper, uint8_t* lower) {
    uint32_t parts[GROUP / 4], lower_words[GROUP / 4] = {}, upper_words[2] = {};
    __builtin_memcpy(parts, codes, sizeof parts);
    const int bits = format.lower_bits(), upper_bits = format.upper_bits(), num = 8 / bits;  // parts of a lower word
    for (int part = 0; part < GROUP / 4; part++) {
        const uint32_t nibbles = 0x0f0f0f0f, low = bits == 8 ? parts[part] : parts[part] & nibbles;
        lower_words[part / num] |= low << part % num * bits;
        if (upper_bits) upper_words[part * upper_bits / 8] |= (parts[part] >> 4 & nibbles) << part * upper_bits % 8;
    }
    for (int i = 0; i < GROUP / 4 / num; i++) __builtin_memcpy(lower + i * WORDS, lower_words + i, 4);
    for (int i = 0; i < upper_bits; i++) __builtin_memcpy(upper + i * WORDS, upper_words + i, 4);
}

template <class Number>
const Number* from(const Number* numbers, int64_t at) {
    return numbers ? numbers + at : nullptr;
}

// Put numbers [outputs][a row] of a panel's outputs from `at` of each row on: [num][COLUMNS].
template <class Number>
void put_numbers(const Number* from, int64_t a_row, int64_t at, int num, int64_t outputs, uint8_t* to) {
    for (int i = 0; i < num; i++)
        for (int64_t column = 0; column < outputs; column++)
            __builtin_memcpy(to + (i * COLUMNS + column) * sizeof(Number), from + column * a_row + at + i, sizeof(Number));
}

void pack_panel(void* job, int64_t panel) {
    const Packing& p = *(const Packing*)job;
    const CodeFormat& f = p.format;
    const int64_t first = panel * COLUMNS, outputs = min_of(COLUMNS, p.num_out - first), num_groups = p.num_in / GROUP;
    const int64_t halves = num_groups / f.num_groups(), integers = f.sub_group ? GROUP / f.sub_group : 0;
    uint8_t* to = p.packed + panel * f.panel_bytes(p.num_in);
    __builtin_memset(to, 0, f.panel_bytes(p.num_in));
    const uint16_t *scales = p.numbers.scales + first * halves, *others = from(p.numbers.others, first * halves);
    for (int64_t g = 0; g < num_groups; g++, to += f.group_bytes()) {
        if (g % f.num_groups() == 0) {
            const int64_t at = g / f.num_groups();
            put_numbers(scales, halves, at, 1, outputs, to);
            if (f.num_others()) put_numbers(others, halves, at, 1, outputs, to + COLUMNS * 2);
            to += f.head_bytes();
        }
        if (f.sub_group) {
            const int64_t a_row = integers * num_groups;
            put_numbers(p.numbers.sub_scales + first * a_row, a_row, g * integers, integers, outputs, to);
            if (f.num_others())
                put_numbers(p.numbers.sub_leasts + first * num_groups, num_groups, g, 1, outputs, to + COLUMNS * integers);
        }
        uint8_t* upper = to + f.numbers_bytes();
        for (int64_t column = 0; column < outputs; column++)
            pack_group(p.numbers.codes + ((first + column) * num_groups + g) * GROUP, f, upper + column * 4,
                       upper + f.upper_bytes() + column * 4);
    }
}

}  // namespace

void quantize_groups(Product& p, const void* x, bool wide) {
    const Linear& linear = p.linear;
    const int64_t size = linear.num_in;
    const int64_t rows_a_chunk = max_of(max_of(1, 32768 / size), p.rows / MAX_CHUNKS + 1);  // some 10 us
    for (int64_t i = 0; i < linear.num_parts; i++)
        if (CODE_FORMATS[linear.parts[i].format].has_remainders()) p.num_remainders = remainders_of(size);
    auto* groups = (RowGroup*)memory.take(p.rows * (p.row_bytes + p.num_remainders * sizeof(Remainder)));
    auto* remainders = (Remainder*)((uint8_t*)groups + p.rows * p.row_bytes);
    Quantization q = {(const uint8_t*)x, groups, remainders, size, size * (wide ? 4 : 2), p.num_remainders, p.rows,
                      rows_a_chunk, (wide ? quantize_row_by<true> : quantize_row_by<false>)(linear.variant),
                      (wide ? quantize_remainders_by<true> : quantize_remainders_by<false>)(linear.variant)};
    run_chunks(quantize_chunk, &q, quotient(p.rows, rows_a_chunk), num_threads());
    p.x = (const uint8_t*)groups;
    p.remainders = remainders;
}

// Bytes that codes [num_out][num_in] of a format take packed, with what belongs to their groups.
EXPORT int64_t native_grouped_size(int64_t num_in, int64_t num_out, int64_t format) {
    return CODE_FORMATS[format].panel_bytes(num_in) * quotient(num_out, COLUMNS);
}

// Pack codes [num_out][num_in] and the numbers of their groups.
EXPORT void native_pack_groups(const NumbersOfCodes* numbers, int64_t num_in, int64_t num_out, int64_t format,
                               uint8_t* packed) {
    const CodeFormat& f = CODE_FORMATS[format];
    const int64_t groups = num_in / GROUP, halves = groups / f.num_groups();
    const int64_t integers = f.sub_group ? num_in / f.sub_group : 0;
    for (int64_t start = 0; start < num_out; start += MAX_CHUNKS * COLUMNS) {
        const int64_t num = min_of(num_out - start, MAX_CHUNKS * COLUMNS);
        const NumbersOfCodes its = {numbers->codes + start * num_in, numbers->scales + start * halves,
                                    from(numbers->others, start * halves), from(numbers->sub_scales, start * integers),
                                    from(numbers->sub_leasts, start * groups)};
        Packing p = {its, packed + native_grouped_size(num_in, start, format), num_in, num, f};
        run_chunks(pack_panel, &p, quotient(num, COLUMNS), num_threads());
    }
}
