// Products with packed weights, y = act(x W^T + b) + residual: a C ABI for __init__.py, and those in bf16 themselves.
//
// It knows no torch; the caller passes pointers. The instructions are chosen at run time: AVX2 or AVX-512 in fp32,
// AVX512-BF16, or AMX. A Xeon multiplied twice as fast in fp32 as by AVX512-BF16, so Intel's CPUs take that before it.
// A sum in bf16 starts at 0. AVX2 and AVX-512 add element after element, with the same bits; AVX512-BF16 adds pair after
// pair, and AMX sums each piece of 32 elements from 0 before it adds it, so their bits may differ; these two take
// denormals as 0. linear_vectors.h and linear_kernel.h have the loops around them.

#include "linear.h"

#include "team.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

constexpr int64_t ROW_BYTES = 3 << 18; // of x that go with one pass over the weights: they stay in a CPU's own cache
constexpr int64_t CHUNK_NS = 20000;

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX2)
namespace avx2 {
#include "floats_avx2.h"
#include "activation.h"
#include "linear_vectors.h"
#include "linear_avx2.h"

// In fp32, with the bits of Bf16ByFma of AVX-512: a word is two elements of a row or of a weight, taken one after the
// other, the first in its lower half.
struct Bf16ByFma {
    static constexpr int MAX_ROWS = 6, PARTS = 2;
    typedef __m256 Sum;
    static __m256i part_of_x(int i, __m256i words) {
        return i == 0 ? _mm256_slli_epi32(words, 16) : _mm256_and_si256(words, _mm256_set1_epi32(0xffff0000));
    }
    static __m256i part_of_weights(int i, __m256i words) { return part_of_x(i, words); }
    static __m256 add_product(__m256 sum, __m256 x, __m256 weights) { return _mm256_fmadd_ps(x, weights, sum); }
    template <int R>
    static constexpr auto sum = sum_words<Bf16ByFma, R>;
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};

}  // namespace avx2
END_INSTRUCTIONS

#define WITH_BF16 WITH_AVX512 ",avx512bf16"
BEGIN_INSTRUCTIONS(WITH_BF16)
namespace avx512 {

#define MULTIPLY_TILES "tdpbf16ps"
#include "linear_kernel.h"

// In fp32. Elements are widened once for all their products: two of a row or of a weight lie in a word, the first in
// its lower half.
struct Bf16ByFma {
    static constexpr int MAX_ROWS = 12;
    static __m512 first(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
    static __m512 second(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)); }

