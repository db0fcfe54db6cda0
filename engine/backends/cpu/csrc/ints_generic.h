// 16 int32 in four vectors of 4, which GCC and Clang compile for any CPU. ints_avx2.h has the same functions; it says what
// they do.
//
// groups.cpp and rounding.cpp include this file after floats_generic.h.

typedef int16_t EightShorts __attribute__((vector_size(16)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));

struct Ints {
    FourInts parts[4];
};

static inline Ints operator+(Ints a, Ints b) {
    EACH_PART a.parts[i] += b.parts[i];
    return a;
}
static inline Ints operator-(Ints a, Ints b) {
    EACH_PART a.parts[i] -= b.parts[i];
    return a;
}
static inline Ints operator<<(Ints v, int bits) {
    EACH_PART v.parts[i] <<= bits;
    return v;
}
static inline Ints operator>>(Ints v, int bits) {
    EACH_PART v.parts[i] >>= bits;
    return v;
}

static inline FourInts where(FourInts mask, FourInts x, FourInts y) { return (mask & x) | (~mask & y); }

static inline Ints all_of(int32_t x) {
    const FourInts all = {x, x, x, x};
    return {{all, all, all, all}};
}
static inline Ints load_ints(const void* p) {
    Ints v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
static inline Ints bits_of(Floats v) { return load_ints(&v); }
static inline Ints rounded(Floats v) { return bits_of(v + broadcast(NO_FRACTION)) - bits_of(broadcast(NO_FRACTION)); }
static inline Floats floats_of(Ints v) {
    Floats floats;
    EACH_PART floats.parts[i] = __builtin_convertvector(v.parts[i], Vector);
    return floats;
}
static inline Ints larger(Ints a, Ints b) {
    EACH_PART a.parts[i] = where(a.parts[i] > b.parts[i], a.parts[i], b.parts[i]);
    return a;
}

static inline int32_t largest_of(Ints v) {
    int32_t largest = v.parts[0][0];
    EACH_PART UNROLL for (int j = 0; j < 4; j++) largest = max_of(largest, v.parts[i][j]);
    return largest;
}

static inline int32_t sum_of(Ints v) {
    const FourInts four = v.parts[0] + v.parts[1] + v.parts[2] + v.parts[3];
    return four[0] + four[1] + four[2] + four[3];
}

static inline Ints paired(Ints low, Ints high) {
    EACH_PART low.parts[i] = (low.parts[i] & 0xffff) | high.parts[i] << 16;
    return low;
}
#if defined(__SSE2__)
// Which has no product of 32 bits.
static inline FourInts errors(FourInts pairs, FourInts factors, FourInts shares) {
    const __m128i left = _mm_slli_epi16(_mm_mulhi_epi16((__m128i)pairs, (__m128i)factors), 9);
    return (FourInts)_mm_madd_epi16(_mm_mulhi_epi16(left, left), (__m128i)shares);
}
#else
static inline FourInts error(FourInts weights, FourInts factors, FourInts shares) {
    const FourInts left = (weights * factors >> 16) << 25 >> 16;
    return (left * left >> 16) * shares;
}
static inline FourInts errors(FourInts pairs, FourInts factors, FourInts shares) {
    return error(pairs << 16 >> 16, factors >> 16, shares & 0xffff) + error(pairs >> 16, factors >> 16, shares >> 16);
}
#endif
static inline Ints add_errors(Ints sum, Ints pairs, Ints factors, Ints shares) {
    EACH_PART sum.parts[i] += errors(pairs.parts[i], factors.parts[i], shares.parts[i]);
    return sum;
}

static inline void store_bytes(void* p, Ints v) {
    EACH_PART UNROLL for (int j = 0; j < 4; j++) ((int8_t*)p)[4 * i + j] = v.parts[i][j];
}

// The bytes 0 and 2 of each word, or 1 and 3, as pairs of 16 bits: signed ones of x, unsigned ones of weights. Products,
// at most 127 * 255, fit 16 bits.
static inline FourInts pairs_of_x(int i, FourInts words) {
    return (FourInts)((i == 0 ? (EightShorts)words << 8 : (EightShorts)words) >> 8);
}
static inline FourInts pairs_of_weights(int i, FourInts words) {
    return (FourInts)(i == 0 ? (EightHalves)words & 0xff : (EightHalves)words >> 8);
}
static inline FourInts add_pairs(FourInts sum, FourInts x, FourInts weights) {
    const FourInts products = (FourInts)((EightShorts)x * (EightShorts)weights);
    return sum + (products << 16 >> 16) + (products >> 16);
}
