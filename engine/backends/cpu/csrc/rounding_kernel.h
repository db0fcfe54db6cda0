// Weights [rows][num_in] that become codes in groups, for any instructions. groups.h says how these lie.
//
// rounding.cpp includes this file for each set of instructions. 16 outputs, half a panel, are rounded at once, each in an
// element of the registers: sums are those of a group in ascending order, without fused multiply-adds, so all
// instructions give the same bits. tests/engine/backends/cpu/rounding.py says the same in torch.

constexpr int AT_ONCE = 16, MAX_GROUPS = SUPER_GROUP / GROUP, MAX_SCALES = 2 * MAX_GROUPS;

static inline Floats within(Floats v, float least, float most) { return min(max(v, broadcast(least)), broadcast(most)); }

static inline Floats inverse_of(Floats v, float tiny) {
    return where_above(magnitude(v), broadcast(tiny), broadcast(1) / v, Floats{});
}

// A group of weights of 16 outputs.
struct Group {
    Floats weights[GROUP], lowest, highest;
};

// Numbers of up to 8 groups or 16 halves: in fp16, or integers times one number in fp16.
struct Numbers {
    Floats values[MAX_SCALES];  // as they are rounded
    Ints integers[MAX_SCALES];
    uint16_t halves[AT_ONCE];
};

// Load a group of `num` outputs; a row that has an element that is not finite is 0, and finite[output] false.
template <class Element>
static void load_group(const Element* rows, int64_t num_in, int64_t num, bool* finite, Group& group) {
    float by_input[GROUP][AT_ONCE] = {};
    for (int64_t i = 0; i < num; i++) {
        const Floats low = load(rows + i * num_in, 16), high = load(rows + i * num_in + 16, 16);
        if (largest_of(larger(bits_of(magnitude(low)), bits_of(magnitude(high)))) >= 0x7f800000) {
            finite[i] = false;
            continue;
        }
        float row[GROUP];
        store(row, 16, low);
        store(row + 16, 16, high);
        for (int k = 0; k < GROUP; k++) by_input[k][i] = row[k];
    }
    for (int k = 0; k < GROUP; k++) group.weights[k] = within(load(by_input[k], 16), -MAX_WEIGHT, MAX_WEIGHT);
    group.lowest = group.highest = group.weights[0];
    for (int k = 1; k < GROUP; k++) {
        group.lowest = min(group.lowest, group.weights[k]);
        group.highest = max(group.highest, group.weights[k]);
    }
}

static Floats rounded_to_halves(Floats exact, uint16_t* halves) {
    float values[AT_ONCE];
    store(values, 16, within(exact, -MAX_HALF, MAX_HALF) + Floats{});  // no -0, but for what is too small
    for (int i = 0; i < AT_ONCE; i++) values[i] = widened_half(halves[i] = narrowed_half(values[i]));
    return load(values, 16);
}

// Round `num` numbers of a super group, or the one of a group without sub-scales.
static void round_numbers(const Floats* exact, int num, const CodeFormat& format, Numbers& numbers) {
    if (!format.sub_group) {
        numbers.values[0] = rounded_to_halves(exact[0], numbers.halves);
        return;
    }
    Floats largest = magnitude(exact[0]);
    for (int i = 1; i < num; i++) largest = max(largest, magnitude(exact[i]));
    const Floats units = rounded_to_halves(largest / broadcast(LARGEST), numbers.halves);
    const Floats divisor = where_above(units, Floats{}, units, broadcast(1));
    for (int i = 0; i < num; i++) {
        numbers.integers[i] = rounded(within(exact[i] / divisor, -LARGEST, LARGEST));
        numbers.values[i] = floats_of(numbers.integers[i]) * units;
    }
}

// Return the largest of `num` weights by magnitude, the first of these.
static inline Floats largest_of(const Floats* weights, int num) {
    Floats largest = weights[0];
    for (int k = 1; k < num; k++)
        largest = where_above(magnitude(weights[k]), magnitude(largest), weights[k], largest);
    return largest;
}

