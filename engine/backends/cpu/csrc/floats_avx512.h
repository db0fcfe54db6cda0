// 16 floats in a register of AVX-512. floats_avx2.h has the same functions with the same bits; it says what they do.
//
// Sources include this file in namespace avx512, between BEGIN_INSTRUCTIONS(WITH_AVX512) and its end.

typedef __m512 Floats;  // has + - * /

static inline __mmask16 mask_of(int64_t count) { return (1 << count) - 1; }

static inline Floats broadcast(float x) { return _mm512_set1_ps(x); }

static inline Floats widened(__m256i narrow) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

static inline __m256i narrowed(Floats v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i all = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
}

static inline Floats load(const float* p, int64_t count) {
    return count < 16 ? _mm512_maskz_loadu_ps(mask_of(count), p) : _mm512_loadu_ps(p);
}

static inline Floats load(const bf16* p, int64_t count) {
    return widened(count < 16 ? _mm256_maskz_loadu_epi16(mask_of(count), p) : _mm256_loadu_si256((const __m256i*)p));
}

static inline void store(float* p, int64_t count, Floats v) {
    if (count < 16) _mm512_mask_storeu_ps(p, mask_of(count), v);
    else _mm512_storeu_ps(p, v);
}

static inline void store(bf16* p, int64_t count, Floats v) {
    if (count < 16) _mm256_mask_storeu_epi16(p, mask_of(count), narrowed(v));
    else _mm256_storeu_si256((__m256i*)p, narrowed(v));
}

static inline Floats first(Floats v, int64_t count) {
    return count < 16 ? _mm512_maskz_mov_ps(mask_of(count), v) : v;
}

static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats magnitude(Floats v) { return _mm512_abs_ps(v); }

static inline Floats where_above(Floats a, Floats b, Floats x, Floats y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
}

static inline Floats whole(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Floats times_power(Floats y, Floats n) { return _mm512_scalef_ps(y, n); }
static inline float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
