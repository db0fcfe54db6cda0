// Attention of one tile of query rows over the paged cache, in vectors of LANES floats.
//
// attention.cpp includes this file once per instruction set, with ISA (a namespace), LANES, ROWS, FMA,
// LOAD_CODES and ADD_PRODUCTS_OF_INT16 defined, and with ADD_PRODUCTS_OF_BF16 if one of its instructions does that. It
// knows no threads and no dispatch. T is the type of queries and outputs, C that of the cache: T, or int8_t for codes (attention.h).
//
// The arithmetic of a row does not depend on its tile or the places of its blocks, so neither do its bits:
//   score of a position   lane j sums q[d] k[d] over every LANES-th d in ascending order (bf16: of the even d, then the
//                         odd, of each 2 * LANES; by AVX512-BF16 pairs, d = 2j and 2j + 1 of each 2 * LANES, where
//                         numbers below 2^-126 count as 0); the lanes are folded in halves; the scale, the soft cap and
//                         ALiBi come after. In int8 the query becomes 16-bit codes and the sum is one of integers, exact
//                         in any order; it is multiplied by the key's scale, then by the query's times the layer's;
//   sum of the weights    lane j sums the positions p = j mod LANES in ascending order; the lanes are folded in halves;
//                         the sink's weight is added last;
//   each output element   sums weight[p] * v[p] over the positions in ascending order; one division comes last. In int8
//                         v[p] is the code, and the weight is multiplied by the value's scale before.
// Every multiply-add is an explicit FMA; compile without contraction. Call nothing from std: the linker might keep the
// copy of an inline function that was compiled here, with wide instructions, for all callers.

namespace ISA {

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 4)));

constexpr int KEYS = LANES / ROWS;  // a score tile of ROWS x KEYS sums folds into exactly one vector
constexpr int CHUNK = 4;            // vectors of a value row held per query row: ROWS * CHUNK sums stay in registers

// Vectors that one load of cache elements fills. A load of bf16 gives the even elements, then the odd ones: a shift and
// a mask instead of shuffles. Rows of floats in the scratch keep that order and end in zeros up to whole loads.
template <class C>
constexpr int VECS = sizeof(C) == sizeof(bf16) ? 2 : 1;

template <class C>
constexpr bool CODED = sizeof(C) == sizeof(int8_t);

// Rows in the scratch have a multiple of so many elements: those of the largest load.
template <class C>
constexpr int SPAN = (CODED<C> ? 2 : VECS<C>) * LANES;

#ifdef ADD_PRODUCTS_OF_BF16
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// What the scratch holds of queries for keys of K: bf16 where an instruction multiplies that, codes, else floats.
template <class K>
using Query = std::conditional_t<std::is_same_v<K, int8_t> || std::is_same_v<K, int16_t>, int16_t,
                                 std::conditional_t<MULTIPLIES_BF16 && std::is_same_v<K, bf16>, bf16, float>>;

// What keys become that many rows read, unless they are multiplied as they are.
template <class C>
using WideKey = std::conditional_t<CODED<C>, int16_t, float>;

static inline Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

static inline void load(const float* p, Vec* v) { v[0] = load(p); }

static inline void load(const bf16* p, Vec* v) {
    IntVec pairs;
    __builtin_memcpy(&pairs, p, sizeof pairs);
    v[0] = (Vec)(pairs << 16);
    v[1] = (Vec)(pairs & (int32_t)0xffff0000);
}

// Load codes as floats, or as shorts.
static inline void load(const int8_t* p, Vec* v) {
    v[0] = __builtin_convertvector(LOAD_CODES(p), Vec);
}

static inline ShortVec load_shorts(const int8_t* p) {
    typedef int8_t Codes __attribute__((vector_size(2 * LANES)));
    Codes codes;
    __builtin_memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(codes, ShortVec);
}

