// Products of bf16 rows with packed bf16 weights, y = act(x W^T + b) + residual: a C ABI for __init__.py.
//
// It knows no torch; the caller passes pointers. The instructions are chosen at run time: AVX512-BF16, or AMX on top.
// The bits of an element do not depend on the rows beside it, the chunk or the thread, by construction:
//   sum         starts at 0 and takes the depth in ascending pieces of DEPTH, always the same ones. In a piece, AVX512-
//               BF16 adds pair after pair, and AMX sums the piece from 0 before it adds it; each row has lanes of its own;
//   the rest    in fp32, elementwise: plus bias, activation, plus residual; one rounding to bf16 comes last, if any.
// The two round differently in the sum, so they may differ in bits; both take denormals as 0.
//
// Packed weights are read from start to end, once for up to ROW_BYTES of x: [panels of 32 outputs][depth / DEPTH]
// [2][DEPTH / 2][16][2]. The last three are a tile of AMX, and two of its rows of 16 pairs are what AVX512-BF16
// multiplies with one pair of x. Outputs and depth are padded with zeros.
//
// Call nothing from std between the pragmas: the linker might keep the copy of an inline function that was compiled
// here, with wide instructions, for all callers.

#include "linear.h"

#include <stdint.h>

#include "team.h"
#include "vectors.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

constexpr int COLUMNS = 32;            // outputs of a panel
constexpr int DEPTH = 32;              // elements of a row that one tile of AMX holds
constexpr int TILE = 16 * DEPTH;       // elements of a tile
constexpr int STEP = 2 * TILE;         // elements of a panel for DEPTH elements of x
constexpr int AHEAD = 4 * STEP;        // elements of the weights fetched ahead: some 400 ns at 10 GB/s
constexpr int64_t ROW_BYTES = 3 << 18; // of x that go with one pass over the weights: they stay in a CPU's own cache
constexpr int64_t CHUNK_NS = 20000;

enum Variant { NONE = 0, AVX512_BF16 = 1, AMX = 2 };

// A packed weight with what belongs to it; mirrored by __init__.py.
struct Linear {
    const bf16* weight;      // packed
    const float* bias;       // [outputs, padded to whole panels], or null
    int64_t num_in, num_out;
    int32_t activation, variant;
};

// One call of it.
struct Product {
    const Linear& linear;
    const bf16* x;         // [rows][depth]
    const bf16* residual;  // [rows][num_out], or null
    void* out;             // [rows][num_out], fp32 if wide, else bf16
    bool wide;
    int64_t rows, depth, panels;
    int64_t rows_a_chunk, panels_a_chunk, chunks_a_pass;
};

static int64_t depth_of(int64_t num_in) { return (num_in + DEPTH - 1) / DEPTH * DEPTH; }
static int64_t panels_of(int64_t num_out) { return (num_out + COLUMNS - 1) / COLUMNS; }
static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__x86_64__)

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#endif

#include "activation.h"

// Make outputs of the sums [rows][COLUMNS] of a panel, for the rows from `row` on.
template <int ACTIVATION>
static void finish(const Product& p, int64_t row, int rows, int64_t panel, const float* sums) {
    for (int half = 0; half < COLUMNS; half += 16) {
        const int64_t column = panel * COLUMNS + half, left = p.linear.num_out - column;
        if (left <= 0) break;
        const __mmask16 mask = left < 16 ? (1 << left) - 1 : 0xffff;
        const __m512 bias = p.linear.bias ? _mm512_loadu_ps(p.linear.bias + column) : _mm512_setzero_ps();
        for (int r = 0; r < rows; r++) {
            const int64_t at = (row + r) * p.linear.num_out + column;
            __m512 y = activate<ACTIVATION>(_mm512_add_ps(_mm512_loadu_ps(sums + r * COLUMNS + half), bias));
            if (p.residual) {
                const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.residual + at));
                y = _mm512_add_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
            }
            if (p.wide) _mm512_mask_storeu_ps((float*)p.out + at, mask, y);
            else _mm256_mask_storeu_epi16((bf16*)p.out + at, mask, (__m256i)_mm512_cvtneps_pbh(y));
        }
    }
}

typedef void (*Finish)(const Product&, int64_t row, int rows, int64_t panel, const float* sums);
static const Finish FINISH[NUM_ACTIVATIONS] = {finish<IDENTITY>, finish<GELU>, finish<GELU_TANH>, finish<GELU_SIGMOID>,
                                               finish<RELU>,     finish<RELU2>, finish<SILU>,     finish<TANH>};

