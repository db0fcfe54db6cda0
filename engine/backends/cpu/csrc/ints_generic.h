// 16 int32 in four vectors of 4, which GCC and Clang compile for any CPU. ints_avx2.h has the same functions; it says what
// they do.
//
// int8.cpp includes this file after floats_generic.h.

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

static inline Ints is_beyond(Ints v, int32_t limit) {
    EACH_PART v.parts[i] = (v.parts[i] > limit) | (v.parts[i] < -limit);
    return v;
}
static inline bool any(Ints mask) {
    const FourInts four = mask.parts[0] | mask.parts[1] | mask.parts[2] | mask.parts[3];
    return four[0] | four[1] | four[2] | four[3];
}
static inline Ints only(Ints mask, Ints v) {
    EACH_PART v.parts[i] &= mask.parts[i];
    return v;
}

static inline void store_bytes(void* p, Ints v) {
    EACH_PART UNROLL for (int j = 0; j < 4; j++) ((int8_t*)p)[4 * i + j] = v.parts[i][j];
}

static inline void store_shorts(void* p, Ints v) {
    EACH_PART UNROLL for (int j = 0; j < 4; j++) ((int16_t*)p)[4 * i + j] = v.parts[i][j];
}

static inline void store_upper_halves(uint16_t* p, Ints v) {
    EACH_PART UNROLL for (int j = 0; j < 4; j++) p[4 * i + j] = (uint32_t)v.parts[i][j] >> 16;
}

static inline int64_t count_above(const uint16_t* keys, int64_t size, uint16_t last) {
    int64_t above = 0;
    for (int64_t k = 0; k < size; k++) above += keys[k] > last;
    return above;
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

static inline Ints add_products(Ints sum, int32_t x, const uint8_t* weights) {
    const Ints words = load_ints(weights);
    UNROLL for (int half = 0; half < 2; half++) {
        const FourInts pairs = pairs_of_x(half, FourInts{x, x, x, x});
        EACH_PART sum.parts[i] = add_pairs(sum.parts[i], pairs, pairs_of_weights(half, words.parts[i]));
    }
    return sum;
}

// Return sum plus the products of two pairs of signed 16 bits, of 32 bits each.
static inline FourInts add_signed_pairs(FourInts sum, FourInts x, FourInts weights) {
    return sum + (x << 16 >> 16) * (weights << 16 >> 16) + (x >> 16) * (weights >> 16);
}
