// Products with weights in groups, for any instructions. groups.h says how weights and rows lie.
//
// groups.cpp includes this file for each set of instructions, where these stand before:
//   Words, Vector       a register of 32-bit integers, and of floats
//   widened_halves(p)   a Vector of numbers in fp16
//   Dot<BITS>           add(sum, x, weights): sum plus the products of a word of x with one of weights, of codes of so many
//                       bits; total(sum): that of each output
// Sums of a group are integers, exact in any order. A group adds to an output, in fp32 and in ascending order,
//   (sum - zero * sum of x) * (scale of weights * scale of x), and then, if there is one, least value * scaled sum of x.
// There is no fused multiply-add, as not all CPUs have one: all instructions give the same bits.

// Make the groups of a row of `size` elements. Each has the scale by which its largest element is 127.
template <bool WIDE>
static void quantize_row_groups(const void* x, int64_t size, int32_t zero, RowGroup* group) {
    for (int64_t k = 0; k < size; k += GROUP, group++) {
        const Floats low = WIDE ? load((const float*)x + k, 16) : load((const bf16*)x + k, 16);
        const Floats high = WIDE ? load((const float*)x + k + 16, 16) : load((const bf16*)x + k + 16, 16);
        const int32_t most = largest_of(larger(bits_of(magnitude(low)), bits_of(magnitude(high))));
        if (most >= 0x7f800000) {  // not finite
            *group = {};
            group->scale = group->scaled_sum = __builtin_nanf("");
            continue;
        }
        float bound = 1e-30f;  // below it, 127 / bound is infinite
        if (most > 0x0da24260) __builtin_memcpy(&bound, &most, sizeof bound);  // 1e-30 in bits
        const Floats factor = broadcast(127 / bound);
        const Ints first = rounded(low * factor), second = rounded(high * factor);
        store_bytes(group->codes, first);
        store_bytes(group->codes + 16, second);
        const int32_t sum = sum_of(first + second);
        group->scale = bound / 127;
        group->offset = -zero * sum;
        group->sum = sum;
        group->scaled_sum = group->sum * group->scale;
    }
}

// Sum R rows of x times vectors [V, V + N) of a panel.
template <int BITS, int GROUPING, bool PREFETCHES, int R, int V, int N>
static void sum_grouped_outputs(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end,
                                uint8_t* sums) {
    constexpr int64_t BYTES = group_bytes_of(BITS, GROUPING), HALF = sizeof(Vector) / 2;
    constexpr int PARTS = 8 / BITS, NUM_WORDS = GROUP / 4 / PARTS;
    Vector total[R][N];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) total[r][n] = Vector{};
    for (int64_t k = 0; k < row_bytes; k += sizeof(RowGroup), panel += BYTES) {
        const uint8_t *at = panel + V * sizeof(Words), *ahead = soon(panel, end);
        if (PREFETCHES) UNROLL for (int64_t i = 0; i < BYTES; i += LINE) __builtin_prefetch(ahead + i, 0, 2);
        at += BYTES - NUM_WORDS * WORDS;
        Words sum[R][N];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sum[r][n] = Words{};
        UNROLL for (int word = 0; word < NUM_WORDS; word++, at += WORDS) {
            UNROLL for (int part = 0; part < PARTS; part++) {
                Words weights[N];
                UNROLL for (int n = 0; n < N; n++) {
                    weights[n] = words_at(at + n * sizeof(Words));
                    if (BITS == 4) weights[n] = (part == 0 ? weights[n] : weights[n] >> 4) & 0x0f0f0f0f;
                }
                UNROLL for (int r = 0; r < R; r++) {
                    int32_t codes;
                    __builtin_memcpy(&codes, x + r * row_bytes + k + (word * PARTS + part) * 4, sizeof codes);
                    const Words all = Words{} + codes;
                    UNROLL for (int n = 0; n < N; n++) {
                        sum[r][n] = Dot<BITS>::add(sum[r][n], all, weights[n]);
                        KEEP_IN_REGISTER(sum[r][n]);
                    }
                }
            }
        }
        UNROLL for (int n = 0; n < N; n++) {
            const Vector scales = widened_halves(panel + (V + n) * HALF);
            Vector second{};
            if (GROUPING != SCALES) second = widened_halves(panel + (V + n) * HALF + COLUMNS * 2);
            UNROLL for (int r = 0; r < R; r++) {
                const RowGroup& of_x = *(const RowGroup*)(x + r * row_bytes + k);
                Vector whole = __builtin_convertvector(Dot<BITS>::total(sum[r][n]) + of_x.offset, Vector);
                if (GROUPING == SCALES_AND_ZEROS) whole -= second * of_x.sum;
                total[r][n] += whole * (scales * of_x.scale);
                if (GROUPING == SCALES_AND_LEAST) total[r][n] += second * of_x.scaled_sum;
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++)
            __builtin_memcpy(sums + 4 * (r * COLUMNS) + (V + n) * sizeof(Words), &total[r][n], sizeof(Words));
}

template <int BITS, int GROUPING, bool HAS_PREFETCHES, int R, int V = 0>
static void sum_groups(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    constexpr int VECTORS_OF_PANEL = WORDS / sizeof(Words), N = min_of(VECTORS_OF_PANEL, R <= 2 ? 4 : 2);
    constexpr bool PREFETCHES = V == 0 && (HAS_PREFETCHES || N < VECTORS_OF_PANEL);
    sum_grouped_outputs<BITS, GROUPING, PREFETCHES, R, V, N>(x, row_bytes, panel, end, sums);
    if constexpr (V + N < VECTORS_OF_PANEL)
        sum_groups<BITS, GROUPING, HAS_PREFETCHES, R, V + N>(x, row_bytes, panel, end, sums);
}

template <int BITS, int GROUPING, int ROWS, bool HAS_PREFETCHES>
struct InGroups {
    static constexpr int MAX_ROWS = ROWS;
    template <int R>
    static constexpr auto sum = sum_groups<BITS, GROUPING, HAS_PREFETCHES, R>;
    static void finish_sums(const Product&, int64_t, int, int64_t, float*) {}
};

typedef void (*Compute)(const Product&, int64_t from, int64_t to, int64_t panel, int64_t last);

template <int ROWS, bool HAS_PREFETCHES>
static Compute compute_of(const Linear& linear) {
    static constexpr Compute of_4[] = {compute_vectors<InGroups<4, SCALES, ROWS, HAS_PREFETCHES>>,
                                       compute_vectors<InGroups<4, SCALES_AND_LEAST, ROWS, HAS_PREFETCHES>>,
                                       compute_vectors<InGroups<4, SCALES_AND_ZEROS, ROWS, HAS_PREFETCHES>>};
    static constexpr Compute of_8[] = {compute_vectors<InGroups<8, SCALES, ROWS, HAS_PREFETCHES>>,
                                       compute_vectors<InGroups<8, SCALES_AND_LEAST, ROWS, HAS_PREFETCHES>>,
                                       compute_vectors<InGroups<8, SCALES_AND_ZEROS, ROWS, HAS_PREFETCHES>>};
    return (linear.element_bits == 4 ? of_4 : of_8)[linear.grouping - SCALES];
}
