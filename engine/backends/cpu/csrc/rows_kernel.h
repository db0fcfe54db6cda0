// The operations of rows.cpp in 16 lanes, for one set of instructions: rows.cpp includes this file after its Floats.
// T is the type of a program's elements, bf16 or float. What may be wide is a Row, but for gates.

// Call visit(i, count) for each 16 elements of a vector; count says how many there are of them.
template <class Visit>
static inline void each(int64_t width, Visit visit) {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) visit(i, 16);
    if (i < width) visit(i, (int)(width - i));
}

template <class T>
static inline T* row_of(const Program& program, int32_t buffer, int64_t row) {
    const Buffer& b = program.buffers[buffer];
    return (T*)b.data + row * b.width;
}

// A row of a buffer that may be wide.
template <class T>
struct Row {
    void* data;
    bool wide;

    Floats get(int64_t i, int count) const {
        return wide ? load((const float*)data + i, count) : load((const T*)data + i, count);
    }
    void set(int64_t i, int count, Floats v) const {
        if (wide) store((float*)data + i, count, v);
        else store((T*)data + i, count, v);
    }
};

template <class T>
static inline Row<T> wide_or_narrow_row(const Program& program, int32_t buffer, int64_t row) {
    const bool wide = program.buffers[buffer].wide;
    return {wide ? (void*)row_of<float>(program, buffer, row) : row_of<T>(program, buffer, row), wide};
}

// Round to T.
template <class T>
static inline Floats as_stored(Floats v) {
    if constexpr (sizeof(T) == 2) return widened(narrowed(v));
    else return v;
}

template <class T>
static void embed(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const Table& table = *(const Table*)op.data;
    const int64_t width = program.buffers[op.out].width;
    const int64_t asked = step.token_ids[row], token_id = table.num_rows && asked >= table.num_rows ? 0 : asked;
    const Row<T> to = wide_or_narrow_row<T>(program, op.out, row);
    const Floats scale = broadcast(table.scale);
    if (table.packed == CODED_ROWS) {
        const CodedRow from = coded_row(*(const CodedRows*)table.rows, width, token_id);
        each(width, [=](int64_t i, int count) {
            float values[16];
            unpack_codes(from, i, values);
            to.set(i, count, as_stored<T>(load(values, count)) * scale);
        });
        return;
    }
    if (table.packed) {
        const uint8_t* from = packed_row((const uint8_t*)table.rows, width, 8 * sizeof(T), token_id);
        each(width, [=](int64_t i, int count) {
            T values[16];  // packed rows are padded to as many
            unpack(from, i * sizeof(T), sizeof values, values);
            to.set(i, count, load(values, count) * scale);
        });
        return;
    }
    const T* from = (const T*)table.rows + token_id * width;
    each(width, [=](int64_t i, int count) { to.set(i, count, load(from + i, count) * scale); });
}

template <class T>
static void copy_row(const Operation& op, const Program& program, int64_t from, int64_t to) {
    const Row<T> in = wide_or_narrow_row<T>(program, op.in, from), out = wide_or_narrow_row<T>(program, op.out, to);
    each(program.buffers[op.out].width, [=](int64_t i, int count) { out.set(i, count, in.get(i, count)); });
}

template <class T>
static void take(const Operation& op, const Program& program, const Step& step, int64_t row) {
    copy_row<T>(op, program, step.taken[row], row);
}

template <class T>
static void copy(const Operation& op, const Program& program, const Step&, int64_t row) {
    copy_row<T>(op, program, row, row);
}

template <class T>
static void add_position(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const int64_t width = program.buffers[op.out].width;
    const T* position = (const T*)((const Table*)op.data)->rows + step.positions[row] * width;
    const Row<T> in = wide_or_narrow_row<T>(program, op.in, row), out = wide_or_narrow_row<T>(program, op.out, row);
    each(width, [=](int64_t i, int count) { out.set(i, count, in.get(i, count) + load(position + i, count)); });
}

