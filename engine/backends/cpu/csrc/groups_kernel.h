// Products with weights in groups, for any instructions. groups.h says how weights and rows lie.
//
// groups.cpp includes this file for each set of instructions, where these stand before:
//   Words, Vector       a register of 32-bit integers, and of floats
//   widened_halves(p)   a Vector of numbers in fp16
//   widened_bytes(p)    Words of numbers in int8
//   looked_up(words)    the values in TABLE of places, a byte each
//   Dot<BITS>           add(sum, x, weights): sum plus the products of a word of x with one of weights, of codes of so many
//                       bits; total(sum): that of each output
// Sums of a group are integers, exact in any order; where its halves have integers as scales, the group's is the sum of
// its halves' times these, exact in fp32, too. A group adds to an output, in fp32 and in ascending order,
//   (sum - zero * sum of x) * (scale of weights * scale of x), and then, if there is one, least value * scaled sum of x.
// A scale or a least value that is an integer times one in fp16 is exact in fp32. There is no fused multiply-add, as not
// all CPUs have one: all instructions give the same bits. With codes that have remainders those of a row come last, the
// largest scale first, each as a group of its own.

// Make the groups of a row of `size` elements. Each has the scale by which its largest element is 127.
template <bool WIDE>
static void quantize_row_groups(const void* x, int64_t size, RowGroup* group) {
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
        group->scale = bound / 127;
        group->first_sum = sum_of(first);
        group->sum = sum_of(first + second);
        group->scaled_sum = group->sum * group->scale;
    }
}

// Make the `num` remainders of a row of `size` elements: those of the groups with the largest elements, the largest first.
// The remainder of an element is at most half of its group's scale, which is 127 of those of the remainder.
template <bool WIDE>
static void quantize_remainders(const void* x, int64_t size, int64_t num, Remainder* remainders) {
    auto half = [x](int64_t k) { return WIDE ? load((const float*)x + k, 16) : load((const bf16*)x + k, 16); };
    for (int64_t i = 0; i < num; i++) remainders[i] = {{}, 0, -1};
    for (int64_t k = 0; k < size; k += GROUP) {
        const int32_t most = largest_of(larger(bits_of(magnitude(half(k))), bits_of(magnitude(half(k + 16)))));
        int64_t i = num;
        for (; i > 0 && remainders[i - 1].most < most; i--)
            if (i < num) remainders[i] = remainders[i - 1];
        if (i < num) remainders[i].place = k / GROUP, remainders[i].most = most;
    }
    for (int64_t i = 0; i < num; i++) {
        const int32_t most = remainders[i].most;
        if (most >= 0x7f800000) continue;  // the row is NaN by the group itself
        const int64_t k = remainders[i].place * (int64_t)GROUP;
        RowGroup& group = remainders[i].group;
        float bound = 1e-30f;
        if (most > 0x0da24260) __builtin_memcpy(&bound, &most, sizeof bound);
        const Floats factor = broadcast(127 / bound), parts = broadcast(254);
        const Floats low = half(k) * factor, high = half(k + 16) * factor;
        const Ints first = rounded((low - floats_of(rounded(low))) * parts);
        const Ints second = rounded((high - floats_of(rounded(high))) * parts);
        store_bytes(group.codes, first);
        store_bytes(group.codes + 16, second);
        group.scale = bound / 127 / 254;
        group.sum = sum_of(first + second);
    }
}

// Return codes [4 * PART, 4 * PART + 4) of a group of each output.
template <int FORMAT, int PART>
INLINE Words codes_at(const uint8_t* upper, const uint8_t* lower) {
    constexpr CodeFormat F = CODE_FORMATS[FORMAT];
    if (F.bits == 8) return words_at(lower + PART * WORDS);
    Words codes = words_at(lower + PART / 2 * WORDS);
    codes = (PART % 2 ? codes >> 4 : codes) & 0x0f0f0f0f;
    if (F.has_table) return looked_up(codes);
    if constexpr (F.upper_bits() > 0) {
        constexpr int NUM = 8 / F.upper_bits(), AT = PART % NUM * F.upper_bits();
        const Words bits = words_at(upper + PART / NUM * WORDS);
        codes |= (AT < 4 ? bits << (4 - AT) : bits >> (AT - 4)) & (F.upper_bits() == 1 ? 0x10101010 : 0x30303030);
    }
    return codes;
}