// Fetch a step of the weights that lies AHEAD, up to `end`.
static inline void prefetch(const bf16* at, const bf16* end) {
    if (end - at <= AHEAD) return;
    UNROLL for (int i = 0; i < STEP; i += 32) _mm_prefetch((const char*)(at + AHEAD + i), _MM_HINT_T0);
}

// Sum R rows of x times a panel.
template <int R>
static void sum_vectors(const bf16* x, int64_t depth, const bf16* panel, const bf16* end, float* sums) {
    __m512 sum[R][2];
    UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += DEPTH, panel += STEP) {
        prefetch(panel, end);
        UNROLL for (int pair = 0; pair < DEPTH / 2; pair++) {
            const __m512bh left = (__m512bh)_mm512_loadu_si512(panel + pair * 32);
            const __m512bh right = (__m512bh)_mm512_loadu_si512(panel + TILE + pair * 32);
            UNROLL for (int r = 0; r < R; r++) {
                int32_t two;
                __builtin_memcpy(&two, x + r * depth + k + 2 * pair, sizeof two);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, left);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, right);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(sums + r * COLUMNS, sum[r][0]);
        _mm512_storeu_ps(sums + r * COLUMNS + 16, sum[r][1]);
    }
}

constexpr int VECTOR_ROWS = 8;  // 16 sums, and what they are made of, fill the registers
typedef void (*SumVectors)(const bf16* x, int64_t depth, const bf16* panel, const bf16* end, float* sums);
static const SumVectors SUM_VECTORS[VECTOR_ROWS] = {sum_vectors<1>, sum_vectors<2>, sum_vectors<3>, sum_vectors<4>,
                                                    sum_vectors<5>, sum_vectors<6>, sum_vectors<7>, sum_vectors<8>};

static void compute_vectors(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const bf16* end = p.linear.weight + last * p.depth * COLUMNS;
    float sums[VECTOR_ROWS * COLUMNS];
    for (; panel < last; panel++) {
        for (int64_t row = from; row < to; row += VECTOR_ROWS) {
            const int rows = min_of(VECTOR_ROWS, to - row);
            SUM_VECTORS[rows - 1](p.x + row * p.depth, p.depth, p.linear.weight + panel * p.depth * COLUMNS, end, sums);
            FINISH[p.linear.activation](p, row, rows, panel, sums);
        }
    }
}

