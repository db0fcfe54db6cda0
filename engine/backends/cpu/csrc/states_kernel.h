// The operations of states.cpp in 16 lanes, for one set of instructions: states.cpp includes this file after its Floats.
// T is the type of a program's elements, bf16 or float.

template <class T>
static inline const T* in_row(const Program& program, const Operation& op, int64_t row) {
    const Buffer& in = program.buffers[op.in];
    return (const T*)in.data + row * in.width;
}

// Convolve `count` channels of a sequence from `first` on, and keep the latest inputs.
template <class T, bool GATED>
static void convolve_as(const Operation& op, const Program& program, const Step& step, int64_t sequence, int64_t first,
                        int64_t count) {
    const Convolve& c = *(const Convolve*)op.data;
    const StatePlace place = step.states[sequence];
    const int64_t width = program.buffers[op.out].width, start = step.batch->query_starts[sequence];
    const int64_t num_rows = step.batch->query_starts[sequence + 1] - start, num_latest = c.size - 1;
    float* latest = step.state_caches[c.layer]->latest + first;
    const float* source = latest + place.source * num_latest * width;
    const auto input = [&](int64_t time) {  // of a row; before the first one, of the tokens before
        if (time >= 0) {
            const T* in = in_row<T>(program, op, start + time) + first;
            return GATED ? load(in, count) * load(in + 2 * width, count) : load(in, count);
        }
        return place.source < 0 ? broadcast(0) : load(source + (num_latest + time) * width, count);
    };
    T* out = (T*)program.buffers[op.out].data + start * width + first;
    for (int64_t row = 0; row < num_rows; row++) {
        Floats sum = c.bias ? load(c.bias + first, count) : broadcast(0);
        for (int64_t i = 0; i < c.size; i++)
            sum = fma(input(row - num_latest + i), load(c.factors + i * width + first, count), sum);
        const T* factor = in_row<T>(program, op, start + row) + width + first;
        store(out + row * width, count, GATED ? sum * load(factor, count) : activate<SILU>(sum));
    }
    const auto keep = [&](int64_t slot, int64_t end) {  // in ascending order, as the slot may be the source
        for (int64_t i = 0; i < num_latest; i++)
            store(latest + (slot * num_latest + i) * width, count, input(end - num_latest + i));
    };
    if (place.kept_row >= 0) keep(place.kept_slot, place.kept_row + 1);
    keep(place.slot, num_rows);
}

template <class T>
static void convolve_channels(const Operation& op, const Program& program, const Step& step, int64_t sequence,
                              int64_t first, int64_t count) {
    const auto convolve = ((const Convolve*)op.data)->gated ? convolve_as<T, true> : convolve_as<T, false>;
    convolve(op, program, step, sequence, first, count);
}

// Return e^(-factor step).
static inline float decay_of(float factor, float step) {
    float lanes[16];
    store(lanes, 16, exp_of(broadcast(0) - broadcast(factor) * broadcast(step)));
    return lanes[0];
}

static inline float softplus_of(float x) {
    float lanes[16];
    store(lanes, 16, softplus(broadcast(x)));
    return lanes[0];
}

static inline float sigmoid_of(float x) {
    float lanes[16];
    store(lanes, 16, times_sigmoid(broadcast(1), broadcast(x)));
    return lanes[0];
}

static inline void widen(const float* from, int64_t num, float* to) { __builtin_memcpy(to, from, num * sizeof(float)); }
static inline void widen(const bf16* from, int64_t num, float* to) {
    for (int64_t i = 0; i < num; i += 16) {
        const int64_t count = num - i < 16 ? num - i : 16;
        store(to + i, count, load(from + i, count));
    }
}

