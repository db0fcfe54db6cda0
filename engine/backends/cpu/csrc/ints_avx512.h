// 16 int32 in a register of AVX-512, with AVX512-VNNI. ints_avx2.h has the same functions; it says what they do.
//
// int8.cpp includes this file after floats_avx512.h.

typedef int32_t Ints __attribute__((vector_size(64)));  // has + - << >>

static inline Ints all_of(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
static inline Ints load_ints(const void* p) { return (Ints)_mm512_loadu_si512(p); }
static inline Ints bits_of(Floats v) { return (Ints)_mm512_castps_si512(v); }
static inline Ints rounded(Floats v) { return (Ints)_mm512_cvtps_epi32(v); }
static inline Floats floats_of(Ints v) { return _mm512_cvtepi32_ps((__m512i)v); }
static inline Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static inline int32_t largest_of(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
static inline int32_t sum_of(Ints v) { return _mm512_reduce_add_epi32((__m512i)v); }

static inline __mmask16 is_beyond(Ints v, int32_t limit) {
    return _mm512_cmpgt_epi32_mask(_mm512_abs_epi32((__m512i)v), _mm512_set1_epi32(limit));
}
static inline bool any(__mmask16 mask) { return mask; }
static inline Ints only(__mmask16 mask, Ints v) { return (Ints)_mm512_maskz_mov_epi32(mask, (__m512i)v); }

static inline void store_bytes(void* p, Ints v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }
static inline void store_shorts(void* p, Ints v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v)); }
static inline void store_upper_halves(uint16_t* p, Ints v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16)));
}

static inline int64_t count_above(const uint16_t* keys, int64_t size, uint16_t last) {
    int64_t above = 0;
    for (int64_t k = 0; k < size; k += 32)
        above += __builtin_popcount(_mm512_cmpgt_epu16_mask(_mm512_loadu_si512(keys + k), _mm512_set1_epi16(last)));
    return above;
}

static inline Ints add_products(Ints sum, int32_t x, const uint8_t* weights) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(weights), _mm512_set1_epi32(x));
}

typedef Ints Words;
typedef Floats Vector;

static inline Words words_at(const void* p) { return load_ints(p); }

static inline Words add_signed_pairs(Words sum, Words x, Words weights) {
    return (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
}
