// 16 int32 in two registers of AVX2. Each function gives what its namesake of ints_avx512.h gives.
//
// groups.cpp and rounding.cpp include this file after floats_avx2.h.

typedef int32_t EightInts __attribute__((vector_size(32)));

struct Ints {
    EightInts low, high;
};

static inline Ints operator+(Ints a, Ints b) { return {a.low + b.low, a.high + b.high}; }
static inline Ints operator-(Ints a, Ints b) { return {a.low - b.low, a.high - b.high}; }
static inline Ints operator<<(Ints v, int bits) { return {v.low << bits, v.high << bits}; }
static inline Ints operator>>(Ints v, int bits) { return {v.low >> bits, v.high >> bits}; }

static inline EightInts load_eight(const void* p) { return (EightInts)_mm256_loadu_si256((const __m256i*)p); }
static inline EightInts larger(EightInts a, EightInts b) {
    return (EightInts)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

static inline Ints all_of(int32_t x) {
    const auto all = (EightInts)_mm256_set1_epi32(x);
    return {all, all};
}
static inline Ints load_ints(const void* p) { return {load_eight(p), load_eight((const uint8_t*)p + 32)}; }
static inline Ints bits_of(Floats v) { return {(EightInts)v.low, (EightInts)v.high}; }
static inline Ints rounded(Floats v) {  // ties to even
    return {(EightInts)_mm256_cvtps_epi32(v.low), (EightInts)_mm256_cvtps_epi32(v.high)};
}
static inline Floats floats_of(Ints v) {
    return {_mm256_cvtepi32_ps((__m256i)v.low), _mm256_cvtepi32_ps((__m256i)v.high)};
}
static inline Ints larger(Ints a, Ints b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }

static inline int32_t largest_of(Ints v) {
    const EightInts eight = larger(v.low, v.high);
    int32_t largest = eight[0];
    UNROLL for (int i = 1; i < 8; i++) largest = eight[i] > largest ? eight[i] : largest;
    return largest;
}

static inline int32_t sum_of(Ints v) {
    const EightInts eight = v.low + v.high;
    int32_t sum = 0;
    UNROLL for (int i = 0; i < 8; i++) sum += eight[i];
    return sum;
}

// Integers of 16 bits, as pairs.
static inline Ints paired(Ints low, Ints high) {
    return {(low.low & 0xffff) | (high.low << 16), (low.high & 0xffff) | (high.high << 16)};
}

// Add to sums, for each of a pair of weights, the square of what codes leave of it, at most 2^14, times its share, at
// most 2^12. The upper halves of the products of weights and factors are multiples of steps, which have 7 bits.
static inline EightInts add_errors(EightInts sum, EightInts pairs, EightInts factors, EightInts shares) {
    const __m256i left = _mm256_slli_epi16(_mm256_mulhi_epi16((__m256i)pairs, (__m256i)factors), 9);
    return sum + (EightInts)_mm256_madd_epi16(_mm256_mulhi_epi16(left, left), (__m256i)shares);
}
static inline Ints add_errors(Ints sum, Ints pairs, Ints factors, Ints shares) {
    return {add_errors(sum.low, pairs.low, factors.low, shares.low),
            add_errors(sum.high, pairs.high, factors.high, shares.high)};
}

// Store integers of -128 to 127 as bytes.
static inline void store_bytes(void* p, Ints v) {
    const __m256i mixed = _mm256_packs_epi32((__m256i)v.low, (__m256i)v.high);
    const __m256i words = _mm256_permute4x64_epi64(mixed, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}

// The bytes 0 and 2 of each word, or 1 and 3, as pairs of 16 bits: signed ones of x, unsigned ones of weights. VPMADDWD
// sums two products in 32 bits. VPMADDUBSW, which takes bytes, has 16 bits for the sum, which are too few.
static inline EightInts pairs_of_x(int i, EightInts words) {
    const auto last = i == 0 ? _mm256_slli_epi16((__m256i)words, 8) : (__m256i)words;
    return (EightInts)_mm256_srai_epi16(last, 8);
}
static inline EightInts pairs_of_weights(int i, EightInts words) {
    return i == 0 ? words & 0x00ff00ff : (EightInts)_mm256_srli_epi16((__m256i)words, 8);
}
static inline EightInts add_pairs(EightInts sum, EightInts x, EightInts weights) {
    return sum + (EightInts)_mm256_madd_epi16((__m256i)x, (__m256i)weights);
}