template <class T>
static void add(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Row<T> in = wide_or_narrow_row<T>(program, op.in, row), out = wide_or_narrow_row<T>(program, op.out, row);
    const Row<T> residual = wide_or_narrow_row<T>(program, op.residual, row);
    each(program.buffers[op.out].width,
         [=](int64_t i, int count) { out.set(i, count, in.get(i, count) + residual.get(i, count)); });
}

// Normalise the elements from `start` on.
template <class T>
static void normalise(const Norm& norm, Row<T> in, Row<T> out, int64_t start) {
    const float width = norm.width;
    Floats mean = broadcast(0), squares = broadcast(0);
    if (norm.centred) {
        each(norm.width, [&](int64_t i, int count) { mean = mean + in.get(start + i, count); });
        mean = broadcast(sum_of(mean) / width);
    }
    each(norm.width, [&](int64_t i, int count) {
        const Floats x = first(in.get(start + i, count) - mean, count);
        squares = fma(x, x, squares);
    });
    const Floats factor = broadcast(1.f / __builtin_sqrtf(sum_of(squares) / width + norm.eps));
    each(norm.width, [&](int64_t i, int count) {
        Floats y = (in.get(start + i, count) - mean) * factor;
        if (norm.weight) y = y * load(norm.weight + i, count);
        if (norm.bias) y = y + load(norm.bias + i, count);
        out.set(start + i, count, y);
    });
}

template <class T>
static void norm(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Norm& norm = *(const Norm*)op.data;
    const Row<T> in = wide_or_narrow_row<T>(program, op.in, row), out = wide_or_narrow_row<T>(program, op.out, row);
    for (int64_t i = 0; i < norm.count; i++) normalise(norm, in, out, norm.first + i * norm.width);
}

template <class T>
static void clamp(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Floats high = broadcast(*(const float*)op.data), low = broadcast(0) - high;
    const T* in = row_of<T>(program, op.in, row);
    T* out = row_of<T>(program, op.out, row);
    each(program.buffers[op.out].width, [=](int64_t i, int count) {  // NaN, the second operand, stays NaN
        store(out + i, count, max(low, min(high, load(in + i, count))));
    });
}

template <class T>
static void scale(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Floats factor = broadcast(*(const float*)op.data);
    const Row<T> out = wide_or_narrow_row<T>(program, op.out, row);
    each(program.buffers[op.out].width, [=](int64_t i, int count) { out.set(i, count, out.get(i, count) * factor); });
}

template <class T>
static void multiply_row(const Operation& op, const Program& program, const Step&, int64_t row) {
    const T* in = row_of<T>(program, op.in, row) + *(const int64_t*)op.data;
    T* out = row_of<T>(program, op.out, row);
    each(program.buffers[op.out].width,
         [=](int64_t i, int count) { store(out + i, count, load(out + i, count) * load(in + i, count)); });
}

template <class T>
static void rotate(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const Rotation& rotation = *(const Rotation*)op.data;
    const int64_t num_pairs = rotation.num_pairs;
    const float* cosines = rotation.waves + step.positions[row] * 2 * num_pairs;
    T* heads = row_of<T>(program, op.out, row);
    for (int64_t h = 0; h < rotation.num_heads; h++) {
        T *one = heads + h * rotation.head_size, *other = one + num_pairs;
        each(num_pairs, [=](int64_t i, int count) {
            const Floats a = load(one + i, count), b = load(other + i, count);
            const Floats cosine = load(cosines + i, count), sine = load(cosines + num_pairs + i, count);
            store(one + i, count, a * cosine - b * sine);
            store(other + i, count, b * cosine + a * sine);
        });
    }
}