// Return a scale of `num` weights, whose codes are zero + w / scale: that by which the largest weight is a code at its
// end or, with shares, one with a small weighted squared error. ROUNDS regressions follow from each of ZERO_STARTS, by
// which many codes more the largest weight lies from the zero; the first scale with the smallest error is returned.
static Floats scale_of(const Floats* weights, const float* shares, int num, float zero) {
    const Floats largest = largest_of(weights, num), tiny = broadcast(TINY);
    if (!shares) return largest / broadcast(-zero);
    Floats best{}, best_gain{};
    for (int i = 0; i < NUM_STARTS; i++) {
        Floats scale = largest / broadcast(-(zero + ZERO_STARTS[i])), gain{};
        for (int round = 0; round < ROUNDS; round++) {
            const Floats inverse = inverse_of(scale, TINY);
            Floats sum_qx{}, sum_qq{};
            for (int k = 0; k < num; k++) {
                const Floats code = whole(within(weights[k] * inverse, -zero, zero - 1));
                const Floats weighted = code * broadcast(shares[k]);
                sum_qx = sum_qx + weighted * weights[k];
                sum_qq = sum_qq + weighted * code;
            }
            scale = where_above(sum_qq, tiny, sum_qx / max(sum_qq, tiny), scale);
            gain = where_above(sum_qq, tiny, scale * sum_qx, Floats{});
        }
        if (i == 0) best = scale;
        best = where_above(gain, best_gain, scale, best);
        best_gain = max(best_gain, gain);
    }
    return best;
}

// Seek a scale as scale_of does, but of codes of 8 bits, of which some scale nearly has the few weights that count most.
// The first of NUM_SCALES makes the largest weight a code zero - 1 steps from 0; each after it has zero / 128 steps
// less. Errors are integers, whose sums are the same in any order: a weight has 16 bits, what its code leaves of it 7 of
// a step, and the square of that times its share, of `pairs` of Rounding, 26. So the sum of GROUP is below 2^31.
static Floats sought_scale(const Floats* weights, const int32_t* shares, float zero) {
    const Floats largest = largest_of(weights, GROUP), bound = magnitude(largest);
    const Floats unit = inverse_of(bound, TINY) * broadcast(MAX_SHORT);
    Ints pairs[GROUP / 2];
    for (int k = 0; k < GROUP / 2; k++)
        pairs[k] = paired(rounded(weights[2 * k] * unit), rounded(weights[2 * k + 1] * unit));
    Floats best{}, least{};
    for (int i = 0; i < NUM_SCALES; i++) {
        const float steps = zero - 1 - i * zero / 128;
        const Floats exact = largest / broadcast(-steps), above = exact * broadcast(HALF_SPLIT);
        const Floats inverse = inverse_of(magnitude(above - (above - exact)), TINY);  // of what fp16 has of the scale
        const Ints factor = rounded(bound * inverse * broadcast(STEP_FACTOR)), factors = paired(factor, factor);
        Ints sum{};
        for (int k = 0; k < GROUP / 2; k++) sum = add_errors(sum, pairs[k], factors, all_of(shares[k]));
        const Floats error = floats_of(sum) * broadcast(1.0 / (steps * steps));
        best = i == 0 ? exact : where_above(least, error, exact, best);
        least = i == 0 ? error : min(least, error);
    }
    return best;
}

// A scale and a least value above a group's lowest weight, and the weighted squared error of the codes that gave both.
struct Line {
    Floats scale, least, error;
};

// Sums over a group, weighted by `shares`: of these alone, and of x and its squares, for x `above` its lowest weight.
struct Sums {
    Floats w, x, xx;
};

// Find the codes of a line, and the line with the least weighted squares for these codes: a regression of two numbers.
static inline Line regressed(const Floats* above, const float* shares, const Sums& sums, float most, const Line& line) {
    const Floats inverse = inverse_of(line.scale, TINY), tiny = broadcast(TINY);
    Floats sum_q{}, sum_qx{}, sum_qq{};
    for (int k = 0; k < GROUP; k++) {
        const Floats code = whole(within((above[k] - line.least) * inverse, 0, most));
        const Floats weighted = code * broadcast(shares[k]);
        sum_q = sum_q + weighted;
        sum_qx = sum_qx + weighted * above[k];
        sum_qq = sum_qq + weighted * code;
    }
    const Floats spread = sums.w * sum_qq - sum_q * sum_q;
    const Floats divisor = where_above(spread, tiny, spread, broadcast(1));
    const Floats slope = max((sums.w * sum_qx - sum_q * sums.x) / divisor, Floats{});
    const Floats least = (sum_qq * sums.x - sum_q * sum_qx) / divisor;
    const Floats error = (sums.xx - slope * sum_qx) - least * sums.x;
    return {where_above(spread, tiny, slope, line.scale), where_above(spread, tiny, least, line.least),
            where_above(spread, tiny, error, sums.xx)};
}