static inline ShortVec load_shorts(const int16_t* p) {
    ShortVec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

static inline Vec broadcast(float x) { return x - Vec{}; }

// Add neighbouring segments of H lanes: of each 2H lanes of the result the first H come from a, the others from b.
template <int H, class V, int... I>
static inline V fold_segments(V a, V b, lane_list<I...>) {
#define FIRST(i) ((i) / (2 * H) * (2 * H) + (i) % H + ((i) / H % 2) * LANES)
#ifdef __clang__
    return __builtin_shufflevector(a, b, FIRST(I)...) + __builtin_shufflevector(a, b, (FIRST(I) + H)...);
#else
    return __builtin_shuffle(a, b, IntVec{FIRST(I)...}) + __builtin_shuffle(a, b, IntVec{(FIRST(I) + H)...});
#endif
#undef FIRST
}

// Return the lane sums of `LANES` vectors as one vector; overwrites them.
template <int H = LANES / 2, class V>
static inline V fold(V* v) {
    UNROLL for (int i = 0; i < H; i++) v[i] = fold_segments<H>(v[i], v[i + H], make_lanes<LANES>{});
    if constexpr (H > 1) return fold<H / 2>(v);
    else return v[0];
}

static inline float fold_one(Vec v) {
    Vec all[LANES];
    for (int i = 0; i < LANES; i++) all[i] = v;
    return fold(all)[0];
}

// Return 2^x for x <= 0 within 1 ulp; exactly 0 below -126, NaN for NaN. x = n + r with r in [-1/2, 1/2]; the
// coefficients are ln(2)^k / k!, the Taylor series of 2^r, whose first term left out is below 6e-9.
static inline Vec exp2(Vec x) {
    const Vec shift = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    Vec clamped = x < -126.f ? broadcast(-126.f) : x;
    Vec shifted = clamped + shift;
    Vec r = clamped - (shifted - shift);
    Vec y = broadcast(1.5252733804059840e-5f);
    y = FMA(y, r, broadcast(1.5403530393381609e-4f));
    y = FMA(y, r, broadcast(1.3333558146428443e-3f));
    y = FMA(y, r, broadcast(9.6181291076284772e-3f));
    y = FMA(y, r, broadcast(5.5504108664821580e-2f));
    y = FMA(y, r, broadcast(2.4022650695910071e-1f));
    y = FMA(y, r, broadcast(6.9314718055994531e-1f));
    y = FMA(y, r, broadcast(1.f));
    IntVec exponent = ((IntVec)shifted - (IntVec)shift) << 23;
    Vec result = (Vec)((IntVec)y + exponent);
    return x < -126.f ? Vec{} : result;
}

// Return the scores of R query rows and LANES / R keys as one vector, [R][LANES / R], not scaled. Rows have
// `width` elements.
template <int R, class T>
static inline Vec dot(const float* q, int64_t q_stride, const T* const* keys, int64_t width) {
    constexpr int K = LANES / R, N = VECS<T>;
    Vec sum[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sum[i] = Vec{};
    for (int64_t d = 0; d < width; d += N * LANES) {
        UNROLL for (int k = 0; k < K; k++) {
            Vec key[N];
            load(keys[k] + d, key);
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int r = 0; r < R; r++)
                    sum[r * K + k] = FMA(load(q + r * q_stride + d + n * LANES), key[n], sum[r * K + k]);
        }
    }
    return fold(sum);
}

#ifdef ADD_PRODUCTS_OF_BF16
template <int R>
static inline Vec dot(const bf16* q, int64_t q_stride, const bf16* const* keys, int64_t width) {
    constexpr int K = LANES / R;
    Vec sum[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sum[i] = Vec{};
    for (int64_t d = 0; d < width; d += 2 * LANES) {
        UNROLL for (int k = 0; k < K; k++)
            UNROLL for (int r = 0; r < R; r++)
                sum[r * K + k] = ADD_PRODUCTS_OF_BF16(sum[r * K + k], q + r * q_stride + d, keys[k] + d);
    }
    return fold(sum);
}
#endif

// Sums of integers: keys are codes, or the same as shorts.
template <int R, class K>
static inline Vec dot(const int16_t* q, int64_t q_stride, const K* const* keys, int64_t width) {
    constexpr int N = LANES / R;
    IntVec sum[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sum[i] = IntVec{};
    for (int64_t d = 0; d < width; d += 2 * LANES) {
        UNROLL for (int k = 0; k < N; k++) {
            const ShortVec key = load_shorts(keys[k] + d);
            UNROLL for (int r = 0; r < R; r++) {
                const ShortVec query = load_shorts(q + r * q_stride + d);
                sum[r * N + k] = ADD_PRODUCTS_OF_INT16(sum[r * N + k], query, key);
            }
        }
    }
    return __builtin_convertvector(fold(sum), Vec);
}

// Add weights [R][n] times values [n] to R rows of sums, for the C vectors from d on.
template <int R, int C, class T>
static inline void add_chunk(float* sums, int64_t sum_stride, const float* weights, int64_t weight_stride,
                             const T* const* values, int n, int64_t d) {
    Vec sum[R][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) sum[r][c] = load(sums + r * sum_stride + d + c * LANES);
    for (int p = 0; p < n; p++) {
        Vec value[C];
        UNROLL for (int c = 0; c < C; c += VECS<T>) load(values[p] + d + c * LANES, value + c);
        UNROLL for (int r = 0; r < R; r++) {
            Vec weight = broadcast(weights[r * weight_stride + p]);
            UNROLL for (int c = 0; c < C; c++) sum[r][c] = FMA(weight, value[c], sum[r][c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(sums + r * sum_stride + d + c * LANES, sum[r][c]);
}

template <int R, class T>
static inline void add_values(float* sums, int64_t sum_stride, const float* weights, int64_t weight_stride,
                              const T* const* values, int n, int64_t width) {
    if (n <= 0) return;
    int64_t d = 0;
    for (; d + CHUNK * LANES <= width; d += CHUNK * LANES)
        add_chunk<R, CHUNK>(sums, sum_stride, weights, weight_stride, values, n, d);
    for (; d < width; d += VECS<T> * LANES)
        add_chunk<R, VECS<T>>(sums, sum_stride, weights, weight_stride, values, n, d);
}

// The same for `rows` rows, at most R.
template <int R, class C>
static inline void add_values_of(int rows, float* sums, int64_t sum_stride, const float* weights, int64_t weight_stride,
                                 const C* const* values, int n, int64_t width) {
    if (rows == R) return add_values<R>(sums, sum_stride, weights, weight_stride, values, n, width);
    if constexpr (R > 1) add_values_of<R - 1>(rows, sums, sum_stride, weights, weight_stride, values, n, width);
}

// Query rows of one sequence and one KV head. Positions within it count from `base`, a multiple of GROUP.
struct Tile {
    int rows;
    int64_t head_size;
    int64_t width;         // elements of a row in the scratch
    int64_t score_stride;
    void* q;               // [rows][width] of Query
    float* sums;           // [rows][width]
    float* widened;        // [GROUP][width], of floats or of WideKey
    float* padded;         // [GROUP][width] elements of the cache's type
    float* scores;         // [rows][score_stride], then weights
    float factor;          // scores are multiplied by scale * log2(e), or by scale_rows later
    int64_t from, to;      // absolute positions: those that any row sees
    int64_t base, end;     // the whole groups that hold them
    int32_t first[MAX_TILE_ROWS], last[MAX_TILE_ROWS];  // row r sees [first, last); both ascend with r
    float factors[MAX_TILE_ROWS];                       // of the scores of row r, with codes
};

static inline int min_of(int a, int b) { return a < b ? a : b; }
static inline int max_of(int a, int b) { return a > b ? a : b; }

static inline int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// The rows of one sequence and one KV head in the cache, of keys or of values: located and fetched ahead of their use.
template <class C>
struct CacheRows {
    const C* plane;
    const int32_t* table;
    int64_t block_stride, block_size, row_size;
    int64_t from, to;  // the positions that may be read
    const C* ring[RING][GROUP];

    const C* const* group(int64_t at) const { return ring[at / GROUP % RING]; }

    // Locate and prefetch positions [at, at + GROUP); one outside [from, to) repeats one inside.
    inline void fetch(int64_t at) {
        if (at >= to) return;
        const C** row = ring[at / GROUP % RING];
        const int64_t low = at < from ? from : at, high = at + GROUP < to ? at + GROUP : to;
        int64_t block = low / block_size, offset = low % block_size;
        for (int64_t p = low; p < high; block++, offset = 0) {
            const C* here = plane + table[block] * block_stride + offset * row_size;
            const int64_t run = p + block_size - offset < high ? block_size - offset : high - p;
            for (int64_t i = 0; i < run; i++) row[p - at + i] = here + i * row_size;
            for (int64_t i = 0; i < run * row_size; i += 64 / sizeof(C)) __builtin_prefetch(here + i, 0, 2);
            p += run;
        }
        for (int64_t p = at; p < low; p++) row[p - at] = row[low - at];
        for (int64_t p = high; p < at + GROUP; p++) row[p - at] = row[high - at - 1];
    }
};

static inline void widen(const float* row, float* to, int64_t width) {
    __builtin_memcpy(to, row, sizeof(float) * width);
}

static inline void widen(const bf16* row, float* to, int64_t width) {
    for (int64_t d = 0; d < width; d += 2 * LANES) {
        Vec v[2];
        load(row + d, v);
        store(to + d, v[0]);
        store(to + d + LANES, v[1]);
    }
}

static inline void widen(const int8_t* row, float* to, int64_t width) {
    for (int64_t d = 0; d < width; d += LANES) {
        Vec v;
        load(row + d, &v);
        store(to + d, v);
    }
}

static inline void widen(const int8_t* row, int16_t* to, int64_t width) {
    for (int64_t d = 0; d < width; d += 2 * LANES) {
        const ShortVec v = load_shorts(row + d);
        __builtin_memcpy(to + d, &v, sizeof v);
    }
}

// A query stays in bf16 where an instruction multiplies that.
static inline void widen(const bf16* row, bf16* to, int64_t width) { __builtin_memcpy(to, row, sizeof(bf16) * width); }

template <class K>
static void score_group(const Tile& tile, const K* const* keys, int at) {
    for (int r = 0; r < tile.rows;) {
        const int rows = tile.rows - r >= ROWS ? ROWS : 1;
        const Query<K>* q = (const Query<K>*)tile.q + r * tile.width;
        float* scores = tile.scores + r * tile.score_stride + at;
        const int end = tile.first[r] < at + GROUP ? min_of(GROUP, tile.last[r + rows - 1] - at) : 0;
        if (rows == 1) {
            for (int k = 0; k < end; k += LANES)
                store(scores + k, dot<1>(q, tile.width, keys + k, tile.width) * tile.factor);
        } else {
            for (int k = 0; k < end; k += KEYS) {
                float block[LANES];
                store(block, dot<ROWS>(q, tile.width, keys + k, tile.width) * tile.factor);
                for (int i = 0; i < ROWS; i++)
                    __builtin_memcpy(scores + i * tile.score_stride + k, block + i * KEYS, sizeof(float) * KEYS);
            }
        }
        r += rows;
    }
}

// Multiply the scores or weights of a group by the scales of its stored rows, then by the factor of each query row.
static void scale_rows(const Tile& tile, const int8_t* const* stored, int at) {
    float scales[GROUP];
    for (int i = 0; i < GROUP; i++) __builtin_memcpy(scales + i, stored[i] + tile.head_size, sizeof(float));
    for (int r = 0; r < tile.rows; r++) {
        if (tile.first[r] >= at + GROUP || tile.last[r] <= at) continue;
        float* scores = tile.scores + r * tile.score_stride + at;
        for (int i = 0; i < GROUP; i += LANES)
            store(scores + i, load(scores + i) * load(scales + i) * tile.factors[r]);
    }
}

template <class T>
static void value_group(const Tile& tile, const T* const* values, int at) {
    for (int r = 0; r < tile.rows;) {
        const int rows = min_of(tile.rows - r, ROWS);
        // Add the positions that all these rows see for all rows at once, and those before and after it row by row.
        const int all_from = max_of(tile.first[r + rows - 1], at), all_to = min_of(tile.last[r], at + GROUP);
        const bool shared = rows > 1 && all_from < all_to;
        for (int i = r; i < r + rows; i++) {
            const int from = max_of(tile.first[i], at), to = min_of(tile.last[i], at + GROUP);
            add_values<1>(tile.sums + i * tile.width, tile.width, tile.scores + i * tile.score_stride + from,
                          tile.score_stride, values + (from - at), (shared ? all_from : to) - from, tile.width);
        }
        if (shared) {
            add_values_of<ROWS>(rows, tile.sums + r * tile.width, tile.width,
                                tile.scores + r * tile.score_stride + all_from, tile.score_stride,
                                values + (all_from - at), all_to - all_from, tile.width);
            for (int i = r; i < r + rows; i++) {
                const int to = min_of(tile.last[i], at + GROUP);
                add_values<1>(tile.sums + i * tile.width, tile.width, tile.scores + i * tile.score_stride + all_to,
                              tile.score_stride, values + (all_to - at), to - all_to, tile.width);
            }
        }
        r += rows;
    }
}

// Cap the scores [first, last): log2(e) s becomes log2(e) c tanh(s / c). With e = exp(-2 |s| / c) <= 1, tanh of |s / c|
// is (1 - e) / (1 + e), which cannot overflow; it is off by less than 2^-22, so s by 2^-22 c.
static void cap(float* scores, int first, int last, float softcap) {
    for (int i = first / LANES * LANES; i < last; i += LANES) {
        const Vec score = load(scores + i);
        const IntVec sign = (IntVec)score & INT32_MIN;
        const Vec e = exp2((Vec)((IntVec)score | INT32_MIN) * (2.f / softcap));
        store(scores + i, (Vec)((IntVec)((1.f - e) / (1.f + e) * (softcap * LOG2E)) | sign));
    }
}

// Add slope * (position - own position) to the scores [first, last); the row's own position is its last.
static void add_distances(float* scores, int first, int last, float slope) {
    const int from = first / LANES * LANES;
    Vec distance;
    for (int i = 0; i < LANES; i++) distance[i] = from + i - (last - 1);
    for (int i = from; i < last; i += LANES, distance += (float)LANES)
        store(scores + i, FMA(broadcast(slope), distance, load(scores + i)));
}

// Turn the scores [first, last) into weights 2^(score - max) in place and return their sum. The sink, -inf for none,
// takes part in both max and sum.
static float weigh(float* scores, int first, int last, float sink) {
    const int from = first / LANES * LANES, to = (last + LANES - 1) / LANES * LANES;
    for (int i = from; i < first; i++) scores[i] = -__builtin_inff();
    for (int i = last; i < to; i++) scores[i] = -__builtin_inff();
    Vec highest = broadcast(sink);
    for (int i = from; i < to; i += LANES) {
        Vec v = load(scores + i);
        highest = v > highest ? v : highest;
    }
    float max = highest[0];
    for (int i = 1; i < LANES; i++) max = highest[i] > max ? highest[i] : max;
    Vec sum = {};
    for (int i = from; i < to; i += LANES) {
        Vec weight = exp2(load(scores + i) - max);
        store(scores + i, weight);
        sum += weight;
    }
    const float total = fold_one(sum);
    return sink > -__builtin_inff() ? total + exp2(broadcast(sink - max))[0] : total;
}

// Turn the scores of row r, of query head `head`, into weights and return their sum. Not inlined: within attend_tile it
// would take registers from the loops over the positions.
__attribute__((noinline)) static float weigh_row(const Attend& a, const Tile& tile, int r, int64_t head) {
    const int first = tile.first[r], last = tile.last[r];
    float* scores = tile.scores + r * tile.score_stride;
    if (a.softcap > 0) cap(scores, first, last, a.softcap);
    if (a.slopes) add_distances(scores, first, last, a.slopes[head] * LOG2E);
    return weigh(scores, first, last, a.sinks ? a.sinks[head] * LOG2E : -__builtin_inff());
}

// Fetch the group at an absolute position. Behind the tile's last group, fetch the first ones of `next`, if there is one.
template <class C>
static inline void fetch_ahead(const Tile& tile, CacheRows<C>& cache, CacheRows<C>* next, int64_t at) {
    if (at < tile.end) cache.fetch(at);
    else if (next) next->fetch(tile.base + at - tile.end);
}

// Call visit(rows, stored rows, position) for each GROUP of the positions the tile sees; position counts from the tile's
// base. The first groups have been fetched, up to PREFETCH positions; this fetches those of `next`, unless it is null.
// With widen_once the rows are of Wide.
template <class Wide, class C, class Visit>
static inline void each_group(const Tile& tile, CacheRows<C>& cache, CacheRows<C>* next, bool widen_once, Visit visit) {
    const bool pad = tile.width != tile.head_size;
    for (int64_t at = tile.base; at < tile.end; at += GROUP) {
        fetch_ahead(tile, cache, next, at + PREFETCH);
        const C *const *const stored = cache.group(at), *const *row = stored;
        const C* padded[GROUP];
        if (pad) {
            for (int i = 0; i < GROUP; i++) {
                C* to = (C*)tile.padded + i * tile.width;
                __builtin_memcpy(to, row[i], sizeof(C) * tile.head_size);
                padded[i] = to;
            }
            row = padded;
        }
        if (widen_once) {
            const Wide* widened[GROUP];
            for (int i = 0; i < GROUP; i++) {
                Wide* to = (Wide*)tile.widened + i * tile.width;
                widen(row[i], to, tile.width);
                widened[i] = to;
            }
            visit(widened, stored, at - tile.base);
        } else {
            visit(row, stored, at - tile.base);
        }
    }
}

// Write row r of the queries into the scratch, with zeros behind head_size.
template <class C, class T>
static void take_query(Tile& tile, int r, const T* query, float scale_log2e) {
    Query<C>* q = (Query<C>*)tile.q + r * tile.width;
    if constexpr (CODED<C>) {
        tile.factors[r] = encode(query, tile.head_size, largest_of_query(tile.head_size), q) * scale_log2e;
        __builtin_memset(q + tile.head_size, 0, sizeof *q * (tile.width - tile.head_size));
    } else {
        if (tile.width != tile.head_size) {
            __builtin_memcpy(tile.padded, query, sizeof(T) * tile.head_size);
            query = (const T*)tile.padded;
        }
        widen(query, q, tile.width);
    }
}

static inline void narrow(const Vec* v, float* to) { store(to, v[0]); }

// Round to nearest, ties to even.
static inline void narrow(const Vec* v, bf16* to) {
    IntVec rounded[2];
    for (int i = 0; i < 2; i++) {
        const IntVec bits = (IntVec)v[i];
        rounded[i] = v[i] == v[i] ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
    }
    const IntVec pairs = (rounded[0] >> 16 & 0xffff) | (rounded[1] & (int32_t)0xffff0000);
    __builtin_memcpy(to, &pairs, sizeof pairs);
}

// Write sums / total.
template <class C, class T>
static void give_output(const Tile& tile, const float* sums, float total, T* out) {
    if constexpr (CODED<C>) {  // they have the order of the head
        for (int64_t d = 0; d < tile.head_size; d++) out[d] = stored<T>(sums[d] / total);
        return;
    }
    for (int64_t d = 0; d < tile.width; d += VECS<T> * LANES) {
        Vec v[VECS<T>];
        for (int n = 0; n < VECS<T>; n++) v[n] = load(sums + d + n * LANES) / total;
        narrow(v, (T*)tile.padded + d);
    }
    __builtin_memcpy(out, tile.padded, sizeof(T) * tile.head_size);
}

// Attend for query rows [row, row + rows) of sequence s and KV head g; row i is token i / heads, head i % heads of g's.
template <class T, class C>
static void attend_tile(const Attend& a, float* scratch, int64_t s, int64_t g, int64_t row, int rows) {
    const AttentionCache& cache = a.cache;
    const int64_t head_size = cache.head_size, heads = a.num_heads / cache.num_kv_heads;
    const int64_t start = a.batch.query_starts[s], past = a.batch.kv_lens[s] - (a.batch.query_starts[s + 1] - start);
    const int64_t position = past + row / heads;  // of the first row
    Tile tile;
    tile.rows = rows;
    tile.head_size = head_size;
    tile.width = (head_size + SPAN<C> - 1) / SPAN<C> * SPAN<C>;
    tile.score_stride = a.score_stride;
    tile.padded = scratch;
    tile.q = scratch + GROUP * tile.width;
    tile.sums = scratch + (GROUP + rows) * tile.width;
    tile.widened = tile.sums + rows * tile.width;
    tile.scores = tile.widened + GROUP * tile.width;
    tile.factor = CODED<C> ? 1.f : a.scale_log2e;
    tile.from = first_seen(position, a.window);
    tile.to = past + (row + rows - 1) / heads + 1;
    tile.base = tile.from / GROUP * GROUP;
    tile.end = (tile.to + GROUP - 1) / GROUP * GROUP;

    const int64_t row_size = row_bytes_of(cache) / sizeof(C), head_stride = cache.block_size * row_size;
    const int64_t block_stride = cache.num_kv_heads * head_stride;
    const C* plane = (const C*)cache.data + g * head_stride;
    const int32_t* table = a.batch.block_tables + s * a.batch.table_stride;
    CacheRows<C> keys = {plane, table, block_stride, cache.block_size, row_size, tile.from, tile.to, {}};
    CacheRows<C> values = keys;
    values.plane += cache.num_blocks * block_stride;

    for (int64_t at = tile.base; at < tile.base + PREFETCH; at += GROUP) fetch_ahead(tile, keys, &values, at);
    if (tile.width != head_size) __builtin_memset(tile.padded, 0, sizeof(C) * GROUP * tile.width);
    __builtin_memset(tile.sums, 0, sizeof(float) * rows * tile.width);
    for (int r = 0; r < rows; r++) {
        const int64_t token = (row + r) / heads, head = g * heads + (row + r) % heads;
        tile.first[r] = first_seen(past + token, a.window) - tile.base;
        tile.last[r] = past + token + 1 - tile.base;
        const T* query = (const T*)a.query + (start + token) * a.query_stride + head * head_size;
        take_query<C>(tile, r, query, a.scale_log2e);
    }
    // Keys and values that more than one loop reads are widened once.
    const bool widen_keys = CODED<C> ? rows > 1 : VECS<C> > 1 && rows > ROWS && !std::is_same_v<Query<C>, bf16>;
    const bool widen_values = (CODED<C> || VECS<C> > 1) && rows > ROWS;
    const auto score = [&](auto row, const C* const* stored, int at) {
        score_group(tile, row, at);
        if constexpr (CODED<C>) scale_rows(tile, stored, at);
    };
    each_group<WideKey<C>>(tile, keys, &values, widen_keys, score);
    float total[MAX_TILE_ROWS];
    for (int r = 0; r < rows; r++) {
        total[r] = weigh_row(a, tile, r, g * heads + (row + r) % heads);
        tile.factors[r] = 1;
    }
    const auto add = [&](auto row, const C* const* stored, int at) {
        if constexpr (CODED<C>) scale_rows(tile, stored, at);
        value_group(tile, row, at);
    };
    each_group<float>(tile, values, (CacheRows<C>*)nullptr, widen_values, add);
    for (int r = 0; r < rows; r++) {
        const int64_t token = (row + r) / heads, head = g * heads + (row + r) % heads;
        T* out = (T*)a.out + ((start + token) * a.num_heads + head) * head_size;
        give_output<C>(tile, tile.sums + r * tile.width, total[r], out);
    }
}

}  // namespace ISA

#undef ISA
#undef LANES
#undef ROWS
#undef FMA
#undef LOAD_CODES
#undef ADD_PRODUCTS_OF_INT16
#undef ADD_PRODUCTS_OF_BF16
