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