template <class T, int ACTIVATION>
static void gate_row(const T* in, T* out, int64_t width, float limit) {
    const Floats high = broadcast(limit), low = broadcast(-limit), one = broadcast(1);
    each(width, [=](int64_t i, int count) {
        Floats x = load(in + i, count), y = load(in + width + i, count);
        if (limit > 0) {  // NaN, the second operand, stays NaN
            x = min(high, x);
            y = as_stored<T>(max(low, min(high, y)) + one);
        }
        store(out + i, count, as_stored<T>(activate<ACTIVATION>(x)) * y);
    });
}

template <class T>
static void gate_typed_row(const Operation& op, const Program& program, int64_t row) {
    static constexpr decltype(&gate_row<T, IDENTITY>) ROWS[NUM_ACTIVATIONS] = {
        gate_row<T, IDENTITY>, gate_row<T, GELU>,  gate_row<T, GELU_TANH>, gate_row<T, GELU_SIGMOID>,
        gate_row<T, RELU>,     gate_row<T, RELU2>, gate_row<T, SILU>,      gate_row<T, TANH>};
    const Gate& gate = *(const Gate*)op.data;
    ROWS[gate.activation](row_of<T>(program, op.in, row), row_of<T>(program, op.out, row), program.buffers[op.out].width,
                               gate.limit);
}

template <class T>
static void gate(const Operation& op, const Program& program, const Step&, int64_t row) {
    (program.buffers[op.in].wide ? gate_typed_row<float> : gate_typed_row<T>)(op, program, row);
}

template <class T, int FUNCTION>
static void gate_heads_row(const T* gates, T* heads, int64_t num_gates, int64_t size) {
    each(num_gates, [=](int64_t i, int count) {
        const Floats x = load(gates + i, count);
        const Floats function = FUNCTION == SOFTPLUS ? softplus(x) : times_sigmoid(FUNCTION == SIGMOID ? broadcast(1) : x, x);
        const Floats factors = as_stored<T>(function);
        if (size == 1) {
            store(heads + i, count, load(heads + i, count) * factors);
            return;
        }
        float of_heads[16];
        store(of_heads, 16, factors);
        for (int h = 0; h < count; h++) {
            T* head = heads + (i + h) * size;
            const Floats factor = broadcast(of_heads[h]);
            each(size, [=](int64_t j, int n) { store(head + j, n, load(head + j, n) * factor); });
        }
    });
}

template <class T>
static void gate_heads(const Operation& op, const Program& program, const Step&, int64_t row) {
    static constexpr decltype(&gate_heads_row<T, SIGMOID>) ROWS[] = {
        gate_heads_row<T, SIGMOID>, gate_heads_row<T, SOFTPLUS>, gate_heads_row<T, OWN_SILU>};
    const int64_t num_gates = program.buffers[op.in].width, size = program.buffers[op.out].width / num_gates;
    ROWS[*(const int32_t*)op.data](row_of<T>(program, op.in, row), row_of<T>(program, op.out, row), num_gates, size);
}

template <class T>
static void xielu_row(const Xielu& xielu, T* out, int64_t width) {
    const Floats alpha_p = broadcast(xielu.alpha_p), alpha_n = broadcast(xielu.alpha_n), eps = broadcast(xielu.eps);
    const Floats beta = broadcast(xielu.beta), zero = broadcast(0);
    each(width, [=](int64_t i, int count) {
        const Floats x = load(out + i, count);
        const Floats m = min(eps, x);  // NaN, the second operand, stays NaN
        const Floats curved = where_above(x, zero, alpha_p * (x * x), alpha_n * expm1_minus(m, x));
        store(out + i, count, fma(beta, x, curved));
    });
}

template <class T>
static void xielu(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Xielu& numbers = *(const Xielu*)op.data;
    const int64_t width = program.buffers[op.out].width;
    if (program.buffers[op.out].wide) xielu_row(numbers, row_of<float>(program, op.out, row), width);
    else xielu_row(numbers, row_of<T>(program, op.out, row), width);
}

#include "streams_kernel.h"

static inline bool ranks_above(float a, float b) { return a > b || (a != a && b == b); }