// Add the products of parts [PART, END) of a group, each of 4 codes, to the sums.
template <int FORMAT, int R, int N, int PART, int END>
INLINE void add_parts(const uint8_t* x, int64_t row_bytes, const uint8_t* upper, const uint8_t* lower, Words (&sum)[R][N]) {
    constexpr CodeFormat F = CODE_FORMATS[FORMAT];
    Words weights[N];
    UNROLL for (int n = 0; n < N; n++)
        weights[n] = codes_at<FORMAT, PART>(upper + n * sizeof(Words), lower + n * sizeof(Words));
    UNROLL for (int r = 0; r < R; r++) {
        int32_t codes;
        __builtin_memcpy(&codes, x + r * row_bytes + PART * 4, sizeof codes);
        const Words all = Words{} + codes;
        UNROLL for (int n = 0; n < N; n++) {
            sum[r][n] = Dot<F.dot_bits()>::add(sum[r][n], all, weights[n]);
            KEEP_IN_REGISTER(sum[r][n]);
        }
    }
    if constexpr (PART + 1 < END) add_parts<FORMAT, R, N, PART + 1, END>(x, row_bytes, upper, lower, sum);
}

// Return the sums of a group, or of one of its halves: less zero * those of x, if all weights have the same.
template <int FORMAT>
static inline Words less_zeros(Words sum, int32_t sum_of_x) {
    constexpr CodeFormat F = CODE_FORMATS[FORMAT];
    const Words total = Dot<F.dot_bits()>::total(sum);
    if (F.grouping != SCALES) return total;
    return total - ((Words{} + sum_of_x) << (F.has_table ? 7 : F.log_zero()));
}

// Return numbers of a group as floats: in fp16, or integers times those of the super group.
template <int FORMAT>
static inline Vector numbers_at(const uint8_t* head, const uint8_t* numbers, int which, int vector) {
    const int64_t at = which * COLUMNS + vector * (int64_t)(sizeof(Words) / 4);
    if (!CODE_FORMATS[FORMAT].sub_group) return widened_halves(numbers + 2 * at);
    return widened_halves(head + 2 * at) * __builtin_convertvector(widened_bytes(numbers + at), Vector);
}

// Sum R rows of x times vectors [V, V + N) of a panel.
template <int FORMAT, bool PREFETCHES, int R, int V, int N>
static void sum_grouped_outputs(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end,
                                uint8_t* sums) {
    constexpr CodeFormat F = CODE_FORMATS[FORMAT];
    constexpr int LANES = sizeof(Words) / 4, NUM_PARTS = GROUP / 4, BYTES = F.group_bytes();
    const uint8_t* head = panel;
    Vector total[R][N];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) total[r][n] = Vector{};
    for (int64_t k = 0; k < row_bytes; k += sizeof(RowGroup), panel += BYTES) {
        if (F.sub_group && k % (sizeof(RowGroup) * F.num_groups()) == 0) {
            head = panel;
            panel += F.head_bytes();
        }
        const uint8_t *upper = panel + F.numbers_bytes() + V * sizeof(Words), *lower = upper + F.upper_bytes();
        const uint8_t* ahead = soon(panel, end);
        if (PREFETCHES) UNROLL for (int64_t i = 0; i < BYTES; i += LINE) __builtin_prefetch(ahead + i, 0, 2);
        Words sum[R][N];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sum[r][n] = Words{};
        if constexpr (F.sub_group == 16) {
            Words of_half[R][N];
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) of_half[r][n] = Words{};
            add_parts<FORMAT, R, N, 0, NUM_PARTS / 2>(x + k, row_bytes, upper, lower, of_half);
            add_parts<FORMAT, R, N, NUM_PARTS / 2, NUM_PARTS>(x + k, row_bytes, upper, lower, sum);
            UNROLL for (int n = 0; n < N; n++) {
                const Words first = widened_bytes(panel + (V + n) * LANES);
                const Words second = widened_bytes(panel + COLUMNS + (V + n) * LANES);
                UNROLL for (int r = 0; r < R; r++) {
                    const RowGroup& of_x = *(const RowGroup*)(x + r * row_bytes + k);
                    sum[r][n] = less_zeros<FORMAT>(of_half[r][n], of_x.first_sum) * first +
                                less_zeros<FORMAT>(sum[r][n], of_x.sum - of_x.first_sum) * second;
                }
            }
        } else
            add_parts<FORMAT, R, N, 0, NUM_PARTS>(x + k, row_bytes, upper, lower, sum);
        UNROLL for (int n = 0; n < N; n++) {
            Vector scales, others{};
            if (F.sub_group == 16) scales = widened_halves(head + (V + n) * LANES * 2);
            else scales = numbers_at<FORMAT>(head, panel, 0, V + n);
            if (F.num_others()) others = numbers_at<FORMAT>(head, panel, 1, V + n);
            UNROLL for (int r = 0; r < R; r++) {
                const RowGroup& of_x = *(const RowGroup*)(x + r * row_bytes + k);
                const Words of_codes = F.sub_group == 16 ? sum[r][n] : less_zeros<FORMAT>(sum[r][n], of_x.sum);
                Vector whole = __builtin_convertvector(of_codes, Vector);
                if (F.grouping == SCALES_AND_ZEROS) whole -= others * (float)of_x.sum;
                total[r][n] += whole * (scales * of_x.scale);
                if (F.grouping == SCALES_AND_LEAST) total[r][n] += others * of_x.scaled_sum;
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++)
            __builtin_memcpy(sums + 4 * (r * COLUMNS) + (V + n) * sizeof(Words), &total[r][n], sizeof(Words));
}