// Seek the scale and the least value of a group with a small weighted squared error. Each of STARTS is the range of the
// weights, with so many more steps than there are between codes, from which ROUNDS regressions follow; the line with the
// smallest error, the first of these, gets one more.
static void fit(const Group& group, const float* shares, float most, Floats& scale, Floats& least) {
    Floats above[GROUP];
    Sums sums{};
    float sum = 0;
    for (int k = 0; k < GROUP; k++) {
        above[k] = group.weights[k] - group.lowest;
        const Floats weighted = above[k] * broadcast(shares[k]);
        sums.x = sums.x + weighted;
        sums.xx = sums.xx + weighted * above[k];
        sum += shares[k];
    }
    sums.w = broadcast(sum);
    const Floats span = group.highest - group.lowest;
    Line best{};
    for (int i = 0; i < NUM_STARTS; i++) {
        const float steps = most + STARTS[i];
        Line line = {span / broadcast(steps), span * broadcast(STARTS[i] / (2 * steps)), Floats{}};
        for (int round = 0; round < ROUNDS; round++) line = regressed(above, shares, sums, most, line);
        if (i == 0) best = line;
        best.scale = where_above(best.error, line.error, line.scale, best.scale);
        best.least = where_above(best.error, line.error, line.least, best.least);
        best.error = min(best.error, line.error);
    }
    best = regressed(above, shares, sums, most, best);
    scale = best.scale;
    least = group.lowest + best.least;
}

// Return the scale that goes with a least value, which was rounded, if this one went with it before.
static Floats fitted_scale(const Group& group, const float* shares, float most, Floats scale, Floats least) {
    const Floats inverse = inverse_of(scale, TINY);
    Floats sum_qx{}, sum_qq{};
    for (int k = 0; k < GROUP; k++) {
        const Floats above = group.weights[k] - least, code = whole(within(above * inverse, 0, most));
        const Floats weighted = code * broadcast(shares[k]);
        sum_qx = sum_qx + weighted * above;
        sum_qq = sum_qq + weighted * code;
    }
    const Floats tiny = broadcast(TINY), best = max(sum_qx / max(sum_qq, tiny), Floats{});
    return where_above(sum_qq, tiny, best, scale);
}

// Write the codes of 16 outputs of a group, of which each half has a scale and an offset, to their places in words.
static void write_codes(const Group& group, const Floats* scales, const Floats* offsets, const CodeFormat& format,
                        uint8_t* upper, uint8_t* lower) {
    const Floats inverses[2] = {inverse_of(scales[0], 0), inverse_of(scales[1], 0)};
    const float most = (1 << format.bits) - 1;
    const int bits = format.lower_bits(), upper_bits = format.upper_bits(), parts = 8 / bits;
    Ints uppers[2] = {};
    for (int part = 0; part < GROUP / 4; part += parts) {
        Ints word{};
        for (int i = 0; i < 4 * parts; i++) {
            const int byte = i % 4, its_part = part + i / 4, half = its_part * 8 / GROUP;
            const Floats code = within((group.weights[4 * part + i] + offsets[half]) * inverses[half], 0, most);
            const Ints all = rounded(code), above = all >> bits;
            word = word + ((all - (above << bits)) << (byte * 8 + i / 4 * bits));
            if (upper_bits) {
                Ints& its = uppers[its_part * upper_bits / 8];
                its = its + (above << (byte * 8 + its_part * upper_bits % 8));
            }
        }
        __builtin_memcpy(lower + part / parts * WORDS, &word, sizeof word);
    }
    for (int i = 0; i < upper_bits; i++) __builtin_memcpy(upper + i * WORDS, &uppers[i], sizeof uppers[i]);
}

