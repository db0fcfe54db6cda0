// The sums of products in vectors of AVX2. linear.h says how weights lie.
//
// float_products.cpp and int8.cpp include this file after linear_vectors.h. A panel has four vectors of 8 outputs. Up to 3 rows
// are multiplied with all four; more, up to 6, with two and then with the other two. Either way 12 sums of 8 outputs,
// and what they are made of, fill the 16 registers. Besides what linear_vectors.h asks for, of which sum_words can be
// the sum<R>, their Numbers have:
//   PARTS                         a word of 4 bytes is multiplied in so many parts
//   part_of_x(i, words)           part i of 8 words of x
//   part_of_weights(i, words)     the same of weights
//   Sum                           8 sums, or parts: a type of vector
//   add_product(sum, x, weights)  sum plus the product of two parts

// Sum R rows of x times vectors [V, V + N) of a panel.
template <class Numbers, int R, int V, int N>
static void sum_outputs(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, float* sums) {
    typedef typename Numbers::Sum Sum;
    Sum sum[R][N];
    float parts[Numbers::PARTS][R][16];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sum[r][n] = (Sum)_mm256_setzero_ps();
    for (int64_t k = 0; k < row_bytes; k += LINE, panel += STEP) {
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int half = 0; half < 2; half++) {
            const __m256i words = _mm256_loadu_si256((const __m256i*)(x + r * row_bytes + k + half * LINE / 2));
            UNROLL for (int i = 0; i < Numbers::PARTS; i++)
                _mm256_storeu_ps(parts[i][r] + half * 8, (__m256)Numbers::part_of_x(i, words));
        }
        const uint8_t* ahead = soon(panel, end);
        for (int line = 0; line < 16; line++) {
            if (V == 0) prefetch_lines(ahead + line * LINE);
            UNROLL for (int i = 0; i < Numbers::PARTS; i++) {
                Sum weights[N];
                UNROLL for (int n = 0; n < N; n++) {
                    const uint8_t* at = panel + (V + n) / 2 * TILE + line * LINE + (V + n) % 2 * LINE / 2;
                    weights[n] = (Sum)Numbers::part_of_weights(i, _mm256_loadu_si256((const __m256i*)at));
                }
                UNROLL for (int r = 0; r < R; r++) {
                    const auto all = (Sum)_mm256_set1_ps(parts[i][r][line]);
                    UNROLL for (int n = 0; n < N; n++) {
                        sum[r][n] = Numbers::add_product(sum[r][n], all, weights[n]);
                        __asm__("" : "+x"(sum[r][n]));  // GCC would move sums about, and some to memory
                    }
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++)
            _mm256_storeu_ps(sums + r * COLUMNS + (V + n) * 8, (__m256)sum[r][n]);
}

template <class Numbers, int R>
static void sum_words(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    if constexpr (R <= 3) {
        sum_outputs<Numbers, R, 0, 4>(x, row_bytes, panel, end, (float*)sums);
    } else {
        sum_outputs<Numbers, R, 0, 2>(x, row_bytes, panel, end, (float*)sums);
        sum_outputs<Numbers, R, 2, 2>(x, row_bytes, panel, end, (float*)sums);
    }
}
