// The sums of products in int10, for any instructions. linear.h says how weights lie.
//
// int8.cpp includes this file for each set of instructions, where these stand before:
//   Words, Vector                      a register of 32-bit integers, and of floats
//   add_signed_pairs(sum, x, weights)  sum plus the products of two pairs of 16 bits
// The products of SEGMENT elements are summed as integers, and so 32 bits suffice: each is at most 511 times 1023, and
// those of up to MAX_OUTLIERS_10 outliers at most 511 times 2^15.

typedef int16_t Shorts __attribute__((vector_size(sizeof(Words))));
typedef uint16_t UnsignedShorts __attribute__((vector_size(sizeof(Words))));

// Return pair i, 0 or 1, of the weights of a word. `high` has the upper 8 bits of each; the lower 2 lie in `low` from bit
// `shift` on.
static inline Words pairs_10(int i, Words high, Words low, int shift) {
    const Shorts upper = (i == 0 ? (Shorts)high << 8 : (Shorts)high) >> 6;
    return (Words)((upper & (int16_t)~3) | ((Shorts)((UnsignedShorts)low >> shift) & 3));
}

// Sum R rows of x times vectors [V, V + N) of a panel.
template <bool PREFETCHES, int R, int V, int N>
static void sum_outputs_10(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    Vector total[R][N];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) total[r][n] = Vector{};
    for (int64_t start = 0; start < row_bytes; start += 2 * SEGMENT) {
        Words sum[R][N];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sum[r][n] = Words{};
        const int64_t stop = min_of(start + 2 * SEGMENT, row_bytes);
        for (int64_t k = start; k < stop; k += 32, panel += STEP_10) {
            const uint8_t *at = panel + V * sizeof(Words), *ahead = soon(panel, end);
            Words low[N];
            UNROLL for (int n = 0; n < N; n++) low[n] = words_at(at + n * sizeof(Words));
            if (PREFETCHES) prefetch_words(ahead);
            UNROLL for (int word = 0; word < 4; word++) {
                at += WORDS;
                if (PREFETCHES) prefetch_words(ahead += WORDS);
                UNROLL for (int i = 0; i < 2; i++) {
                    Words weights[N];
                    UNROLL for (int n = 0; n < N; n++)
                        weights[n] = pairs_10(i, words_at(at + n * sizeof(Words)), low[n], 4 * word + 2 * i);
                    UNROLL for (int r = 0; r < R; r++) {
                        int32_t pair;
                        __builtin_memcpy(&pair, x + r * row_bytes + k + word * 8 + i * 4, sizeof pair);
                        const Words all = Words{} + pair;
                        UNROLL for (int n = 0; n < N; n++) {
                            sum[r][n] = add_signed_pairs(sum[r][n], all, weights[n]);
                            KEEP_IN_REGISTER(sum[r][n]);
                        }
                    }
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int n = 0; n < N; n++) total[r][n] += __builtin_convertvector(sum[r][n], Vector);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++)
            __builtin_memcpy(sums + 4 * (r * COLUMNS) + (V + n) * sizeof(Words), &total[r][n], sizeof(Words));
}

template <bool HAS_PREFETCHES, int R, int V = 0>
static void sum_words_10(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    constexpr int VECTORS_OF_PANEL = WORDS / sizeof(Words), N = min_of(VECTORS_OF_PANEL, R <= 2 ? 4 : 2);
    constexpr bool PREFETCHES = V == 0 && (HAS_PREFETCHES || N < VECTORS_OF_PANEL);
    sum_outputs_10<PREFETCHES, R, V, N>(x, row_bytes, panel, end, sums);
    if constexpr (V + N < VECTORS_OF_PANEL) sum_words_10<HAS_PREFETCHES, R, V + N>(x, row_bytes, panel, end, sums);
}

template <int ROWS, bool HAS_PREFETCHES>
struct Int10 {
    static constexpr int MAX_ROWS = ROWS;
    template <int R>
    static constexpr auto sum = sum_words_10<HAS_PREFETCHES, R>;
    static constexpr auto finish_sums = finish_int10;
};
