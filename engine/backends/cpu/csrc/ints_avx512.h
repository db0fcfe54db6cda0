// 16 int32 in a register of AVX-512, with AVX512-VNNI. ints_avx2.h has the same functions; it says what they do.
//
// groups.cpp and rounding.cpp include this file after floats_avx512.h.

typedef int32_t Ints __attribute__((vector_size(64)));  // has + - << >>

static inline Ints all_of(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
static inline Ints load_ints(const void* p) { return (Ints)_mm512_loadu_si512(p); }
static inline Ints bits_of(Floats v) { return (Ints)_mm512_castps_si512(v); }
static inline Ints rounded(Floats v) { return (Ints)_mm512_cvtps_epi32(v); }
static inline Floats floats_of(Ints v) { return _mm512_cvtepi32_ps((__m512i)v); }
static inline Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static inline int32_t largest_of(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
static inline int32_t sum_of(Ints v) { return _mm512_reduce_add_epi32((__m512i)v); }

static inline Ints paired(Ints low, Ints high) { return (low & 0xffff) | (high << 16); }
static inline Ints add_errors(Ints sum, Ints pairs, Ints factors, Ints shares) {
    const __m512i left = _mm512_slli_epi16(_mm512_mulhi_epi16((__m512i)pairs, (__m512i)factors), 9);
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, _mm512_mulhi_epi16(left, left), (__m512i)shares);
}

static inline void store_bytes(void* p, Ints v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }
static inline void store_upper_halves(uint16_t* p, Ints v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16)));
}

typedef Ints Words;
typedef Floats Vector;

static inline Words words_at(const void* p) { return load_ints(p); }
