// Products in int8: rows of x are quantized as they come, and sums are integers.
//
// The weights of an output are whole multiples, -127 to 127, of its scale. The elements of a row are multiples of a scale
// of the row: its quantization depends on that row alone. Most multiples are -127 to 127. Up to one element in 128 may lie
// beyond, so that few outliers do not make the rest coarse: it is 128 times a far part plus a near part. The words of 4
// elements that have a far part are multiplied once more. Few outputs, those with by far the largest weights, are
// products of numbers that are not quantized, and so are few elements of all rows with their weights.
//
// Integer sums are exact, so that all variants and engine/model/int8.py, which says the same in torch, give the same bits:
//   y = (near + 128 far) * row scale * output scale, near and far being sums converted to fp32; then the products with
//   elements that are not quantized are added, one after the other; the rest as in bf16.
// Products that are not quantized have the same bits everywhere, too: exact_product sums in one order.
// AVX512-VNNI and AMX multiply signed with unsigned bytes, so packed weights have 128 added, which is subtracted with the
// sums of the rows. A row with an element that is not finite gives NaN. int8_kernel.h has all but the sums.

#include <stdlib.h>

#include "linear.h"
#include "team.h"

#if defined(__x86_64__)

constexpr int LEVEL = 20;    // the bits of a float from here on, without its sign: an eighth of an octave
constexpr int LEVELS = 48;   // a far part stays below 64

#define WITH_VNNI WITH_AVX512 ",avx512vnni"
BEGIN_INSTRUCTIONS(WITH_VNNI)

#define MULTIPLY_TILES "tdpbsud"
#include "linear_kernel.h"
#include "ints_avx512.h"
#include "int8_kernel.h"

struct Int8 {
    static constexpr int MAX_ROWS = 8;
    static __m512i dot(__m512i sum, __m512i x, __m512i weights) { return _mm512_dpbusd_epi32(sum, weights, x); }
    template <int R>
    static constexpr auto sum = sum_words<Int8, R>;
    static constexpr auto finish_sums = finish_int8;
};

void compute_int8(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    (p.linear.variant == INT8_AMX ? compute_tiles<Int8> : compute_vectors<Int8>)(p, from, to, panel, last);
}

END_INSTRUCTIONS

int last_int8_variant(bool has_amx) {
    if (!has_avx512() || !__builtin_cpu_supports("avx512vnni")) return 0;
    return has_amx ? INT8_AMX : INT8_VNNI;
}

namespace {

struct Memory {
    void* data = nullptr;
    int64_t size = 0;
    ~Memory() { free(data); }
};

thread_local Memory memory;  // of the rows that the thread has quantized last

struct Quantization {
    const Linear& linear;
    const uint8_t* x;
    int64_t size, x_bytes, max_far, row_bytes, rows, rows_a_chunk;
    QuantizedRow* quantized;
    QuantizedRow::Far* far;
    float *exact, *inputs;
    uint8_t* near;
    void (*quantize_row)(const Linear&, const void* x, int64_t size, int64_t max_far, int8_t* near, QuantizedRow&);
};

void quantize_chunk(void* job, int64_t chunk) {
    const Quantization& q = *(const Quantization*)job;
    for (int64_t i = chunk * q.rows_a_chunk; i < min_of(q.rows, (chunk + 1) * q.rows_a_chunk); i++) {
        QuantizedRow& row = q.quantized[i];
        row.far = q.far + i * q.max_far;
        row.exact = q.exact + i * q.linear.num_exact;
        row.inputs = q.inputs + i * q.linear.num_exact_inputs;
        const uint8_t* x = q.x + i * q.x_bytes;
        int8_t* near = (int8_t*)q.near + i * q.row_bytes;
        __builtin_memset(near + q.size, 0, q.row_bytes - q.size);
        q.quantize_row(q.linear, x, q.size, q.max_far, near, row);
    }
}

}  // namespace

void quantize_rows(Product& p, const void* x, bool wide) {
    const int64_t size = padded(p.linear.num_in, 32), max_far = (p.linear.num_in + 127) / 128;
    const int64_t num_exact = p.linear.num_exact;
    const int64_t each = p.row_bytes + sizeof(QuantizedRow) + max_far * sizeof(QuantizedRow::Far) +
                         (num_exact + p.linear.num_exact_inputs) * sizeof(float);
    if (memory.size < p.rows * each) {
        free(memory.data);
        memory.size = p.rows * each;
        memory.data = aligned_alloc(LINE, padded(memory.size, LINE));
    }
    auto* near = (uint8_t*)memory.data;
    auto* quantized = (QuantizedRow*)(near + p.rows * p.row_bytes);
    auto* far = (QuantizedRow::Far*)(quantized + p.rows);
    auto* exact = (float*)(far + p.rows * max_far);
    auto* inputs = exact + p.rows * num_exact;
    const int64_t rows_a_chunk = max_of(max_of(1, 32768 / size / (1 + num_exact)), p.rows / MAX_CHUNKS + 1);  // some 10 us
    Quantization q = {p.linear, (const uint8_t*)x, size, size * (wide ? 4 : 2), max_far, p.row_bytes, p.rows, rows_a_chunk,
                      quantized, far, exact, inputs, near,
                      wide ? quantize_row<true> : quantize_row<false>};
    run_chunks(quantize_chunk, &q, (p.rows + rows_a_chunk - 1) / rows_a_chunk, num_threads());
    p.x = near;
    p.quantized = quantized;
}

#else

void compute_int8(const Product&, int64_t, int64_t, int64_t, int64_t) {}
void quantize_rows(Product&, const void*, bool) {}
int last_int8_variant(bool) { return 0; }

#endif
