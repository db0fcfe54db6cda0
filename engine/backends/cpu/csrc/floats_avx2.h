// 16 floats in two registers of AVX2. Each function gives the bits that its namesake of floats_avx512.h gives.
//
// Sources include this file in namespace avx2, between BEGIN_INSTRUCTIONS(WITH_AVX2) and its end.

struct Floats {
    __m256 low, high;
};

static inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
static inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
static inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
static inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }

static inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

static inline __m256 widened(__m128i narrow) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

static inline __m256i rounded_bits(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, is_nan), 16);
}

static inline Floats widened(__m256i narrow) {
    return {widened(_mm256_castsi256_si128(narrow)), widened(_mm256_extracti128_si256(narrow, 1))};
}

// Round to the nearest bf16, ties to even; NaN stays NaN.
static inline __m256i narrowed(Floats v) {
    const __m256i mixed = _mm256_packus_epi32(rounded_bits(v.low), rounded_bits(v.high));
    return _mm256_permute4x64_epi64(mixed, 0xd8);
}

// Have all bits set in the first `count` of 16 entries.
static inline Floats mask_of(int64_t count) {
    const __m256i entries = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), all = _mm256_set1_epi32((int)count);
    const __m256i low = _mm256_cmpgt_epi32(all, entries);
    const __m256i high = _mm256_cmpgt_epi32(all, _mm256_add_epi32(entries, _mm256_set1_epi32(8)));
    return {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
}

// Return v with zeros for all but the first `count` entries.
static inline Floats first(Floats v, int64_t count) {
    if (count >= 16) return v;
    const Floats mask = mask_of(count);
    return {_mm256_and_ps(v.low, mask.low), _mm256_and_ps(v.high, mask.high)};
}

// Load 16 floats; if `count` is less, so many and zeros.
static inline Floats load(const float* p, int64_t count) {
    if (count >= 16) return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    float padded[16] = {};
    __builtin_memcpy(padded, p, count * sizeof(float));
    return {_mm256_loadu_ps(padded), _mm256_loadu_ps(padded + 8)};
}

static inline Floats load(const bf16* p, int64_t count) {
    if (count >= 16) return widened(_mm256_loadu_si256((const __m256i*)p));
    bf16 padded[16] = {};
    __builtin_memcpy(padded, p, count * sizeof(bf16));
    return widened(_mm256_loadu_si256((const __m256i*)padded));
}

// Store 16 floats; if `count` is less, the first ones.
static inline void store(float* p, int64_t count, Floats v) {
    float all[16];
    float* to = count < 16 ? all : p;
    _mm256_storeu_ps(to, v.low);
    _mm256_storeu_ps(to + 8, v.high);
    if (count < 16) __builtin_memcpy(p, all, count * sizeof(float));
}

static inline void store(bf16* p, int64_t count, Floats v) {
    bf16 all[16];
    _mm256_storeu_si256((__m256i*)(count < 16 ? all : p), narrowed(v));
    if (count < 16) __builtin_memcpy(p, all, count * sizeof(bf16));
}

typedef __m256 Vector;

static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

// Return a * b + c, and c - a * b, each rounded once.
static inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline Floats fnma(Floats a, Floats b, Floats c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

// If one is NaN, it is b.
static inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
static inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

static inline Floats magnitude(Floats v) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, v.low), _mm256_andnot_ps(sign, v.high)};
}

// Return x where a > b, else y.
static inline Floats where_above(Floats a, Floats b, Floats x, Floats y) {
    return {_mm256_blendv_ps(y.low, x.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
            _mm256_blendv_ps(y.high, x.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
}

// Round to the nearest whole number, ties to even.
static inline Floats whole(Floats v) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.low, NEAREST), _mm256_round_ps(v.high, NEAREST)};
}

// Return y * 2^n in two factors, of which the first is exact: n is whole, -250 to 250, and y about 1.
static inline __m256 times_power(__m256 y, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), one = _mm256_set1_epi32(127);
    const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, one), 23);
    const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), one), 23);
    return y * _mm256_castsi256_ps(first) * _mm256_castsi256_ps(second);
}

// The same for 16; NaN stays NaN.
static inline Floats times_power(Floats y, Floats n) { return {times_power(y.low, n.low), times_power(y.high, n.high)}; }

// Return the sum of the halves, of their halves, until one is left.
static inline float sum_of(Floats v) {
    const __m256 eight = v.low + v.high;
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
}
