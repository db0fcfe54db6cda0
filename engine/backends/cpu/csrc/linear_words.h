// The sums of products in vectors of 8 lanes (AVX2) and of 4 (any CPU). linear.h says how weights lie.
//
// float_products.cpp and groups.cpp include this file after linear_vectors.h and a file of Floats, which has the type Vector
// and multiply_add. A panel has 4 or 8 vectors of outputs. Up to 3 rows are multiplied with four of them at once; more, up
// to 6, with two. Either way 12 sums, and what they are made of, fill 16 registers. Besides what linear_vectors.h asks
// for, of which sum_words can be the sum<R>, their Numbers have:
//   PARTS                         a word of 4 bytes is multiplied in so many parts
//   part_of_x(i, words)           part i of some words of x
//   part_of_weights(i, words)     the same of weights
//   Sum                           as many sums, or parts: a type of vector
//   IN_PIECES                     whether each PIECE of a row is summed from 0
//   add_product(sum, x, weights)  sum plus the product of two parts

constexpr int LANES = sizeof(Vector) / sizeof(float), VECTORS = COLUMNS / LANES;
typedef int32_t Words __attribute__((vector_size(sizeof(Vector))));

static inline Words words_at(const void* p) {
    Words words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
}

// Sum num_bytes of R rows of x times vectors [V, V + N) of a panel, and add this to sums unless it is the first piece.
template <class Numbers, int R, int V, int N>
static void sum_piece(const uint8_t* x, int64_t row_bytes, int64_t num_bytes, const uint8_t* panel, const uint8_t* end,
                      bool is_first, uint8_t* sums) {
    typedef typename Numbers::Sum Sum;
    Sum sum[R][N];
    int32_t parts[Numbers::PARTS][R][16];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sum[r][n] = Sum{};
    for (int64_t k = 0; k < num_bytes; k += LINE, panel += STEP) {
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int first = 0; first < 16; first += LANES) {
            const Words words = words_at(x + r * row_bytes + k + first * 4);
            UNROLL for (int i = 0; i < Numbers::PARTS; i++) {
                const auto part = Numbers::part_of_x(i, words);
                __builtin_memcpy(&parts[i][r][first], &part, sizeof part);
            }
        }
        const uint8_t* ahead = soon(panel, end);
        for (int word = 0; word < 16; word++) {
            // A loop that reads all outputs reads line after line, which CPUs fetch faster by themselves.
            if (V == 0 && N < VECTORS) prefetch_words(ahead + word * WORDS);
            UNROLL for (int i = 0; i < Numbers::PARTS; i++) {
                Sum weights[N];
                UNROLL for (int n = 0; n < N; n++) {
                    const uint8_t* at = panel + word * WORDS + (V + n) * LANES * 4;
                    weights[n] = (Sum)Numbers::part_of_weights(i, words_at(at));
                }
                UNROLL for (int r = 0; r < R; r++) {
                    const Sum all = (Sum)(Words{} + parts[i][r][word]);
                    UNROLL for (int n = 0; n < N; n++) {
                        sum[r][n] = Numbers::add_product(sum[r][n], all, weights[n]);
                        KEEP_IN_REGISTER(sum[r][n]);  // GCC would move sums about, and some to memory
                    }
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++) {
            uint8_t* total = sums + 4 * (r * COLUMNS + (V + n) * LANES);
            Sum before = Sum{};
            if (!is_first) __builtin_memcpy(&before, total, sizeof before);
            before += sum[r][n];
            __builtin_memcpy(total, &before, sizeof before);
        }
}

// Sum R rows of x times vectors [V, V + N) of a panel.
template <class Numbers, int R, int V, int N>
static void sum_outputs(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    if constexpr (Numbers::IN_PIECES)
        for (int64_t k = 0; k < row_bytes; k += PIECE)
            sum_piece<Numbers, R, V, N>(x + k, row_bytes, min_of(PIECE, row_bytes - k), panel + k / LINE * STEP, end,
                                        k == 0, sums);
    else sum_piece<Numbers, R, V, N>(x, row_bytes, row_bytes, panel, end, true, sums);
}

template <class Numbers, int R, int V = 0>
static void sum_words(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    constexpr int N = R <= 3 ? 4 : 2;
    sum_outputs<Numbers, R, V, N>(x, row_bytes, panel, end, sums);
    if constexpr (V + N < VECTORS) sum_words<Numbers, R, V + N>(x, row_bytes, panel, end, sums);
}

// In fp32. A word is one element of a row or of a weight in fp32, or two in bf16, taken one after the other, the first in
// its lower half.
template <int NUM_PARTS>
struct InFp32 {
    static constexpr int MAX_ROWS = 6, PARTS = NUM_PARTS;
    // Rounding a row to bf16 loses more than a long sum does, and GCC's code for pieces of it took twice as long.
    static constexpr bool IN_PIECES = PARTS == 1;
    typedef Vector Sum;
    static Words part_of_x(int i, Words words) { return PARTS == 1 ? words : i == 0 ? words << 16 : words & -(1 << 16); }
    static Words part_of_weights(int i, Words words) { return part_of_x(i, words); }
    static Vector add_product(Vector sum, Vector x, Vector weights) { return multiply_add(x, weights, sum); }
    template <int R>
    static constexpr auto sum = sum_words<InFp32, R>;
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};