template <int FORMAT, bool HAS_PREFETCHES, int R, int V = 0>
static void sum_groups(const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end, uint8_t* sums) {
    // Few vectors at once, so that the sums of all rows stay in registers.
    constexpr int VECTORS_OF_PANEL = WORDS / sizeof(Words), N = R <= 2 ? min_of(VECTORS_OF_PANEL, 4) : VECTORS_OF_PANEL / 2;
    constexpr bool PREFETCHES = V == 0 && (HAS_PREFETCHES || N < VECTORS_OF_PANEL);
    sum_grouped_outputs<FORMAT, PREFETCHES, R, V, N>(x, row_bytes, panel, end, sums);
    if constexpr (V + N < VECTORS_OF_PANEL)
        sum_groups<FORMAT, HAS_PREFETCHES, R, V + N>(x, row_bytes, panel, end, sums);
}

// Add the products with the remainders of rows to the sums [rows][COLUMNS] of a panel.
template <int FORMAT>
static void add_remainders(const Product& p, int64_t row, int rows, int64_t panel, float* sums) {
    constexpr CodeFormat F = CODE_FORMATS[FORMAT];
    const CodedRows& part = part_of(p.linear, panel);
    const uint8_t* weights = part.weight + (panel - part.panel) * F.panel_bytes(p.linear.num_in);
    const Remainder* remainder = p.remainders + row * p.num_remainders;
    for (int r = 0; r < rows; r++, sums += COLUMNS)
        for (int64_t i = 0; i < p.num_remainders; i++, remainder++) {
            const uint8_t* at = weights + remainder->place * F.group_bytes();
            float products[COLUMNS];
            sum_groups<FORMAT, false, 1>((const uint8_t*)&remainder->group, sizeof(RowGroup), at, at, (uint8_t*)products);
            for (int column = 0; column < COLUMNS; column += 16)
                store(sums + column, 16, load(sums + column, 16) + load(products + column, 16));
        }
}

template <int FORMAT, int ROWS, bool HAS_PREFETCHES>
struct InGroups {
    static constexpr int MAX_ROWS = ROWS;
    template <int R>
    static constexpr auto sum = sum_groups<FORMAT, HAS_PREFETCHES, R>;
    static void finish_sums(const Product& p, int64_t row, int rows, int64_t panel, float* sums) {
        if constexpr (CODE_FORMATS[FORMAT].has_remainders()) add_remainders<FORMAT>(p, row, rows, panel, sums);
    }
};

template <int FORMAT, int ROWS, bool HAS_PREFETCHES>
static void compute_part(const Product& p, const CodedRows& part, int64_t from, int64_t to, int64_t panel, int64_t last) {
    const int64_t panel_bytes = CODE_FORMATS[FORMAT].panel_bytes(p.linear.num_in);
    compute_panels<InGroups<FORMAT, ROWS, HAS_PREFETCHES>>(p, part.weight - part.panel * panel_bytes, panel_bytes, from, to,
                                                           panel, last);
}

typedef void (*Compute)(const Product&, const CodedRows&, int64_t from, int64_t to, int64_t panel, int64_t last);

// What computes outputs of a part, by its format.
template <int ROWS, bool HAS_PREFETCHES, int... FORMATS>
static Compute one_of(int64_t format, std::integer_sequence<int, FORMATS...>) {
    static constexpr Compute of[] = {compute_part<FORMATS, ROWS, HAS_PREFETCHES>...};
    return of[format];
}

template <int ROWS, bool HAS_PREFETCHES>
static Compute compute_of(int64_t format) {
    return one_of<ROWS, HAS_PREFETCHES>(format, std::make_integer_sequence<int, NUM_CODE_FORMATS>());
}