// Compute what a head of a sequence gives in `count` columns from `first` on, at most 32: memory and values of a column
// depend on no other. Sums over the rows of a memory are of two halves, its even and its odd rows.
template <class T, bool IS_DELTA>
static void recur_as(const Operation& op, const Program& program, const Step& step, int64_t sequence, int64_t head,
                     int64_t first, int64_t count) {
    const Recur& d = *(const Recur*)op.data;
    const StatePlace place = step.states[sequence];
    const int64_t keys = d.key_size, size = d.value_size, start = step.batch->query_starts[sequence];
    const int64_t num_rows = step.batch->query_starts[sequence + 1] - start;
    const int64_t n = count < 16 ? count : 16, m = count - n;  // of two vectors
    float* memories = step.state_caches[d.layer]->memory + head * keys * size + first;
    const int64_t stride = d.num_value_heads * keys * size;
    float* memory = memories + place.slot * stride;
    const auto copy = [=](const float* from, float* to) {
        for (int64_t j = 0; j < keys; j++) {
            store(to + j * size, n, from ? load(from + j * size, n) : broadcast(0));
            if (m) store(to + j * size + 16, m, from ? load(from + j * size + 16, m) : broadcast(0));
        }
    };
    if (place.source != place.slot) copy(place.source < 0 ? nullptr : memories + place.source * stride, memory);
    const Buffer& rates = program.buffers[d.rates];
    const int64_t key_head = head / d.group % d.num_key_heads;
    float q[MAX_KEY_SIZE], k[MAX_KEY_SIZE];
    for (int64_t row = 0; row < num_rows; row++) {
        const T* in = in_row<T>(program, op, start + row);
        widen(in + key_head * keys, keys, q);
        widen(in + (d.num_key_heads + key_head) * keys, keys, k);
        const T* value = in + 2 * d.num_key_heads * keys + head * size + first;
        const T* its_rates = (const T*)rates.data + (start + row) * rates.width + head;
        float learns, forgets;
        widen(its_rates, 1, &learns);
        widen(its_rates + (IS_DELTA ? d.num_value_heads : 0), 1, &forgets);
        float its_step = softplus_of(forgets + d.step[head]);
        if (!IS_DELTA && its_step < d.least_step) its_step = d.least_step;
        if (!IS_DELTA && its_step > d.most_step) its_step = d.most_step;  // NaN stays NaN
        const Floats decay = broadcast(decay_of(d.decay[head], its_step));
        const Floats learned = broadcast(IS_DELTA ? sigmoid_of(learns) : its_step), zero = broadcast(0);
        Floats a[2] = {zero, zero}, b[2] = {zero, zero};
        for (int64_t j = 0; IS_DELTA && j < keys; j++) {
            const Floats key = broadcast(k[j]);
            a[j & 1] = fma(load(memory + j * size, n), key, a[j & 1]);
            if (m) b[j & 1] = fma(load(memory + j * size + 16, m), key, b[j & 1]);
        }
        const Floats own = load(value, n), next = m ? load(value + 16, m) : zero;
        const Floats change = (IS_DELTA ? own - (a[0] + a[1]) * decay : own) * learned;
        const Floats other = (IS_DELTA ? next - (b[0] + b[1]) * decay : next) * learned;
        a[0] = a[1] = b[0] = b[1] = zero;
        for (int64_t j = 0; j < keys; j++) {
            const Floats key = broadcast(k[j]), query = broadcast(q[j]);
            const Floats x = fma(key, change, load(memory + j * size, n) * decay);
            store(memory + j * size, n, x);
            a[j & 1] = fma(x, query, a[j & 1]);
            if (m) {
                const Floats y = fma(key, other, load(memory + j * size + 16, m) * decay);
                store(memory + j * size + 16, m, y);
                b[j & 1] = fma(y, query, b[j & 1]);
            }
        }
        T* out = (T*)program.buffers[op.out].data + (start + row) * program.buffers[op.out].width + head * size + first;
        const Floats skip = broadcast(IS_DELTA ? 0 : d.skip[head]);
        store(out, n, IS_DELTA ? a[0] + a[1] : fma(skip, own, a[0] + a[1]));
        if (m) store(out + 16, m, IS_DELTA ? b[0] + b[1] : fma(skip, next, b[0] + b[1]));
        if (row == place.kept_row) copy(memory, memories + place.kept_slot * stride);
    }
}

template <class T>
static void recur_columns(const Operation& op, const Program& program, const Step& step, int64_t sequence,
                          int64_t head, int64_t first, int64_t count) {
    const auto recur = ((const Recur*)op.data)->skip ? recur_as<T, false> : recur_as<T, true>;
    recur(op, program, step, sequence, head, first, count);
}

template <class T>
static constexpr StateOperations OPERATIONS = {convolve_channels<T>, recur_columns<T>};
static constexpr const StateOperations *FP32_OPERATIONS = &OPERATIONS<float>, *BF16_OPERATIONS = &OPERATIONS<bf16>;
