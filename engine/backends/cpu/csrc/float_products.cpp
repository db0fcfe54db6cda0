// Products in fp32 and bf16, by the instructions that the CPU has: those of any CPU, AVX2 or AVX-512 in fp32,
// AVX512-BF16, or AMX.
//
// A Xeon multiplied twice as fast in fp32 as by AVX512-BF16, so Intel's CPUs take that before it in bf16. A sum starts
// at 0. The first three add element after element, in fp32 each PIECE of a row from 0 before they add it: AVX2 and
// AVX-512 with the same bits, the generic one with others where it has no fused multiply-add. AVX512-BF16 adds pair
// after pair, and AMX sums each piece of 32 elements from 0 before it adds it, so their bits may differ; these two take
// denormals as 0. linear_vectors.h has the loops around the sums.

#include "linear.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace generic {
#include "floats_generic.h"
#include "activation.h"
#include "linear_vectors.h"
#include "linear_words.h"
}  // namespace generic

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX2)
namespace avx2 {
#include "floats_avx2.h"
#include "activation.h"
#include "linear_vectors.h"
#include "linear_words.h"
}  // namespace avx2
END_INSTRUCTIONS

#define WITH_BF16 WITH_AVX512 ",avx512bf16"
BEGIN_INSTRUCTIONS(WITH_BF16)
namespace avx512 {

#define MULTIPLY_TILES "tdpbf16ps"
#include "linear_kernel.h"

// In fp32. A word of a row or of a weight is one element in fp32, or PARTS elements in bf16, the first in its lower half;
// they are widened once for all their products.
template <int PARTS>
struct InFp32 {
    static constexpr int MAX_ROWS = 12;
    static __m512 part(int i, __m512i words) {
        if (PARTS == 2)
            words = i == 0 ? _mm512_slli_epi32(words, 16) : _mm512_and_si512(words, _mm512_set1_epi32(0xffff0000));
        return (__m512)words;
    }

    template <int R>
    static void sum(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
        const int64_t piece = PARTS == 1 ? PIECE : row_bytes;
        for (int64_t start = 0; start < row_bytes; start += piece) {
            __m512 sum[R][2];
            float wide[PARTS][R][16];
            UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
            const int64_t stop = min_of(start + piece, row_bytes);
            for (int64_t k = start; k < stop; k += LINE, panel += STEP) {
                UNROLL for (int r = 0; r < R; r++) {
                    const __m512i words = _mm512_loadu_si512(x + r * row_bytes + k);
                    UNROLL for (int i = 0; i < PARTS; i++) _mm512_storeu_ps(wide[i][r], part(i, words));
                }
                const uint8_t* ahead = soon(panel, end);
                for (int word = 0; word < 16; word++) {
                    prefetch_words(ahead + word * WORDS);
                    const __m512i left = _mm512_loadu_si512(panel + word * WORDS);
                    const __m512i right = _mm512_loadu_si512(panel + word * WORDS + LINE);
                    UNROLL for (int i = 0; i < PARTS; i++) {
                        const __m512 weights[2] = {part(i, left), part(i, right)};
                        UNROLL for (int r = 0; r < R; r++) {
                            const __m512 all = _mm512_set1_ps(wide[i][r][word]);
                            sum[r][0] = _mm512_fmadd_ps(all, weights[0], sum[r][0]);
                            sum[r][1] = _mm512_fmadd_ps(all, weights[1], sum[r][1]);
                        }
                    }
                }
            }
            UNROLL for (int r = 0; r < R; r++) {
                UNROLL for (int half = 0; half < 2; half++) {
                    float* total = (float*)sums + r * COLUMNS + half * 16;
                    const __m512 before = start == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(total);
                    _mm512_storeu_ps(total, before + sum[r][half]);
                }
            }
        }
    }
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};

struct Bf16 {
    static constexpr int MAX_ROWS = 8;
    static constexpr bool PREFETCHES = false;  // Intel's CPUs take AVX-512 or AMX
    static __m512i dot(__m512i sum, __m512i x, __m512i weights) {
        return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
    }
    template <int R>
    static constexpr auto sum = sum_words<Bf16, R>;
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};

}  // namespace avx512
END_INSTRUCTIONS

#endif

typedef void (*Compute)(const Product&, int64_t from, int64_t to, int64_t panel, int64_t last);

static Compute compute_fp32([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant == AVX512) return avx512::compute_vectors<avx512::InFp32<1>>;
    if (variant == AVX2) return avx2::compute_vectors<avx2::InFp32<1>>;
#endif
    return generic::compute_vectors<generic::InFp32<1>>;
}

static Compute compute_bf16([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant == AMX) return avx512::compute_tiles<avx512::Bf16>;
    if (variant == AVX512_BF16) return avx512::compute_vectors<avx512::Bf16>;
    if (variant == AVX512) return avx512::compute_vectors<avx512::InFp32<2>>;
    if (variant == AVX2) return avx2::compute_vectors<avx2::InFp32<2>>;
#endif
    return generic::compute_vectors<generic::InFp32<2>>;
}

void compute_floats(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    (p.linear.element_bits == 32 ? compute_fp32 : compute_bf16)(p.linear.variant)(p, from, to, panel, last);
}

bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, BF16 = 1 << 22, TILES = 1 << 24, INT8 = 1 << 25;
    constexpr unsigned ALL = BF16 | TILES | INT8;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

int last_float_variant([[maybe_unused]] int64_t element_bits) {
#if defined(__x86_64__)
    if (has_avx512())
        return element_bits == 32 || !__builtin_cpu_supports("avx512bf16") ? AVX512 : has_amx() ? AMX : AVX512_BF16;
    if (has_avx2()) return AVX2;
#endif
    return GENERIC;
}

int fastest_float_variant(int64_t element_bits) {
    const int last = last_float_variant(element_bits);
#if defined(__x86_64__)
    if (last == AVX512_BF16 && __builtin_cpu_is("intel")) return AVX512;
#endif
    return last;
}