    template <int R>
    static void sum(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
        __m512 sum[R][2];
        float wide[2][R][16];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        for (int64_t k = 0; k < row_bytes; k += LINE, panel += STEP) {
            UNROLL for (int r = 0; r < R; r++) {
                const __m512i pairs = _mm512_loadu_si512(x + r * row_bytes + k);
                _mm512_storeu_ps(wide[0][r], first(pairs));
                _mm512_storeu_ps(wide[1][r], second(pairs));
            }
            const uint8_t* ahead = soon(panel, end);
            for (int line = 0; line < 16; line++) {
                prefetch_lines(ahead + line * LINE);
                const __m512i left = _mm512_loadu_si512(panel + line * LINE);
                const __m512i right = _mm512_loadu_si512(panel + TILE + line * LINE);
                const __m512 weights[2][2] = {{first(left), first(right)}, {second(left), second(right)}};
                UNROLL for (int i = 0; i < 2; i++) {
                    UNROLL for (int r = 0; r < R; r++) {
                        const __m512 all = _mm512_set1_ps(wide[i][r][line]);
                        sum[r][0] = _mm512_fmadd_ps(all, weights[i][0], sum[r][0]);
                        sum[r][1] = _mm512_fmadd_ps(all, weights[i][1], sum[r][1]);
                    }
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            _mm512_storeu_ps(sums + r * 2 * LINE, sum[r][0]);
            _mm512_storeu_ps(sums + r * 2 * LINE + LINE, sum[r][1]);
        }
    }
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};

struct Bf16 {
    static constexpr int MAX_ROWS = 8;
    static __m512i dot(__m512i sum, __m512i x, __m512i weights) {
        return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
    }
    template <int R>
    static constexpr auto sum = sum_words<Bf16, R>;
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};

}  // namespace avx512
END_INSTRUCTIONS

static void compute_bf16(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const int variant = p.linear.variant;
    (variant == BF16_AMX   ? avx512::compute_tiles<avx512::Bf16>
     : variant == BF16_DOT ? avx512::compute_vectors<avx512::Bf16>
     : variant == BF16_FMA ? avx512::compute_vectors<avx512::Bf16ByFma>
                           : avx2::compute_vectors<avx2::Bf16ByFma>)(p, from, to, panel, last);
}

// Return whether the CPU multiplies tiles and the system lets this process use them.
static bool has_amx() {
#ifdef __linux__
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, BF16 = 1 << 22, TILES = 1 << 24, INT8 = 1 << 25;
    constexpr unsigned ALL = BF16 | TILES | INT8;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

// A CPU that has a variant has those before.
static int last_bf16_variant() {
    if (!has_avx512()) return has_avx2() ? BF16_AVX2 : 0;
    return !__builtin_cpu_supports("avx512bf16") ? BF16_FMA : has_amx() ? BF16_AMX : BF16_DOT;
}

static int fastest_bf16_variant() {
    const int last = last_bf16_variant();
    return last == BF16_DOT && __builtin_cpu_is("intel") ? (int)BF16_FMA : last;
}

#else

static bool has_amx() { return false; }
static int last_bf16_variant() { return 0; }
static int fastest_bf16_variant() { return 0; }
static void compute_bf16(const Product&, int64_t, int64_t, int64_t, int64_t) {}

#endif

static void compute_chunk(void* job, int64_t i) {
    const Product& p = *(const Product*)job;
    const int64_t from = i / p.chunks_a_pass * p.rows_a_chunk, panel = i % p.chunks_a_pass * p.panels_a_chunk;
    (p.quantized ? compute_int8 : compute_bf16)(p, from, min_of(from + p.rows_a_chunk, p.rows), panel,
                                                min_of(panel + p.panels_a_chunk, p.panels));
}

static bool uses_tiles(const Product& p) { return p.linear.variant == (p.quantized ? (int)INT8_AMX : (int)BF16_AMX); }

// Cut a product into chunks that take some CHUNK_NS, or less so that each thread has several. All panels of the first
// rows come first, then those of the next rows.
static int64_t cut(Product& p) {
    p.rows_a_chunk = min_of(p.rows, max_of(32, ROW_BYTES / p.row_bytes / 32 * 32));
    const int64_t passes = (p.rows + p.rows_a_chunk - 1) / p.rows_a_chunk;
    const int64_t bytes = p.row_bytes * COLUMNS;  // two of them take as long as one multiplication in bf16
    const int64_t panel_ns = bytes / 10 + bytes * p.rows_a_chunk / (uses_tiles(p) ? 1000 : 150);
    const int64_t few = max_of(1, p.panels * passes / (4 * num_threads()));
    p.panels_a_chunk = max_of(p.panels * passes / MAX_CHUNKS + 1, min_of(few, CHUNK_NS / (panel_ns + 1)));
    p.chunks_a_pass = (p.panels + p.panels_a_chunk - 1) / p.panels_a_chunk;
    return passes * p.chunks_a_pass;
}

static int64_t row_bytes_of(int64_t num_in, int64_t element_bytes) { return padded(num_in * element_bytes, LINE); }
static int64_t panels_of(int64_t num_out) { return (num_out + COLUMNS - 1) / COLUMNS; }

struct Packing {
    const uint8_t* weight;
    uint8_t* packed;
    int64_t num_in, num_out, element_bytes;
};

// A tile has 16 words of each of 16 rows, word by word: so a row is a column of tiles.
static void pack_panel(void* job, int64_t panel) {
    const Packing& p = *(const Packing*)job;
    const int64_t row_bytes = p.num_in * p.element_bytes, panel_bytes = row_bytes_of(p.num_in, p.element_bytes) * COLUMNS;
    const int64_t whole_bytes = row_bytes / 4 * 4;
    const uint32_t added = p.element_bytes == 1 ? 0x80808080 : 0;  // makes int8 unsigned
    uint8_t* to = p.packed + panel * panel_bytes;
    __builtin_memset(to, 0, panel_bytes);
    for (int64_t start = 0; start < row_bytes; start += LINE)
        for (int64_t column = 0; column < min_of(COLUMNS, p.num_out - panel * COLUMNS); column++) {
            const uint8_t* row = p.weight + (panel * COLUMNS + column) * row_bytes;
            uint8_t* lane = to + start / LINE * STEP + column / 16 * TILE + column % 16 * 4;
            for (int64_t i = start; i < min_of(start + LINE, whole_bytes); i += 4, lane += LINE) {
                uint32_t word;
                __builtin_memcpy(&word, row + i, 4);
                word ^= added;
                __builtin_memcpy(lane, &word, 4);
            }
            if (start + LINE >= row_bytes)
                for (int64_t i = whole_bytes; i < row_bytes; i++) *lane++ = row[i] ^ (uint8_t)added;
        }
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Raise it with every change of the exported functions, of Linear or of program.h, so that a stale library is refused.
EXPORT int native_abi() { return 14; }

// Whether the CPU has this variant of products in bf16, of which an element has 2 bytes, or in int8.
EXPORT bool native_has_variant(int64_t element_bytes, int variant) {
    return element_bytes == 1 ? has_int8_variant(variant, has_amx()) : variant <= last_bf16_variant();
}

// The fastest that the CPU has, or 0.
EXPORT int native_fastest_variant(int64_t element_bytes) {
    if (element_bytes == 2) return fastest_bf16_variant();
    int variant = INT8_AMX;
    while (variant > 0 && !has_int8_variant(variant, has_amx())) variant--;
    return variant;
}

// Bytes that a weight [num_out][num_in] takes packed.
EXPORT int64_t native_packed_size(int64_t num_in, int64_t num_out, int64_t element_bytes) {
    return row_bytes_of(num_in, element_bytes) * panels_of(num_out) * COLUMNS;
}

// Have the system populate a page: write to it without a change, as others may write there meanwhile. Compilers drop
// such a write unless it is volatile, and ThreadSanitizer takes it for a race with theirs.
__attribute__((no_sanitize("thread"))) static void touch(volatile uint8_t* memory) {
    __atomic_fetch_or(memory, 0, __ATOMIC_RELAXED);
}

constexpr int64_t SMALLEST_PAGE = 4096;

// Populate all pages in the calling thread.
EXPORT void native_populate(uint8_t* memory, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += SMALLEST_PAGE) touch(memory + i);
}

struct Arrays {
    uint8_t* memory;
    int64_t stride;
};

static void touch_array(void* job, int64_t array) {
    const Arrays& arrays = *(const Arrays*)job;
    touch(arrays.memory + array * arrays.stride);
}

// Populate the first page of each array, in the team. A chunk takes as long as the system needs for a page: up to 9 ms.
EXPORT void native_populate_first(uint8_t* memory, int64_t num_arrays, int64_t stride) {
    Arrays arrays = {memory, stride};
    run_chunks(touch_array, &arrays, min_of(MAX_CHUNKS, num_arrays), num_threads());
}

EXPORT void native_pack(const uint8_t* weight, int64_t num_in, int64_t num_out, int64_t element_bytes, uint8_t* packed) {
    for (int64_t panel = 0; panel < panels_of(num_out); panel += MAX_CHUNKS) {
        Packing p = {weight + panel * COLUMNS * num_in * element_bytes,
                     packed + panel * COLUMNS * row_bytes_of(num_in, element_bytes), num_in, num_out - panel * COLUMNS,
                     element_bytes};
        run_chunks(pack_panel, &p, min_of(MAX_CHUNKS, panels_of(p.num_out)), num_threads());
    }
}

// x is [rows][num_in, padded with zeros to a multiple of 32], residual null or [rows][num_out]: both in fp32 with WIDE_X,
// which is for int8 alone, else in bf16. out is [rows][num_out] in fp32 with WIDE_OUT, else in bf16. All are contiguous.
EXPORT void native_multiply(const Linear* linear, const void* x, const void* residual, void* out, int64_t rows,
                            int width) {
    const bool is_wide = width & WIDE_X;
    Product p = {*linear, (const uint8_t*)x, nullptr, residual, out, (width & WIDE_OUT) != 0, is_wide, rows,
                 row_bytes_of(linear->num_in, linear->scales ? 1 : 2), panels_of(linear->num_out), 0, 0, 0};
    if (rows <= 0) return;
    if (linear->scales) quantize_rows(p, x, is_wide);
    run_chunks(compute_chunk, &p, cut(p), num_threads());
}
