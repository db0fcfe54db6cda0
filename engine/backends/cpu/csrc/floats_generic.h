// 16 floats in four vectors of 4, which GCC and Clang compile for any CPU. floats_avx2.h has the same functions; it says
// what they do.
//
// Sources include this file in namespace generic. Products and sums are fused where the CPU is sure to have instructions
// for that, as on ARM. Elsewhere they round twice, so that the bits of what uses fma differ from those of AVX2.

typedef float Vector __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));  // a comparison sets all bits or none
typedef uint16_t FourHalves __attribute__((vector_size(8)));

struct Floats {
    Vector parts[4];
};
struct Halves {
    FourHalves parts[4];
};

#define EACH_PART UNROLL for (int i = 0; i < 4; i++)

static inline Floats operator+(Floats a, Floats b) {
    EACH_PART a.parts[i] += b.parts[i];
    return a;
}
static inline Floats operator-(Floats a, Floats b) {
    EACH_PART a.parts[i] -= b.parts[i];
    return a;
}
static inline Floats operator*(Floats a, Floats b) {
    EACH_PART a.parts[i] *= b.parts[i];
    return a;
}
static inline Floats operator/(Floats a, Floats b) {
    EACH_PART a.parts[i] /= b.parts[i];
    return a;
}

static inline Floats broadcast(float x) {
    const Vector all = {x, x, x, x};
    return {{all, all, all, all}};
}

static inline Vector where(FourInts mask, Vector x, Vector y) {
    return (Vector)((mask & (FourInts)x) | (~mask & (FourInts)y));
}

static inline Floats widened(Halves narrow) {
    Floats wide;
    EACH_PART wide.parts[i] = (Vector)(__builtin_convertvector(narrow.parts[i], FourInts) << 16);
    return wide;
}

static inline Halves narrowed(Floats v) {
    Halves narrow;
    EACH_PART {
        const FourInts bits = (FourInts)v.parts[i], is_number = v.parts[i] == v.parts[i];
        const FourInts rounded = bits + (is_number & (((bits >> 16) & 1) + 0x7fff));
        narrow.parts[i] = __builtin_convertvector((rounded | (~is_number & 0x400000)) >> 16, FourHalves);
    }
    return narrow;
}

static inline Floats first(Floats v, int64_t count) {
    EACH_PART v.parts[i] = where(FourInts{0, 1, 2, 3} + 4 * i < (int32_t)count, v.parts[i], Vector{});
    return v;
}

static inline Floats load(const float* p, int64_t count) {
    Floats v = {};
    __builtin_memcpy(&v, p, count < 16 ? count * sizeof(float) : sizeof v);
    return v;
}

static inline Floats load(const bf16* p, int64_t count) {
    Halves narrow = {};
    __builtin_memcpy(&narrow, p, count < 16 ? count * sizeof(bf16) : sizeof narrow);
    return widened(narrow);
}

static inline void store(float* p, int64_t count, Floats v) {
    __builtin_memcpy(p, &v, count < 16 ? count * sizeof(float) : sizeof v);
}

static inline void store(bf16* p, int64_t count, Floats v) {
    const Halves narrow = narrowed(v);
    __builtin_memcpy(p, &narrow, count < 16 ? count * sizeof(bf16) : sizeof narrow);
}

static inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;  // a software FMA would be far slower
#endif
}

static inline Floats fma(Floats a, Floats b, Floats c) {
    EACH_PART c.parts[i] = multiply_add(a.parts[i], b.parts[i], c.parts[i]);
    return c;
}
static inline Floats fnma(Floats a, Floats b, Floats c) {
    EACH_PART c.parts[i] = multiply_add(-a.parts[i], b.parts[i], c.parts[i]);
    return c;
}

static inline Floats where_above(Floats a, Floats b, Floats x, Floats y) {
    EACH_PART x.parts[i] = where(a.parts[i] > b.parts[i], x.parts[i], y.parts[i]);
    return x;
}
static inline Floats min(Floats a, Floats b) { return where_above(b, a, a, b); }
static inline Floats max(Floats a, Floats b) { return where_above(a, b, a, b); }

static inline Floats magnitude(Floats v) {
    EACH_PART v.parts[i] = (Vector)((FourInts)v.parts[i] & 0x7fffffff);
    return v;
}

// Below 2^22 the sum has no bits for fractions.
constexpr float NO_FRACTION = 3 << 22;

static inline Floats whole(Floats v) { return v + broadcast(NO_FRACTION) - broadcast(NO_FRACTION); }

static inline Floats times_power(Floats y, Floats n) {
    EACH_PART {
        const FourInts power = (FourInts)(n.parts[i] + NO_FRACTION) - (FourInts)(Vector{} + NO_FRACTION);
        const FourInts half = power >> 1;
        y.parts[i] = y.parts[i] * (Vector)((half + 127) << 23) * (Vector)((power - half + 127) << 23);
    }
    return y;
}

static inline float sum_of(Floats v) {
    const Vector four = (v.parts[0] + v.parts[2]) + (v.parts[1] + v.parts[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
