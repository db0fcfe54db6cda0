// Products in int8, but for their sums: how a row is quantized, and what is made of the sums of a panel.
//
// int8.cpp includes this file for each set of instructions, after their Floats and Ints.

// Return elements k to k + 15 of a row, times their factors.
template <bool WIDE>
static inline Floats load(const void* x, const float* factors, int64_t k) {
    const Floats y = WIDE ? load((const float*)x + k, 16) : load((const bf16*)x + k, 16);
    return factors ? y * load(factors + k, 16) : y;
}

// Return the largest level that is near: the lowest, at most LEVELS below the highest, with `max_far` elements above.
static int near_level(const uint16_t* keys, int64_t size, int highest, int64_t max_far) {
    int low = max_of(0, highest - LEVELS);
    while (low < highest) {
        const int middle = (low + highest) / 2;
        if (count_above(keys, size, ((middle + 1) << (LEVEL - 16)) - 1) <= max_far) highest = middle;
        else low = middle + 1;
    }
    return low;
}

// Quantize a row of `size` elements, a multiple of 32.
template <bool WIDE>
static void quantize(const void* x, const float* factors, int64_t size, int64_t max_far, int8_t* near,
                     QuantizedRow& row) {
    uint16_t keys[MAX_INT8_DEPTH];
    Ints all_highest = all_of(0);
    for (int64_t k = 0; k < size; k += 16) {
        const Ints bits = bits_of(magnitude(load<WIDE>(x, factors, k)));
        all_highest = larger(all_highest, bits);
        store_upper_halves(keys + k, bits);
    }
    const int32_t highest = largest_of(all_highest);
    const uint32_t bound_bits = (uint32_t)(near_level(keys, size, highest >> LEVEL, max_far) + 1) << LEVEL;
    row.num_far = row.near_sum = row.far_sum = 0;
    if (highest >= 0x7f800000 || bound_bits >= 0x7f800000) {  // not finite
        row.scale = __builtin_nanf("");
        __builtin_memset(near, 0, size);
        return;
    }
    float bound = 1e-30f;  // below it, 127 / bound is infinite
    if (bound_bits > 0x0da24260) __builtin_memcpy(&bound, &bound_bits, sizeof bound);  // 1e-30 in bits
    row.scale = bound / 127;
    const Floats inverse = broadcast(127 / bound);
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
    quantize<WIDE>(x, linear.factors, size, max_far, near, row);
    for (int64_t e = 0; e < linear.num_exact; e++) {
        const float y = exact_product<WIDE>(x, linear.exact + e * size, size);
        row.exact[e] = row.scale == row.scale ? y : row.scale;  // NaN, if an element is not finite
    }
    for (int64_t e = 0; e < linear.num_exact_inputs; e++) {
        const int32_t k = linear.exact_inputs[e];
        const uint32_t bits = WIDE ? ((const uint32_t*)x)[k] : (uint32_t)((const bf16*)x)[k] << 16;
        __builtin_memcpy(row.inputs + e, &bits, sizeof bits);
    }
}

// Return the products of a row with 16 outputs, from `column` of a panel on, of which `sums` are the integers.
static inline Floats scaled(const Product& p, const QuantizedRow& q, int64_t panel, int column, const float* sums) {
    const Linear& linear = p.linear;
    const uint8_t* weights = linear.weight + panel * p.row_bytes * COLUMNS + column * 4;
    const Ints near = load_ints(sums) - all_of(128 * q.near_sum);
    Ints far = all_of(-128 * q.far_sum);
    for (int i = 0; i < q.num_far; i++)
        far = add_products(far, q.far[i].word, weights + q.far[i].start);
    const Floats sum = floats_of(near) + floats_of(far) * broadcast(128.f);
    Floats y = sum * broadcast(q.scale) * load(linear.scales + panel * COLUMNS + column, 16);
    const float* wide = linear.input_weights + panel * linear.num_exact_inputs * COLUMNS + column;
    for (int64_t i = 0; i < linear.num_exact_inputs; i++)
        y = y + broadcast(q.inputs[i]) * load(wide + i * COLUMNS, 16);
    return y;
}

static void finish_int8(const Product& p, int64_t row, int rows, int64_t panel, float* sums) {
    for (int r = 0; r < rows; r++) {
        UNROLL for (int column = 0; column < COLUMNS; column += 16) {
            float* at = sums + r * COLUMNS + column;
            store(at, 16, scaled(p, p.quantized[row + r], panel, column, at));
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