// Find the num_best of num_scores scores that rank highest, the highest first; of equal ones the first. `get(i, count)`
// returns some of them.
template <class Get>
static inline void find_best(int64_t num_scores, int64_t num_best, Get get, float* best, int32_t* places) {
    int64_t num_found = 0;
    each(num_scores, [&](int64_t start, int count) {
        float wide[16];
        store(wide, 16, get(start, count));
        for (int i = 0; i < count; i++) {
            if (num_found == num_best && !ranks_above(wide[i], best[num_found - 1])) continue;
            int64_t at = num_found < num_best ? num_found++ : num_found - 1;
            for (; at > 0 && ranks_above(wide[i], best[at - 1]); at--) {
                best[at] = best[at - 1];
                places[at] = places[at - 1];
            }
            best[at] = wide[i];
            places[at] = (int32_t)(start + i);
        }
    });
}

// Weigh the chosen, whose logits stand in the place of their weights.
template <class T>
static inline void weigh_plain(const Experts& experts, Row<T> logits, float* best) {
    const Floats highest = broadcast(best[0]);
    Floats sums = broadcast(0);
    each(experts.num_active, [&](int64_t i, int count) {
        const Floats y = exp_of(load(best + i, count) - highest);
        if (experts.router->renormalised) sums = sums + first(y, count);
        store(best + i, count, y);
    });
    if (!experts.router->renormalised)
        each(experts.num, [&](int64_t i, int count) {
            sums = sums + first(exp_of(logits.get(i, count) - highest), count);
        });
    const Floats sum = broadcast(sum_of(sums));
    each(experts.num_active, [=](int64_t i, int count) { store(best + i, count, load(best + i, count) / sum); });
}

// Store the scores of all experts.
template <class T>
static inline void score(const Experts& experts, Row<T> logits, float* scores) {
    const Floats one = broadcast(1.f);
    if (experts.router->sigmoid) {
        each(experts.num, [=](int64_t i, int count) {
            store(scores + i, count, times_sigmoid(one, logits.get(i, count)));
        });
        return;
    }
    float highest;
    int32_t place;
    find_best(experts.num, 1, [=](int64_t i, int count) { return logits.get(i, count); }, &highest, &place);
    Floats sums = broadcast(0);
    each(experts.num, [&](int64_t i, int count) {
        const Floats y = exp_of(logits.get(i, count) - broadcast(highest));
        sums = sums + first(y, count);
        store(scores + i, count, y);
    });
    const Floats sum = broadcast(sum_of(sums));
    each(experts.num, [=](int64_t i, int count) { store(scores + i, count, load(scores + i, count) / sum); });
}

// Set what ranks experts to -inf outside the groups of which a row chooses.
static inline void close_groups(const Experts& experts, float* ranked, float* groups) {
    const int64_t num = experts.router->num_groups, size = experts.num / num;
    for (int64_t g = 0; g < num; g++) {
        float best[2];
        int32_t places[2];
        const float* its = ranked + g * size;
        find_best(size, 2, [=](int64_t i, int count) { return load(its + i, count); }, best, places);
        groups[g] = best[0] + best[1];
    }
    for (int64_t g = 0; g < num; g++) {
        int64_t num_above = 0;
        for (int64_t h = 0; h < num; h++)
            num_above += ranks_above(groups[h], groups[g]) || (h < g && !ranks_above(groups[g], groups[h]));
        if (num_above < experts.router->num_active_groups) continue;
        each(size, [=](int64_t i, int count) { store(ranked + g * size + i, count, broadcast(-__builtin_inff())); });
    }
}

