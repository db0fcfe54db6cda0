// The sums of products in bf16 with AVX2, in fp32: linear.cpp includes this file after linear_vectors.h.
//
// They have the bits of Bf16ByFma of AVX-512, as each takes element after element. A panel has four vectors of 8 outputs.
// Up to 3 rows are multiplied with all four; more, up to 6, with two and then with the other two. Either way 12 sums of
// 8 outputs, and what they are made of, fill the 16 registers.

struct Bf16ByFma {
    static constexpr int MAX_ROWS = 6;

    static __m256 first(__m256i pairs) { return (__m256)_mm256_slli_epi32(pairs, 16); }
    static __m256 second(__m256i pairs) { return (__m256)_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)); }

    // Sum R rows of x times vectors [V, V + N) of a panel.
    template <int R, int V, int N>
    static void sum_outputs(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, float* sums) {
        __m256 sum[R][N];
        float wide[2][R][16];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sum[r][n] = _mm256_setzero_ps();
        for (int64_t k = 0; k < row_bytes; k += LINE, panel += STEP) {
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int half = 0; half < 2; half++) {
                const __m256i pairs = _mm256_loadu_si256((const __m256i*)(x + r * row_bytes + k + half * LINE / 2));
                _mm256_storeu_ps(wide[0][r] + half * 8, first(pairs));
                _mm256_storeu_ps(wide[1][r] + half * 8, second(pairs));
            }
            const uint8_t* ahead = soon(panel, end);
            for (int line = 0; line < 16; line++) {
                if (V == 0) prefetch_lines(ahead + line * LINE);
                UNROLL for (int i = 0; i < 2; i++) {
                    __m256 weights[N];
                    UNROLL for (int n = 0; n < N; n++) {
                        const uint8_t* at = panel + (V + n) / 2 * TILE + line * LINE + (V + n) % 2 * LINE / 2;
                        const __m256i pairs = _mm256_loadu_si256((const __m256i*)at);
                        weights[n] = i == 0 ? first(pairs) : second(pairs);
                    }
                    UNROLL for (int r = 0; r < R; r++) {
                        const __m256 all = _mm256_set1_ps(wide[i][r][line]);
                        UNROLL for (int n = 0; n < N; n++) {
                            sum[r][n] = _mm256_fmadd_ps(all, weights[n], sum[r][n]);
                            __asm__("" : "+x"(sum[r][n]));  // GCC would move sums about, and some to memory
                        }
                    }
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int n = 0; n < N; n++) _mm256_storeu_ps(sums + r * COLUMNS + (V + n) * 8, sum[r][n]);
    }

    template <int R>
    static void sum(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
        if constexpr (R <= 3) {
            sum_outputs<R, 0, 4>(x, row_bytes, panel, end, (float*)sums);
        } else {
            sum_outputs<R, 0, 2>(x, row_bytes, panel, end, (float*)sums);
            sum_outputs<R, 2, 2>(x, row_bytes, panel, end, (float*)sums);
        }
    }

    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};
