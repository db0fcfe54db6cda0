// The operations of a program that compute row by row, with AVX-512: embedding, norms, rotary, gates, sums.
//
// Each computes in fp32 and rounds to bf16 where engine/model/layers.py does, so that the two differ only by the order
// of sums: here lane j sums every 16th element in ascending order, and the lanes are folded in halves.

#include "program.h"

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX512)

#include "activation.h"

constexpr int64_t LANES = 16;

static inline __mmask16 mask_of(int64_t left) { return left < LANES ? (1 << left) - 1 : 0xffff; }

static inline __m512 load(__mmask16 mask, const bf16* p) {
    return widened(_mm256_maskz_loadu_epi16(mask, p));
}

static inline void store(bf16* p, __mmask16 mask, __m512 v) {
    _mm256_mask_storeu_epi16(p, mask, narrowed(v));
}

static inline __m512 rounded(__m512 v) { return widened(narrowed(v)); }

// Call visit(i, mask) for each 16 elements of a vector; the mask has those that there are.
template <class Visit>
static inline void each(int64_t width, Visit visit) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) visit(i, (__mmask16)0xffff);
    if (i < width) visit(i, mask_of(width - i));
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
    const __m512 scale = _mm512_set1_ps(table.scale);
    each(width, [=](int64_t i, __mmask16 mask) { store(to + i, mask, _mm512_mul_ps(load(mask, from + i), scale)); });
}

static void add_rows(const bf16* a, const bf16* b, bf16* out, int64_t width) {
    each(width, [=](int64_t i, __mmask16 mask) {
        store(out + i, mask, _mm512_add_ps(load(mask, a + i), load(mask, b + i)));
    });
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
    __m512 mean = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    if (norm.centred) {
        each(norm.width, [&](int64_t i, __mmask16 mask) { mean = _mm512_add_ps(mean, load(mask, in + i)); });
        mean = _mm512_set1_ps(_mm512_reduce_add_ps(mean) / width);
    }
    each(norm.width, [&](int64_t i, __mmask16 mask) {
        const __m512 x = _mm512_maskz_sub_ps(mask, load(mask, in + i), mean);
        squares = _mm512_fmadd_ps(x, x, squares);
    });
    const float factor = 1.f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + norm.eps);
    each(norm.width, [&](int64_t i, __mmask16 mask) {
        __m512 y = _mm512_mul_ps(_mm512_sub_ps(load(mask, in + i), mean), _mm512_set1_ps(factor));
        if (norm.weight) y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, norm.weight + i));
        if (norm.bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, norm.bias + i));
        store(out + i, mask, y);
    });
}

static void norm(const Operation& op, const Program& program, const Step&, int64_t row) {
    const Norm& norm = *(const Norm*)op.data;
    const bf16* in = row_of(program, op.in, row) + norm.first;
    bf16* out = row_of(program, op.out, row) + norm.first;
    for (int64_t i = 0; i < norm.count; i++) normalise(norm, in + i * norm.width, out + i * norm.width);
}

static void clamp(const Operation& op, const Program& program, const Step&, int64_t row) {
    const __m512 high = _mm512_set1_ps(*(const float*)op.data), low = _mm512_sub_ps(_mm512_setzero_ps(), high);
    const bf16* in = row_of(program, op.in, row);
    bf16* out = row_of(program, op.out, row);
    each(program.buffers[op.out].width, [=](int64_t i, __mmask16 mask) {  // NaN, the second operand, stays NaN
        store(out + i, mask, _mm512_max_ps(low, _mm512_min_ps(high, load(mask, in + i))));
    });
}

static void rotate(const Operation& op, const Program& program, const Step& step, int64_t row) {
    const Rotation& rotation = *(const Rotation*)op.data;
    const int64_t num_pairs = rotation.num_pairs;
    const float* cosines = rotation.waves + step.positions[row] * 2 * num_pairs;
    bf16* heads = row_of(program, op.out, row);
    for (int64_t h = 0; h < rotation.num_heads; h++) {
        bf16 *first = heads + h * rotation.head_size, *second = first + num_pairs;
        each(num_pairs, [=](int64_t i, __mmask16 mask) {
            const __m512 a = load(mask, first + i), b = load(mask, second + i);
            const __m512 cosine = _mm512_maskz_loadu_ps(mask, cosines + i);
            const __m512 sine = _mm512_maskz_loadu_ps(mask, cosines + num_pairs + i);
            store(first + i, mask, _mm512_sub_ps(_mm512_mul_ps(a, cosine), _mm512_mul_ps(b, sine)));
            store(second + i, mask, _mm512_add_ps(_mm512_mul_ps(b, cosine), _mm512_mul_ps(a, sine)));
        });
    }
}

template <int ACTIVATION>
static void gate_row(const bf16* in, bf16* out, int64_t width) {
    each(width, [=](int64_t i, __mmask16 mask) {
        const __m512 gate = rounded(activate<ACTIVATION>(load(mask, in + i)));
        store(out + i, mask, _mm512_mul_ps(gate, load(mask, in + width + i)));
    });
}

typedef void (*GateRow)(const bf16* in, bf16* out, int64_t width);
static const GateRow GATE_ROWS[NUM_ACTIVATIONS] = {gate_row<IDENTITY>, gate_row<GELU>,  gate_row<GELU_TANH>,
                                                   gate_row<GELU_SIGMOID>, gate_row<RELU>, gate_row<RELU2>,
                                                   gate_row<SILU>,     gate_row<TANH>};

static void gate(const Operation& op, const Program& program, const Step&, int64_t row) {
    GATE_ROWS[*(const int32_t*)op.data](row_of(program, op.in, row), row_of(program, op.out, row),
                                        program.buffers[op.out].width);
}

END_INSTRUCTIONS

const RowOperation ROW_OPERATIONS[NUM_KINDS] = {nullptr, nullptr, embed, add_position, norm, clamp, rotate, gate, add};

#else

const RowOperation ROW_OPERATIONS[NUM_KINDS] = {};

#endif