// Weigh the chosen by their scores.
static inline void weigh_scores(const Experts& experts, const Routes& routes, const float* scores) {
    const Router& router = *experts.router;
    float sum = 0;
    for (int64_t k = 0; k < experts.num_active; k++) sum += routes.weights[k] = scores[routes.experts[k]];
    sum += router.sum_offset;
    if (sum < router.min_sum) sum = router.min_sum;
    const Floats divisor = broadcast(router.renormalised ? sum : 1.f), factor = broadcast(router.scale);
    each(experts.num_active, [=](int64_t i, int count) {
        store(routes.weights + i, count, load(routes.weights + i, count) / divisor * factor);
    });
    if (!router.factors) return;
    for (int64_t k = 0; k < experts.num_active; k++) routes.weights[k] *= router.factors[routes.experts[k]];
}

template <class T>
static void choose(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Experts& experts = *(const Experts*)op.data;
    const Router& router = *experts.router;
    const Routes routes = routes_of(experts, program, row);
    const Row<T> logits = wide_or_narrow_row<T>(program, op.in, row);
    if (router.plain) {
        const auto get = [=](int64_t i, int count) { return logits.get(i, count); };
        find_best(experts.num, experts.num_active, get, routes.weights, routes.experts);
        weigh_plain(experts, logits, routes.weights);
    } else {
        float *scores = routes.scratch, *ranked = scores + experts.num;
        score(experts, logits, scores);
        each(experts.num, [=](int64_t i, int count) {
            const Floats y = load(scores + i, count);
            store(ranked + i, count, router.correction ? y + load(router.correction + i, count) : y);
        });
        if (router.num_active_groups < router.num_groups) close_groups(experts, ranked, ranked + experts.num);
        const auto get = [=](int64_t i, int count) { return load(ranked + i, count); };
        find_best(experts.num, experts.num_active, get, routes.weights, routes.experts);
        weigh_scores(experts, routes, scores);
    }
    float gate = router.shared_weight;
    if (router.shared_gate) store(&gate, 1, times_sigmoid(broadcast(1.f), logits.get(experts.num, 1)));
    for (int64_t i = 0; i < experts.num_shared; i++) {
        routes.experts[experts.num_active + i] = (int32_t)(experts.num + i);
        routes.weights[experts.num_active + i] = gate;
    }
}

template <class T>
static void gather(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Experts& experts = *(const Experts*)op.data;
    const Routes routes = routes_of(experts, program, row);
    const int64_t width = program.buffers[op.in].width;
    const T* from = row_of<T>(program, op.in, row);
    T* pairs = row_of<T>(program, op.out, 0);
    for (int64_t k = 0; k < experts_per_row(experts); k++)
        __builtin_memcpy(pairs + routes.places[k] * width, from, width * sizeof *from);
}

template <class T>
static void mix(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Experts& experts = *(const Experts*)op.data;
    const Routes routes = routes_of(experts, program, row);
    const int64_t width = program.buffers[op.out].width;
    const T* pairs = row_of<T>(program, op.in, 0);
    const Row<T> out = wide_or_narrow_row<T>(program, op.out, row);
    const Row<T> residual = wide_or_narrow_row<T>(program, op.residual < 0 ? op.out : op.residual, row);
    each(width, [=](int64_t i, int count) {
        Floats sum = broadcast(0);
        for (int64_t k = 0; k < experts_per_row(experts); k++)
            sum = sum + load(pairs + routes.places[k] * width + i, count) * broadcast(routes.weights[k]);
        if (op.residual >= 0) sum = residual.get(i, count) + (out.wide ? sum : as_stored<T>(sum));
        out.set(i, count, sum);
    });
}

template <class T>
static constexpr RowOperation OPERATIONS[NUM_KINDS] = {
    nullptr, nullptr, nullptr, nullptr, nullptr, take<T>, embed<T>, add_position<T>, norm<T>, clamp<T>, scale<T>,
    multiply_row<T>, rotate<T>, gate<T>, gate_heads<T>, xielu<T>, add<T>, copy<T>, scale_each<T>, cut_gate<T>,
    match<T>, predict<T>, correct<T>, choose<T>, gather<T>, mix<T>};
static const RowOperation *const FP32_OPERATIONS = OPERATIONS<float>, *const BF16_OPERATIONS = OPERATIONS<bf16>;
