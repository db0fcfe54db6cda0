// The sums of products in vectors of AVX-512 and in tiles of AMX. linear.h says how weights lie.
//
// float_products.cpp includes this file where it has chosen the instructions. Besides what
// linear_vectors.h asks for, of which sum_words can be the sum<R>, their Numbers have:
//   dot(sum, x, weights)   sum, in 16 lanes, plus the products of 4 bytes of x and of the weights
//   MULTIPLY_TILES         the instruction that does so for tiles
//   PREFETCHES             whether vectors fetch weights ahead: AMD's CPUs are faster by themselves

#include "floats_avx512.h"
#include "activation.h"
#include "linear_vectors.h"

// Sum R rows of x times a panel, word after word of 4 bytes.
template <class Numbers, int R>
static void sum_words(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    __m512i sum[R][2];
    UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < row_bytes; k += LINE, panel += STEP) {
        const uint8_t* ahead = soon(panel, end);
        UNROLL for (int word = 0; word < 16; word++) {
            if (Numbers::PREFETCHES) prefetch_words(ahead + word * WORDS);
            const __m512i left = _mm512_loadu_si512(panel + word * WORDS);
            const __m512i right = _mm512_loadu_si512(panel + word * WORDS + LINE);
            UNROLL for (int r = 0; r < R; r++) {
                int32_t of_x;
                __builtin_memcpy(&of_x, x + r * row_bytes + k + 4 * word, sizeof of_x);
                const __m512i all = _mm512_set1_epi32(of_x);
                sum[r][0] = Numbers::dot(sum[r][0], all, left);
                sum[r][1] = Numbers::dot(sum[r][1], all, right);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        _mm512_storeu_si512(sums + r * 2 * LINE, sum[r][0]);
        _mm512_storeu_si512(sums + r * 2 * LINE + LINE, sum[r][1]);
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
    __asm__ volatile(MULTIPLY_TILES " %%tmm" #weight ", %%tmm" #x ", %%tmm" #sum ::)

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
        config.row_bytes[tile] = LINE;
        config.rows[tile] = tile > 5 ? 16 : is_second ? max_of(1, rows - 16) : min_of(16, rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// Sum up to 16 rows of x, if TWO up to 32, times a panel.
template <bool TWO>
static void sum_tiles(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (TWO) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t k = 0; k < row_bytes; k += LINE, panel += STEP) {
        const uint8_t* ahead = soon(panel, end);
        UNROLL for (int i = 0; i < STEP; i += LINE) _mm_prefetch((const char*)(ahead + i), _MM_HINT_T0);
        TILE_LOAD(6, panel, WORDS);
        TILE_LOAD(4, x + k, row_bytes);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, panel + LINE, WORDS);
        TILE_MULTIPLY(1, 4, 7);
        if (TWO) {
            TILE_LOAD(5, x + 16 * row_bytes + k, row_bytes);
            TILE_MULTIPLY(2, 5, 6);
            TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, sums, 2 * LINE);
    TILE_STORE(1, sums + LINE, 2 * LINE);
    if (TWO) {
        TILE_STORE(2, sums + 32 * LINE, 2 * LINE);
        TILE_STORE(3, sums + 33 * LINE, 2 * LINE);
    }
}

template <class Numbers>
static void compute_tiles(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const uint8_t* end = p.linear.weight + last * p.panel_bytes;
    float sums[32 * COLUMNS];
    int configured = 0;
    for (; panel < last; panel++) {
        for (int64_t row = from; row < to; row += 32) {
            const int rows = min_of(32, to - row);
            if (rows != configured) configure_tiles(configured = rows);
            (rows > 16 ? sum_tiles<true> : sum_tiles<false>)(
                p.x + row * p.row_bytes, p.row_bytes, p.linear.weight + panel * p.panel_bytes, end,
                (uint8_t*)sums);
            Numbers::finish_sums(p, row, rows, panel, sums);
            FINISH[p.linear.activation](p, row, rows, panel, sums);
        }
    }
    __asm__ volatile("tilerelease" ::);
}