// AMX in assembly, as compilers know neither what a tile holds nor what loading one reads. Tiles 0 to 3 hold sums, 4 and
// 5 up to 16 rows of x each, 6 and 7 the weights of 16 outputs each.
#define TILE_LOAD(tile, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, at, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_MULTIPLY(sum, x, weight) \
    __asm__ volatile("tdpbf16ps %%tmm" #weight ", %%tmm" #x ", %%tmm" #sum ::)

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Give the tiles of x and of the sums as many rows as there are, up to 32.
static void configure_tiles(int rows) {
    TileConfig config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        const bool is_second = tile == 2 || tile == 3 || tile == 5;
        config.row_bytes[tile] = 64;
        config.rows[tile] = tile > 5 ? 16 : is_second ? max_of(1, rows - 16) : min_of(16, rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// Sum up to 16 rows of x, if TWO up to 32, times a panel.
template <bool TWO>
static void sum_tiles(const bf16* x, int64_t depth, const bf16* panel, const bf16* end, float* sums) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (TWO) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t k = 0; k < depth; k += DEPTH, panel += STEP) {
        prefetch(panel, end);
        TILE_LOAD(6, panel, 64);
        TILE_LOAD(4, x + k, depth * sizeof(bf16));
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, panel + TILE, 64);
        TILE_MULTIPLY(1, 4, 7);
        if (TWO) {
            TILE_LOAD(5, x + 16 * depth + k, depth * sizeof(bf16));
            TILE_MULTIPLY(2, 5, 6);
            TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, sums, COLUMNS * sizeof(float));
    TILE_STORE(1, sums + 16, COLUMNS * sizeof(float));
    if (TWO) {
        TILE_STORE(2, sums + 16 * COLUMNS, COLUMNS * sizeof(float));
        TILE_STORE(3, sums + 16 * COLUMNS + 16, COLUMNS * sizeof(float));
    }
}

static void compute_tiles(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const bf16* end = p.linear.weight + last * p.depth * COLUMNS;
    float sums[32 * COLUMNS];
    int configured = 0;
    for (; panel < last; panel++) {
        for (int64_t row = from; row < to; row += 32) {
            const int rows = min_of(32, to - row);
            if (rows != configured) configure_tiles(configured = rows);
            (rows > 16 ? sum_tiles<true> : sum_tiles<false>)(
                p.x + row * p.depth, p.depth, p.linear.weight + panel * p.depth * COLUMNS, end, sums);
            FINISH[p.linear.activation](p, row, rows, panel, sums);
        }
    }
    __asm__ volatile("tilerelease" ::);
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// Return whether the CPU multiplies bf16 tiles and the system lets this process use them.
static bool has_amx() {
#ifdef __linux__
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, BF16 = 1 << 22, TILES = 1 << 24;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILES)) != (BF16 | TILES)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

static int best_variant() {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512bf16"))
        return NONE;
    return has_amx() ? AMX : AVX512_BF16;
}

static void compute(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    (p.linear.variant == AMX ? compute_tiles : compute_vectors)(p, from, to, panel, last);
}

#else

static int best_variant() { return NONE; }
static void compute(const Product&, int64_t, int64_t, int64_t, int64_t) {}

#endif

static void compute_chunk(void* job, int64_t i) {
    const Product& p = *(const Product*)job;
    const int64_t from = i / p.chunks_a_pass * p.rows_a_chunk, panel = i % p.chunks_a_pass * p.panels_a_chunk;
    compute(p, from, min_of(from + p.rows_a_chunk, p.rows), panel, min_of(panel + p.panels_a_chunk, p.panels));
}

// Cut a product into chunks that take some CHUNK_NS, or less so that each thread has several. All panels of the first
// rows come first, then those of the next rows.
static int64_t cut(Product& p) {
    p.rows_a_chunk = min_of(p.rows, max_of(32, ROW_BYTES / (p.depth * 2) / 32 * 32));
    const int64_t passes = (p.rows + p.rows_a_chunk - 1) / p.rows_a_chunk;
    const int64_t bytes = p.depth * COLUMNS * 2, multiplications = p.depth * COLUMNS * p.rows_a_chunk;
    const int64_t panel_ns = bytes / 10 + multiplications / (p.linear.variant == AMX ? 500 : 75);
    const int64_t few = max_of(1, p.panels * passes / (4 * num_threads()));
    p.panels_a_chunk = max_of(p.panels * passes / MAX_CHUNKS + 1, min_of(few, CHUNK_NS / (panel_ns + 1)));
    p.chunks_a_pass = (p.panels + p.panels_a_chunk - 1) / p.panels_a_chunk;
    return passes * p.chunks_a_pass;
}

struct Packing {
    const bf16* weight;
    bf16* packed;
    int64_t num_in, num_out;
};

static void pack_panel(void* job, int64_t panel) {
    const Packing& p = *(const Packing*)job;
    const int64_t depth = depth_of(p.num_in);
    bf16* to = p.packed + panel * depth * COLUMNS;
    __builtin_memset(to, 0, sizeof(bf16) * depth * COLUMNS);
    for (int64_t column = 0; column < min_of(COLUMNS, p.num_out - panel * COLUMNS); column++) {
        const bf16* row = p.weight + (panel * COLUMNS + column) * p.num_in;
        bf16* lane = to + column / 16 * TILE + column % 16 * 2;
        for (int64_t k = 0; k < p.num_in; k++) lane[k / DEPTH * STEP + k % DEPTH / 2 * 32 + k % 2] = row[k];
    }
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Raise it with every change of the exported functions, of Linear or of program.h, so that a stale library is refused.
EXPORT int native_abi() { return 3; }

EXPORT int native_best_variant() { return best_variant(); }

// Elements that a weight [num_out][num_in] takes packed.
EXPORT int64_t native_packed_size(int64_t num_in, int64_t num_out) {
    return depth_of(num_in) * panels_of(num_out) * COLUMNS;
}

EXPORT void native_pack(const bf16* weight, int64_t num_in, int64_t num_out, bf16* packed) {
    for (int64_t panel = 0; panel < panels_of(num_out); panel += MAX_CHUNKS) {
        Packing p = {weight + panel * COLUMNS * num_in, packed + panel * COLUMNS * depth_of(num_in), num_in,
                     num_out - panel * COLUMNS};
        run_chunks(pack_panel, &p, min_of(MAX_CHUNKS, panels_of(p.num_out)), num_threads());
    }
}

// x is [rows][num_in, padded with zeros to a multiple of 32], residual null or [rows][num_out] in bf16; out is
// [rows][num_out] in fp32 if `wide`, else in bf16. All are contiguous.
EXPORT void native_multiply(const Linear* linear, const bf16* x, const bf16* residual, void* out, int64_t rows,
                            int wide) {
    Product p = {*linear, x, residual, out, wide != 0, rows, depth_of(linear->num_in), panels_of(linear->num_out),
                 0, 0, 0};
    if (rows > 0) run_chunks(compute_chunk, &p, cut(p), num_threads());
}
