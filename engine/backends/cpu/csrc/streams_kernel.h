// The operations of rows.cpp on parallel streams, on what a layer adds to them, and on gates that are cut:
// rows_kernel.h includes this file behind its Row. Streams are wide.

template <class T>
static void scale_each(const Operation& op, const Program& program, const Step&, int64_t row) {
    const float* factors = ((const Factors*)op.data)->factors;
    const Row<T> out = wide_or_narrow_row<T>(program, op.out, row);
    each(program.buffers[op.out].width,
         [=](int64_t i, int count) { out.set(i, count, out.get(i, count) * load(factors + i, count)); });
}

template <class T>
static void cut_gate(const Operation& op, const Program& program, const Step&, int64_t row) {
    const int64_t width = program.buffers[op.out].width / 2;
    const Row<T> gate = wide_or_narrow_row<T>(program, op.out, row);
    Floats sums = broadcast(0), squares = broadcast(0);
    each(width, [&](int64_t i, int count) { sums = sums + gate.get(i, count); });
    const Floats mean = broadcast(sum_of(sums) / (float)width);
    each(width, [&](int64_t i, int count) {
        const Floats x = first(gate.get(i, count) - mean, count);
        squares = fma(x, x, squares);
    });
    const float deviation = __builtin_sqrtf(sum_of(squares) / (float)width);
    const Floats least = mean + broadcast(deviation * *(const float*)op.data), zero = broadcast(0);
    each(width, [=](int64_t i, int count) {  // NaN, the second operand, stays NaN
        gate.set(i, count, max(zero, gate.get(i, count) - least));
    });
}

// Return the sum of the squares of a row.
template <class T>
static inline float squares_of(Row<T> row, int64_t width) {
    Floats squares = broadcast(0);
    each(width, [&](int64_t i, int count) {
        const Floats x = row.get(i, count);
        squares = fma(x, x, squares);
    });
    return sum_of(squares);
}

template <class T>
static void match(const Operation& op, const Program& program, const Step&, int64_t row) {
    const int64_t width = program.buffers[op.out].width;
    const Row<T> like = wide_or_narrow_row<T>(program, op.in, row), out = wide_or_narrow_row<T>(program, op.out, row);
    const float length = squares_of(like, width) / (float)width, its = squares_of(out, width) / (float)width;
    const Floats factor = broadcast(__builtin_sqrtf(length / (its < LEAST_SQUARE ? LEAST_SQUARE : its)));
    each(width, [=](int64_t i, int count) { out.set(i, count, out.get(i, count) * factor); });
}

// Return the sum of the rows of a matrix [num][num], each times one of the row's weights.
static inline Floats weighed(const float* matrix, int64_t num, const float* weights) {
    Floats total = broadcast(weights[0]) * load(matrix, (int)num);
    for (int64_t k = 1; k < num; k++) total = total + broadcast(weights[k]) * load(matrix + k * num, (int)num);
    return total;
}

template <class T>
static inline void find_weights(const Mixing& mixing, const Program& program, int64_t row, float* weights) {
    store(weights, 16, activate<TANH>(wide_or_narrow_row<T>(program, mixing.logits, row).get(0, (int)mixing.num)));
}

template <class T>
static void predict(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Mixing& mixing = *(const Mixing*)op.data;
    const int64_t num = mixing.num;
    float weights[16], factors[MAX_STREAMS][16], *streams[MAX_STREAMS];
    find_weights<T>(mixing, program, row, weights);
    for (int64_t i = 0; i < num; i++) {
        store(factors[i], 16, weighed(mixing.factors + i * num * num, num, weights));
        streams[i] = row_of<float>(program, op.out + (int32_t)i, row);
    }
    each(program.buffers[op.out].width, [&](int64_t at, int count) {
        Floats values[MAX_STREAMS];
        for (int64_t j = 0; j < num; j++) values[j] = load(streams[j] + at, count);
        for (int64_t i = 0; i < num; i++) {
            Floats total = values[i];
            for (int64_t j = 0; j < num; j++) total = total + broadcast(factors[i][j]) * values[j];
            store(streams[i] + at, count, total);
        }
    });
}

template <class T>
static void correct(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Mixing& mixing = *(const Mixing*)op.data;
    float weights[16], factors[16];
    find_weights<T>(mixing, program, row, weights);
    store(factors, 16, weighed(mixing.factors, mixing.num, weights) + broadcast(1));
    const Row<T> in = wide_or_narrow_row<T>(program, op.in, row);
    const float* first_stream = row_of<float>(program, op.out, row);
    each(program.buffers[op.out].width, [&](int64_t at, int count) {
        const Floats learnt = in.get(at, count) - load(first_stream + at, count);
        for (int64_t i = 0; i < mixing.num; i++) {
            float* stream = row_of<float>(program, op.out + (int32_t)i, row) + at;
            store(stream, count, load(stream, count) + broadcast(factors[i]) * learnt);
        }
    });
}
