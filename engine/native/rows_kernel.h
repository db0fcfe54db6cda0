// The operations of rows.cpp in 16 lanes, for one set of instructions: rows.cpp includes this file after its Floats.

// Call visit(i, count) for each 16 elements of a vector; count says how many there are of them.
template <class Visit>
static inline void each(int64_t width, Visit visit) {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) visit(i, 16);
    if (i < width) visit(i, (int)(width - i));
}

static inline bf16* row_of(const Program& program, int32_t buffer, int64_t row) {
    const Buffer& b = program.buffers[buffer];
    return (bf16*)b.data + row * b.width;
}

static void embed(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const Table& table = *(const Table*)op.data;
    const int64_t width = program.buffers[op.out].width;
    const bf16* from = table.rows + step.token_ids[row] * width;
    bf16* to = row_of(program, op.out, row);
    const Floats scale = broadcast(table.scale);
    each(width, [=](int64_t i, int count) { store(to + i, count, load(from + i, count) * scale); });
}

static void add_rows(const bf16* a, const bf16* b, bf16* out, int64_t width) {
    each(width, [=](int64_t i, int count) { store(out + i, count, load(a + i, count) + load(b + i, count)); });
}

static void add_position(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const int64_t width = program.buffers[op.out].width;
    const bf16* position = ((const Table*)op.data)->rows + step.positions[row] * width;
    add_rows(row_of(program, op.in, row), position, row_of(program, op.out, row), width);
}

static void add(const Operation& op, const Program& program, const Step&, int64_t row) {
    add_rows(row_of(program, op.in, row), row_of(program, op.residual, row), row_of(program, op.out, row),
             program.buffers[op.out].width);
}

static void normalise(const Norm& norm, const bf16* in, bf16* out) {
    const float width = norm.width;
    Floats mean = broadcast(0), squares = broadcast(0);
    if (norm.centred) {
        each(norm.width, [&](int64_t i, int count) { mean = mean + load(in + i, count); });
        mean = broadcast(sum_of(mean) / width);
    }
    each(norm.width, [&](int64_t i, int count) {
        const Floats x = first(load(in + i, count) - mean, count);
        squares = fma(x, x, squares);
    });
    const Floats factor = broadcast(1.f / __builtin_sqrtf(sum_of(squares) / width + norm.eps));
    each(norm.width, [&](int64_t i, int count) {
        Floats y = (load(in + i, count) - mean) * factor;
        if (norm.weight) y = y * load(norm.weight + i, count);
        if (norm.bias) y = y + load(norm.bias + i, count);
        store(out + i, count, y);
    });
}

static void norm(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Norm& norm = *(const Norm*)op.data;
    const bf16* in = row_of(program, op.in, row) + norm.first;
    bf16* out = row_of(program, op.out, row) + norm.first;
    for (int64_t i = 0; i < norm.count; i++) normalise(norm, in + i * norm.width, out + i * norm.width);
}

static void clamp(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Floats high = broadcast(*(const float*)op.data), low = broadcast(0) - high;
    const bf16* in = row_of(program, op.in, row);
    bf16* out = row_of(program, op.out, row);
    each(program.buffers[op.out].width, [=](int64_t i, int count) {  // NaN, the second operand, stays NaN
        store(out + i, count, max(low, min(high, load(in + i, count))));
    });
}

static void rotate(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const Rotation& rotation = *(const Rotation*)op.data;
    const int64_t num_pairs = rotation.num_pairs;
    const float* cosines = rotation.waves + step.positions[row] * 2 * num_pairs;
    bf16* heads = row_of(program, op.out, row);
    for (int64_t h = 0; h < rotation.num_heads; h++) {
        bf16 *one = heads + h * rotation.head_size, *other = one + num_pairs;
        each(num_pairs, [=](int64_t i, int count) {
            const Floats a = load(one + i, count), b = load(other + i, count);
            const Floats cosine = load(cosines + i, count), sine = load(cosines + num_pairs + i, count);
            store(one + i, count, a * cosine - b * sine);
            store(other + i, count, b * cosine + a * sine);
        });
    }
}

