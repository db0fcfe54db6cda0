// Products in int8, but for their sums: how a row is quantized, and what is made of the sums of a panel.
//
// int8.cpp includes this file for each set of instructions, after their Floats and Ints.

// Return elements k to k + 15 of a row, times their factors.
template <bool WIDE>
static inline Floats load(const void* x, const float* factors, int64_t k) {
    const Floats y = WIDE ? load((const float*)x + k, 16) : load((const bf16*)x + k, 16);
    return factors ? y * load(factors + k, 16) : y;
}

// Return the largest level that is near: the lowest, at most `levels` below the highest, with `max_far` elements above.
static int near_level(const uint16_t* keys, int64_t size, int highest, int64_t max_far, int levels) {
    int low = max_of(0, highest - levels);
    while (low < highest) {
        const int middle = (low + highest) / 2;
        if (count_above(keys, size, ((middle + 1) << (LEVEL - 16)) - 1) <= max_far) highest = middle;
        else low = middle + 1;
    }
    return low;
}

// Set the scale of a row of `size` elements, a multiple of 32. Its bound is `most` times the scale: at most `max_far`
// elements exceed it, none by more than `levels`. Return what elements are multiplied by.
template <bool WIDE>
static float choose_scale(const void* x, const float* factors, int64_t size, int64_t max_far, int levels, int most,
                          QuantizedRow& row) {
    uint16_t keys[MAX_INT8_DEPTH];
    Ints all_highest = all_of(0);
    for (int64_t k = 0; k < size; k += 16) {
        const Ints bits = bits_of(magnitude(load<WIDE>(x, factors, k)));
        all_highest = larger(all_highest, bits);
        store_upper_halves(keys + k, bits);
    }
    const int32_t highest = largest_of(all_highest);
    const uint32_t bound_bits = (uint32_t)(near_level(keys, size, highest >> LEVEL, max_far, levels) + 1) << LEVEL;
    if (highest >= 0x7f800000 || bound_bits >= 0x7f800000) {  // not finite
        row.scale = __builtin_nanf("");
        return 0;
    }
    float bound = 1e-30f;  // below it, most / bound is infinite
    if (bound_bits > 0x0da24260) __builtin_memcpy(&bound, &bound_bits, sizeof bound);  // 1e-30 in bits
    row.scale = bound / most;
    return most / bound;
}

template <bool WIDE>
static void quantize(const void* x, const float* factors, int64_t size, int64_t max_far, int8_t* near,
                     QuantizedRow& row) {
    const float factor = choose_scale<WIDE>(x, factors, size, max_far, LEVELS, 127, row);
    row.num_far = row.near_sum = row.far_sum = 0;
    if (row.scale != row.scale) {
        __builtin_memset(near, 0, size);
        return;
    }
    const Floats inverse = broadcast(factor);
    Ints near_sum = all_of(0), far_sum = all_of(0);
    for (int64_t k = 0; k < size; k += 16) {
        Ints whole = rounded(load<WIDE>(x, factors, k) * inverse);
        const auto is_far = is_beyond(whole, 127);
        if (any(is_far)) {
            const Ints far = only(is_far, (whole + all_of(64)) >> 7);
            whole = whole - (far << 7);
            far_sum = far_sum + far;
            int32_t words[4];
            store_bytes(words, far);
            for (int i = 0; i < 4; i++)
                if (words[i]) row.far[row.num_far++] = {(int32_t)(k / 4 + i) * WORDS, words[i]};
        }
        near_sum = near_sum + whole;
        store_bytes(near + k, whole);
    }
    row.near_sum = sum_of(near_sum);
    row.far_sum = sum_of(far_sum);
}

// In int10 all elements of a row, outliers too, are multiples of 16 bits.
template <bool WIDE>
static void quantize_10(const void* x, const float* factors, int64_t size, int64_t max_far, int16_t* multiples,
                        QuantizedRow& row) {
    const float factor = choose_scale<WIDE>(x, factors, size, min_of(MAX_OUTLIERS_10, max_far), LEVELS_10, 1023, row);
    if (row.scale != row.scale) {
        __builtin_memset(multiples, 0, size * 2);
        return;
    }
    for (int64_t k = 0; k < size; k += 16)
        store_shorts(multiples + k, rounded(load<WIDE>(x, factors, k) * broadcast(factor)));
}