// Make the least value of a group 0 if it has no scale, but several weights: they are too close for any.
static void drop_lone(const Group& group, Floats scale, const CodeFormat& format, Numbers& others, int i) {
    const Floats zero{}, is_spread = where_above(group.highest, group.lowest, broadcast(1), zero);
    const Floats kept = where_above(magnitude(scale), zero, broadcast(1), broadcast(1) - is_spread);
    others.values[i] = others.values[i] * kept;
    if (format.sub_group) {
        others.integers[i] = rounded(floats_of(others.integers[i]) * kept);
        return;
    }
    float all[AT_ONCE];
    store(all, 16, kept);
    for (int j = 0; j < AT_ONCE; j++)
        if (all[j] == 0) others.halves[j] = 0;
}

// Round `num` outputs, up to 16, from `column` of a panel on.
template <class Element>
static void round_outputs(const Rounding& r, const Element* rows, int64_t num, int column, uint8_t* to) {
    const CodeFormat& f = r.format;
    const int num_groups = f.num_groups(), num_scales = f.sub_group == 16 ? 2 : 1, size = GROUP / num_scales;
    const float most = (1 << f.bits) - 1, zero = 1 << f.log_zero();
    Group groups[MAX_GROUPS];
    for (int64_t k = 0; k < r.num_in; k += num_groups * GROUP) {
        Numbers scales, others;
        Floats exact[MAX_SCALES], leasts[MAX_GROUPS];
        bool finite[AT_ONCE];
        __builtin_memset(finite, true, sizeof finite);
        for (int i = 0; i < num_groups; i++) {
            load_group(rows + k + i * GROUP, r.num_in, num, finite, groups[i]);
            leasts[i] = groups[i].lowest;
            const float* shares = r.shares ? r.shares + k + i * GROUP : nullptr;
            if (f.grouping == SCALES)
                for (int j = 0, at = 0; j < num_scales; j++, at += size) {
                    const Floats* weights = groups[i].weights + at;
                    exact[i * num_scales + j] = shares && f.bits == 8
                                                    ? sought_scale(weights, r.pairs + (k + i * GROUP) / 2, zero)
                                                    : scale_of(weights, shares ? shares + at : shares, size, zero);
                }
            else if (shares) fit(groups[i], shares, most, exact[i], leasts[i]);
        }
        if (f.grouping != SCALES) {
            round_numbers(leasts, num_groups, f, others);
            for (int i = 0; i < num_groups; i++) {
                const Floats least = others.values[i], span = max(groups[i].highest - least, Floats{});
                exact[i] = r.shares ? fitted_scale(groups[i], r.shares + k + i * GROUP, most, exact[i], least)
                                    : span / broadcast(most);
            }
        }
        round_numbers(exact, num_groups * num_scales, f, scales);
        for (int i = 0; i < AT_ONCE; i++)
            if (!finite[i]) scales.halves[i] = 0x7e00;  // NaN
        if (f.grouping != SCALES)
            for (int i = 0; i < num_groups; i++) drop_lone(groups[i], scales.values[i], f, others, i);
        const int64_t head = f.head_bytes(), at = column * 2;
        __builtin_memcpy(to + at, scales.halves, sizeof scales.halves);
        if (f.num_others()) __builtin_memcpy(to + COLUMNS * 2 + at, others.halves, sizeof others.halves);
        to += head;
        for (int i = 0; i < num_groups; i++, to += f.group_bytes()) {
            const Floats* its = scales.values + i * num_scales;
            if (f.sub_group) {
                for (int j = 0; j < num_scales; j++)
                    store_bytes(to + j * COLUMNS + column, scales.integers[i * num_scales + j]);
                if (f.num_others()) store_bytes(to + COLUMNS + column, others.integers[i]);
            }
            uint8_t* upper = to + f.numbers_bytes() + column * 4;
            const Floats both[2] = {its[0], its[num_scales - 1]};
            Floats offsets[2];
            for (int j = 0; j < 2; j++)
                offsets[j] = f.grouping == SCALES ? both[j] * broadcast(zero) : Floats{} - others.values[i];
            write_codes(groups[i], both, offsets, f, upper, upper + f.upper_bytes());
        }
    }
}