template <int ACTIVATION>
static void gate_row(const bf16* in, bf16* out, int64_t width, float limit) {
    const Floats high = broadcast(limit), low = broadcast(-limit), one = broadcast(1);
    each(width, [=](int64_t i, int count) {
        Floats x = load(in + i, count), y = load(in + width + i, count);
        if (limit > 0) {  // NaN, the second operand, stays NaN
            x = min(high, x);
            y = widened(narrowed(max(low, min(high, y)) + one));
        }
        store(out + i, count, widened(narrowed(activate<ACTIVATION>(x))) * y);
    });
}

typedef void (*GateRow)(const bf16* in, bf16* out, int64_t width, float limit);
static const GateRow GATE_ROWS[NUM_ACTIVATIONS] = {gate_row<IDENTITY>, gate_row<GELU>,  gate_row<GELU_TANH>,
                                                   gate_row<GELU_SIGMOID>, gate_row<RELU>, gate_row<RELU2>,
                                                   gate_row<SILU>,     gate_row<TANH>};

static void gate(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Gate& gate = *(const Gate*)op.data;
    GATE_ROWS[gate.activation](row_of(program, op.in, row), row_of(program, op.out, row), program.buffers[op.out].width,
                               gate.limit);
}

static inline bool ranks_above(float a, float b) { return a > b || (a != a && b == b); }

static void choose(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Experts& experts = *(const Experts*)op.data;
    const Routes routes = routes_of(experts, program, row);
    const bf16* scores = row_of(program, op.in, row);
    float* best = routes.weights;  // first the highest scores
    int64_t num_found = 0;
    each(experts.num, [&](int64_t start, int count) {
        float wide[16];
        store(wide, 16, load(scores + start, count));
        for (int i = 0; i < count; i++) {
            if (num_found == experts.num_active && !ranks_above(wide[i], best[num_found - 1])) continue;
            int64_t at = num_found < experts.num_active ? num_found++ : num_found - 1;
            for (; at > 0 && ranks_above(wide[i], best[at - 1]); at--) {
                best[at] = best[at - 1];
                routes.experts[at] = routes.experts[at - 1];
            }
            best[at] = wide[i];
            routes.experts[at] = (int32_t)(start + i);
        }
    });
    const Floats highest = broadcast(best[0]);
    Floats sums = broadcast(0);
    each(experts.num_active, [&](int64_t i, int count) {
        const Floats y = exp_of(load(best + i, count) - highest);
        sums = sums + first(y, count);
        store(best + i, count, y);
    });
    const Floats sum = broadcast(sum_of(sums));
    each(experts.num_active, [=](int64_t i, int count) { store(best + i, count, load(best + i, count) / sum); });
}

static void gather(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Experts& experts = *(const Experts*)op.data;
    const Routes routes = routes_of(experts, program, row);
    const int64_t width = program.buffers[op.in].width;
    const bf16* from = row_of(program, op.in, row);
    bf16* pairs = row_of(program, op.out, 0);
    for (int64_t k = 0; k < experts.num_active; k++)
        __builtin_memcpy(pairs + routes.places[k] * width, from, width * sizeof *from);
}

static void mix(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Experts& experts = *(const Experts*)op.data;
    const Routes routes = routes_of(experts, program, row);
    const int64_t width = program.buffers[op.out].width;
    const bf16* pairs = row_of(program, op.in, 0);
    const bf16* residual = op.residual < 0 ? nullptr : row_of(program, op.residual, row);
    bf16* out = row_of(program, op.out, row);
    each(width, [=](int64_t i, int count) {
        Floats sum = broadcast(0);
        for (int64_t k = 0; k < experts.num_active; k++)
            sum = sum + load(pairs + routes.places[k] * width + i, count) * broadcast(routes.weights[k]);
        store(out + i, count, residual ? load(residual + i, count) + widened(narrowed(sum)) : sum);
    });
}

static const RowOperation ROW_OPERATIONS[NUM_KINDS] = {nullptr, nullptr, nullptr, embed, add_position, norm, clamp,
                                                       rotate, gate, add, choose, gather, mix};