// Return the product of a row and weights: 32 sums in ascending order, then the sum of their halves until one is left.
template <bool WIDE>
static float exact_product(const void* x, const float* weights, int64_t size) {
    Floats low = broadcast(0.f), high = broadcast(0.f);
    for (int64_t k = 0; k < size; k += 32) {
        low = low + load<WIDE>(x, nullptr, k) * load(weights + k, 16);
        high = high + load<WIDE>(x, nullptr, k + 16) * load(weights + k + 16, 16);
    }
    return sum_of(low + high);
}

// Make the QuantizedRow of a row, whose `far`, `exact` and `inputs` are set, and its near parts.
template <bool WIDE>
static void quantize_row(const Linear& linear, const void* x, int64_t size, int64_t max_far, int8_t* near,
                         QuantizedRow& row) {
    if (linear.element_bits == 10) quantize_10<WIDE>(x, linear.factors, size, max_far, (int16_t*)near, row);
    else quantize<WIDE>(x, linear.factors, size, max_far, near, row);
    for (int64_t e = 0; e < linear.num_exact; e++) {
        const float y = exact_product<WIDE>(x, linear.exact + e * size, size);
        row.exact[e] = row.scale == row.scale ? y : row.scale;  // NaN, if an element is not finite
    }
    for (int64_t e = 0; e < linear.num_exact_inputs; e++) {
        const int32_t k = linear.exact_inputs[e];
        if (WIDE) row.inputs[e] = ((const float*)x)[k];
        else {
            const uint32_t bits = (uint32_t)((const bf16*)x)[k] << 16;
            __builtin_memcpy(row.inputs + e, &bits, sizeof bits);
        }
    }
}

// Return the sums of the products of a row with 16 outputs, from `column` of a panel on: of the integers at `sums` and of
// those with far parts.
static inline Floats whole_sums(const Product& p, const QuantizedRow& q, int64_t panel, int column, const float* sums) {
    const uint8_t* weights = p.linear.weight + panel * p.panel_bytes + column * 4;
    const Ints near = load_ints(sums) - all_of(128 * q.near_sum);
    Ints far = all_of(-128 * q.far_sum);
    for (int i = 0; i < q.num_far; i++)
        far = add_products(far, q.far[i].word, weights + q.far[i].start);
    return floats_of(near) + floats_of(far) * broadcast(128.f);
}

// Return the products of a row with 16 outputs, from `column` of a panel on. `sum` has the sums of their multiples.
static inline Floats scaled(const Product& p, const QuantizedRow& q, int64_t panel, int column, Floats sum) {
    const Linear& linear = p.linear;
    Floats y = sum * broadcast(q.scale) * load(linear.scales + panel * COLUMNS + column, 16);
    const float* wide = linear.input_weights + panel * linear.num_exact_inputs * COLUMNS + column;
    for (int64_t i = 0; i < linear.num_exact_inputs; i++)
        y = y + broadcast(q.inputs[i]) * load(wide + i * COLUMNS, 16);
    return y;
}

template <bool HAS_FAR>
static void finish_rows(const Product& p, int64_t row, int rows, int64_t panel, float* sums) {
    for (int r = 0; r < rows; r++) {
        const QuantizedRow& q = p.quantized[row + r];
        UNROLL for (int column = 0; column < COLUMNS; column += 16) {
            float* at = sums + r * COLUMNS + column;
            const Floats sum = HAS_FAR ? whole_sums(p, q, panel, column, at) : load(at, 16);
            store(at, 16, scaled(p, q, panel, column, sum));
        }
    }
    int64_t i = 0, end = p.linear.num_exact;  // of the exact outputs, which ascend, find the panel's first one
    while (i < end) {
        const int64_t middle = (i + end) / 2;
        if (p.linear.exact_outputs[middle] < panel * COLUMNS) i = middle + 1;
        else end = middle;
    }
    for (; i < p.linear.num_exact && p.linear.exact_outputs[i] < (panel + 1) * COLUMNS; i++)
        for (int r = 0; r < rows; r++)
            sums[r * COLUMNS + p.linear.exact_outputs[i] - panel * COLUMNS] = p.quantized[row + r].exact[i];
}

constexpr auto finish_int8 = finish_rows<true>, finish_int10 = finish_rows<false>;
